"""Figures of the pages docs/results/critic.md, insight.md, real-text.md and worlds.md, from the tables of these pages.

python examples/benchmarks/result_figures.py            # all four, into docs/figures
python examples/benchmarks/result_figures.py critic     # one of them
"""

import argparse
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


DRAWINGS = {"critic": draw_critic, "insight": draw_insight, "real-text": draw_real_text, "worlds": draw_worlds}


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
