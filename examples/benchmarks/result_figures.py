"""Figures of pages of docs/results, from the tables of these pages.

python examples/benchmarks/result_figures.py            # all, into docs/figures
python examples/benchmarks/result_figures.py critic     # one of them
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from page import DATA, ROOT
from pictures import COLOURS, new_figure, read_table, save


def draw_with_ranges(axes, groups, series):
    """Draw each series' means as dots beside each other in every group, with a line from smallest to largest.

    Args:
        axes: of matplotlib.
        groups: names below the horizontal axis.
        series: for each name in the legend its cells, one a group: mean, smallest and largest; only a mean; or nothing.
    """
    step = 0.7 / len(series)
    for i, (label, cells) in enumerate(series.items()):
        shift = (i - (len(series) - 1) / 2) * step
        places = [j + shift for j, cell in enumerate(cells) if cell]
        means = [cell[0] for cell in cells if cell]
        axes.plot(places, means, "o", color=COLOURS[i], label=label)
        ranges = [(min(cell), max(cell)) for cell in cells if cell]
        for x, (low, high) in zip(places, ranges, strict=True):
            axes.plot([x, x], [low, high], color=COLOURS[i], lw=2)
    axes.set_xticks(range(len(groups)), groups)


def draw_critic(path):
    """Draw the mean return over the training of five methods on five tasks."""
    columns, rows = read_table(DATA / "credit.json")
    tasks = {
        "reviews": "reviews:\nshort answers",
        "stops, dense": "stops, dense:\nlong, paid at once",
        "stops, late": "stops, late:\nlong, paid at the end",
        "talk, dense": "talk, dense:\nthree answers",
        "talk, late": "talk, late:\nthe same, paid\nat the end",
    }
    methods = ["PPO", "GRPO", "PPO, one step", "RLOO", "PPO, own critic"]
    series = {method: [rows[task][columns.index(method)] for task in tasks] for method in methods}
    figure, axes = new_figure("critic", size=(9, 4.2))
    draw_with_ranges(axes, list(tasks.values()), series)
    axes.set(ylim=(0, 1), ylabel="return over the training\n(1: the best possible)")
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=5)
    save(figure, path)


def draw_real_text(path):
    """Draw the reward of SmolLM2's film reviews and the two judges, before and after three algorithms."""
    columns, rows = read_table(DATA / "film-reviews.json")
    names = {
        "reward: VADER": "the reward\n(VADER)",
        "judge: SST-2 (MiniLM)": "a judge\n(SST-2, MiniLM)",
        "judge: SmolLM2 itself, asked": "a judge\n(SmolLM2 itself, asked)",
    }
    methods = ["before", "PPO", "GRPO", "RLOO"]
    series = {method: [rows[name][columns.index(method)] for name in names] for method in methods}
    figure, axes = new_figure("real-text", size=(7, 3.5))
    draw_with_ranges(axes, list(names.values()), series)
    axes.set(ylim=(0, 1), ylabel="mean over unseen beginnings")
    axes.legend(frameon=False, loc="upper center", ncols=4)
    save(figure, path)


def draw_worlds(path):
    """Draw the steps that each shaped reward needs on CartPole: every seed, and the mean."""
    _, rows = read_table(DATA / "shaped-rewards.json")
    figure, axes = new_figure("worlds", size=(7, 3))
    for i, (mean, *seeds) in enumerate(cells[0] for cells in rows.values()):
        axes.plot(seeds, [i] * len(seeds), "o", color=COLOURS[0], alpha=0.5)
        axes.plot([mean, mean], [i - 0.3, i + 0.3], color=COLOURS[1], lw=2)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set(xlim=(0, None), xlabel="steps until an episode lasts 475 (dots: seeds; line: mean)")
    save(figure, path)


def draw_insight(path):
    """Draw the correlations between runs of the changes of SmolLM2's heads."""
    cases, rows = read_table(DATA / "insight-heads.json")
    figure, axes = new_figure("insight", size=(7, 4.5))
    correlations = [[float("nan")] * len(cases) for _ in cases]
    for i, case in enumerate(cases):
        for j, cell in enumerate(rows[case]):
            if not cell:
                continue
            correlations[i][j] = correlations[j][i] = cell[0]
    image = axes.imshow(correlations, cmap="RdBu", vmin=-1, vmax=1)
    for i, line in enumerate(correlations):
        for j, correlation in enumerate(line):
            axes.text(j, i, f"{correlation:+.2f}", ha="center", va="center", color="white")
    axes.set_xticks(range(len(cases)), [case.replace(", ", ",\n") for case in cases])
    axes.set_yticks(range(len(cases)), cases)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9)
    figure.colorbar(image, ax=axes, label="correlation of the heads' changes")
    save(figure, path)


def draw_control(path):
    """Draw returns relative to those of others: the mean, and a line over what the table has of its spread."""
    lines = []
    for name, ours, others in (*_classic_lines(), *_mujoco_lines(), *_off_policy_lines(), *_minigrid_lines()):
        if ours and others:  # both were measured
            lines.append((name, ours, others[0]))
    figure, axes = new_figure("control", size=(10.3, 4.5))
    axes.axvline(0, color="0.3", lw=1)
    for height, (_, ours, published) in enumerate(lines):
        mean, *spread = (100 * (value - published) / abs(published) for value in ours)
        ends = [mean, *spread]
        axes.plot([min(ends), max(ends)], [height, height], color=COLOURS[0], lw=2)
        inside = COLOURS[0] if spread else "white"
        axes.plot(mean, height, "o", color=COLOURS[0], markerfacecolor=inside)
    axes.set_yticks(range(len(lines)), [name for name, *_ in lines], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("difference from the other return, %")
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    save(figure, path)


def _classic_lines():
    """Of classic control: name, our mean with the ends of its interval or with each seed, and what is published."""
    _, rows = read_table(DATA / "classic.json")
    for name, (_, ours, published) in rows.items():
        yield name, ours, published


def _mujoco_lines():
    """The same of MuJoCo: the mean, and the standard deviation to both sides."""
    _, rows = read_table(DATA / "mujoco.json")
    for name, ((mean, deviation), published, *_) in rows.items():
        yield f"{name}, PPO", [mean, mean - deviation, mean + deviation], published


def _off_policy_lines():
    """The same of SAC and TD3, beside rl-baselines3-zoo and beside Stable-Baselines3."""
    _, rows = read_table(DATA / "off-policy-zoo.json")
    for name, (ours, published) in rows.items():
        yield name, _without_single_seed(ours), published
    _, rows = read_table(DATA / "off-policy-returns.json")
    for name, (ours, _, theirs, _) in rows.items():
        _, _, steps = name.split(", ")
        if steps != "3,000 steps":  # in the middle of a training
            yield name, _without_single_seed(ours), theirs


def _without_single_seed(mean_and_seeds):
    """The mean alone if there is one seed, which is the mean."""
    if len(mean_and_seeds) == 2:
        return mean_and_seeds[:1]
    return mean_and_seeds


def _minigrid_lines():
    """The same of MiniGrid: the mean and each seed."""
    _, rows = read_table(DATA / "minigrid.json")
    for name, (ours, published) in rows.items():
        game, *steps = name.split(", ")
        yield ", ".join([game, "PPO", *steps]), ours, published


def draw_distillation(path):
    """Draw the KL divergence from the teacher, and the share of grammatical answers, of each way and seed."""
    columns, rows = read_table(DATA / "distillation.json")
    figure, (left, right) = new_figure("distillation", columns=2, size=(8, 2.8), sharey=True)
    for axes, column in ((left, "KL, nats a token"), (right, "grammatical")):
        for height, cells in enumerate(rows.values()):
            seeds = cells[columns.index(column)]
            axes.plot(seeds, [height] * len(seeds), "o", color=COLOURS[height], alpha=0.7)
        axes.grid(axis="x", color="0.9")
        axes.set_axisbelow(True)
    left.set_yticks(range(len(rows)), [name.strip("`") for name in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)
    left.set_xscale("log")
    ticks = [0.02, 0.05, 0.1, 0.2, 0.3]
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    left.set_xlabel("KL to the teacher, nats a token")
    right.set_xlabel("share of grammatical answers")
    save(figure, path)


def draw_memory(path):
    """Draw the estimated share of the measured peak of memory, of each run on a CPU and on a GPU."""
    _, on_cpu = read_table(DATA / "plan-check.json")
    _, on_gpu = read_table(DATA / "plan-check-gpu.json")
    figure, axes = new_figure("memory", size=(7, 2.8))
    axes.axvline(1, color="0.3", lw=1)
    for i, (label, rows) in enumerate({"on a CPU": on_cpu, "on a GPU": on_gpu}.items()):
        shares = [cells[-1][0] for cells in rows.values()]
        axes.plot(shares, range(len(rows)), "oD"[i], color=COLOURS[i], label=label)
    axes.set_yticks(range(len(on_cpu)), list(on_cpu))
    axes.set_ylim(len(on_cpu) - 0.5, -0.5)
    axes.set(xlim=(0.8, 1.1), xlabel="estimate / measured (below 1: the estimate is too low)")
    axes.legend(frameon=False, loc="center left")
    save(figure, path)


def draw_prompts_and_rewards(path):
    """Draw the success at the end of training of each way to choose prompts, on two tasks."""
    columns, rows = read_table(DATA / "sampling.json")
    tasks = {
        "mixed, at the end": "mixed: six of ten prompts\nteach nothing",
        "steps, at the end": "steps: all can be learnt",
    }
    series = {}
    for name, cells in rows.items():
        series[name.replace("`", "")] = [cells[columns.index(task)] for task in tasks]
    figure, axes = new_figure("prompts-and-rewards", size=(8, 3.5))
    draw_with_ranges(axes, list(tasks.values()), series)
    axes.set(ylim=(0, 1.05), ylabel="success after 30,000 tokens")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
    save(figure, path)


def draw_scaling(path):
    """Draw the speed-up by more processes, measured and simulated, on three tasks."""
    rows = json.loads((DATA / "scaling.json").read_text(encoding="utf-8"))["rows"]
    labels = {"cartpole": "CartPole", "5 ms": "CartPole that computes for 5 ms a step", "text": "tiny text"}
    figure, axes = new_figure("scaling", size=(7, 3.5))
    for i, (task, label) in enumerate(labels.items()):
        processes = []
        measured = []
        simulated = []
        for name, count, speed, _, simulated_speed, _ in rows:
            if name == task:
                processes.append(int(count))
                measured.append(float(speed.replace(",", "")))
                simulated.append(float(simulated_speed.replace(",", "")))
        axes.plot(processes, [speed / measured[0] for speed in measured], "o-", color=COLOURS[i], label=label)
        axes.plot(processes, [speed / simulated[0] for speed in simulated], "--", color=COLOURS[i])
    axes.axhline(1, color="0.3", lw=1)
    axes.axvline(2, color="0.8", lw=1)
    axes.set_xticks([1, 2, 4])
    axes.set(ylim=(0, None), xlabel="processes, on two cores", ylabel="speed-up")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
    save(figure, path)


DRAWINGS = {
    "control": draw_control,
    "critic": draw_critic,
    "distillation": draw_distillation,
    "insight": draw_insight,
    "memory": draw_memory,
    "prompts-and-rewards": draw_prompts_and_rewards,
    "real-text": draw_real_text,
    "scaling": draw_scaling,
    "worlds": draw_worlds,
}


def main():
    """Draw the figures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DRAWINGS)}; all if none is named")
    options = parser.parse_args()
    if unknown := set(options.names) - DRAWINGS.keys():
        parser.error(f"there is no figure {', '.join(sorted(unknown))}, only {', '.join(DRAWINGS)}")
    for name in options.names or DRAWINGS:
        DRAWINGS[name](ROOT / "docs" / "figures" / f"{name}.svg")


if __name__ == "__main__":
    main()
