"""Which details of PPO matter on control, and which on text? Each is switched alone, on six tasks, by one class.

python examples/studies/details.py                     # every run: about two hours of a core
python examples/studies/details.py --seeds 1           # the first seed
python examples/studies/details.py --table             # the runs so far
python examples/studies/details.py --figure docs/figures/details.svg --json docs/results/data/details.json

The base of each task is its preset in `algos.presets`. The effect of a detail is what having it gains in the mean
return over the whole training; the unit is what the base gains by training. A run is a line of runs/details.jsonl,
and is not repeated.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium
import numpy as np
import torch

import textenv  # noqa: F401 (registers textenv/Reviews-v0)
from algos import PPO, LMPolicy, MLPPolicy, PPOConfig, presets
from algos.config import discount
from textenv import TokenVectorEnv

sys.path += [str(Path(__file__).parents[1] / "benchmarks"), str(Path(__file__).parents[1])]
from conversation import Interview
from page import DATA, save_table_of_runs
from pictures import COLOURS, new_figure, read_table, save
from recorded_runs import RunFile, mean_and_range, print_table

RUNS = RunFile(Path("runs/details.jsonl"), ("task", "detail", "seed"), clock=time.process_time)
BASE = "base"
UNLIMITED = 1e9
"""A limit that nothing reaches."""


def train_control(env_id, config, total_steps, *, num_envs, normalize_observations=False, **env_kwargs):
    """Return the steps and mean return of each iteration of a training in classic control or MiniGrid."""
    env = gymnasium.make_vec(env_id, num_envs=num_envs, **env_kwargs)
    policy = MLPPolicy(
        env.single_observation_space,
        env.single_action_space,
        normalize_observations=normalize_observations,
        seed=config.seed,
    )
    history = PPO(env, policy, config).learn(total_steps)
    env.close()
    return [(row["steps"], row["episode/return"]) for row in history if "episode/return" in row]


def train_text(env_id, config, total_steps, *, kl_coef):
    """Return the steps and mean return, with the KL charged, of each iteration of a training on texts."""
    env = gymnasium.make_vec(env_id, num_envs=64, kl_coef=kl_coef)
    history = PPO(env, LMPolicy.load("embedded", seed=config.seed), config).learn(total_steps)
    return [(row["steps"], row["episode/penalised_return"]) for row in history]


def train_conversation(config, total_steps):
    """The same in a conversation of three questions."""
    policy = LMPolicy.load("embedded", seed=config.seed)
    env = TokenVectorEnv(Interview, tokenizer=policy.tokenizer, num_envs=64, max_new_tokens=12, max_length=96)
    history = PPO(env, policy, config, kl_coef=0.01).learn(total_steps)
    return [(row["steps"], row["episode/penalised_return"]) for row in history]


def empty_room(config, total_steps):
    """The same in MiniGrid."""
    from minigrid.wrappers import FlatObsWrapper

    return train_control(
        "MiniGrid-Empty-Random-5x5-v0",
        config,
        total_steps,
        num_envs=8,
        normalize_observations=True,
        wrappers=[FlatObsWrapper],
    )


@dataclass(frozen=True)
class Task:
    """A task with the preset that is its base."""

    train: Callable[..., list[tuple[int, float]]]
    config: PPOConfig
    total_steps: int
    rollout_size: int
    """Steps of a rollout, or its answers: a minibatch of this size is the whole rollout."""
    is_text: bool

    @property
    def base(self):
        """The preset, with defaults that differ between control and text written out."""
        eps = 1e-5
        if self.is_text:
            eps = 1e-8
        final_rate = self.config.final_learning_rate
        if final_rate is None:
            final_rate = self.config.learning_rate
        return replace(
            self.config,
            gamma=discount(self.config.gamma),
            adam_eps=eps,
            bootstrap_truncated=not self.is_text,
            final_learning_rate=final_rate,
        )


TASKS = {
    "CartPole": Task(
        lambda config, steps: train_control("CartPole-v1", config, steps, num_envs=16),
        presets.CARTPOLE, 35_000, 16 * 64, is_text=False,
    ),
    "Acrobot": Task(
        lambda config, steps: train_control("Acrobot-v1", config, steps, num_envs=16, normalize_observations=True),
        presets.ACROBOT, 100_000, 16 * 128, is_text=False,
    ),
    "Empty room": Task(empty_room, presets.MINIGRID, 25_000, 8 * 128, is_text=False),
    "Reviews": Task(
        lambda config, steps: train_text("textenv/Reviews-v0", config, steps, kl_coef=0.1),
        presets.TEXT_EMBEDDED, 24_000, 128, is_text=True,
    ),
    "Periods": Task(
        lambda config, steps: train_text("textenv/Periods-v0", config, steps, kl_coef=0.001),
        presets.TEXT_EMBEDDED, 45_000, 128, is_text=True,
    ),
    "Interview": Task(train_conversation, presets.TEXT_EMBEDDED, 45_000, 128, is_text=True),
}  # fmt: skip


@dataclass(frozen=True)
class Detail:
    """A detail: the fields of a config that has it, and of one that lacks it. The base is one of the two."""

    having: dict[str, object]
    lacking: dict[str, object]

    def change(self, base):
        """Return the config that is not the base, and whether that one has the detail."""
        if replace(base, **self.having) == base:
            return replace(base, **self.lacking), False
        assert replace(base, **self.lacking) == base, f"the base neither has nor lacks {self}"
        return replace(base, **self.having), True


def details_of(task):
    """Return the details by name, as they are on a task."""
    # What a base lacks is had by: a rate that falls to 0, a discount of .99
    base = task.base
    final_rate = base.final_learning_rate
    if final_rate == base.learning_rate:
        final_rate = 0.0
    below_1 = min(base.gamma, 0.99)

    # An empty dict stands for the base
    return {
        "advantages normalized": Detail({}, {"normalize_advantage": False}),
        "rewards scaled": Detail({"normalize_rewards": True}, {"normalize_rewards": False}),
        "a critic": Detail({}, {"vf_coef": 0.0, "fit_value_head": False, "gae_lambda": 1.0}),
        "λ below 1": Detail({}, {"gae_lambda": 1.0}),
        "λ above 0": Detail({}, {"gae_lambda": 0.0}),
        "discount": Detail({"gamma": below_1}, {"gamma": 1.0}),
        "several epochs": Detail({}, {"num_epochs": 1}),
        "several minibatches": Detail({}, {"minibatch_size": task.rollout_size}),
        "ratio clipped": Detail({}, {"clip_range": UNLIMITED}),
        "value clipped": Detail({"clip_range_vf": 0.2}, {}),
        "gradient clipped": Detail({}, {"max_grad_norm": UNLIMITED}),
        "entropy bonus": Detail({"ent_coef": 0.01}, {}),
        "rate annealed": Detail({"final_learning_rate": final_rate}, {"final_learning_rate": base.learning_rate}),
        "Adam's ε 1e-5": Detail({"adam_eps": 1e-5}, {"adam_eps": 1e-8}),
        "last state bootstrapped": Detail({"bootstrap_truncated": True}, {"bootstrap_truncated": False}),
    }


def mean_of_curve(points, total_steps):
    """Return the mean return over the training: 200 points of the curve between its iterations."""
    steps, returns = zip(*points, strict=True)
    return float(np.interp(np.linspace(0, total_steps, 200), steps, returns).mean())


def run(*, task, detail, seed):
    """Train; return the first return, the last tenth's and the mean over the training."""
    chosen_task = TASKS[task]
    total_steps = chosen_task.total_steps
    config = chosen_task.base
    if detail != BASE:
        config, _ = details_of(chosen_task)[detail].change(config)
    points = chosen_task.train(replace(config, seed=seed), total_steps)
    last = [value for steps, value in points if steps > 0.9 * total_steps]
    return {
        "first": points[0][1],
        "last": statistics.mean(last or [points[-1][1]]),
        "mean": mean_of_curve(points, total_steps),
    }


def settings_of(seeds, tasks):
    """Settings of all runs, one seed of everything after the other."""
    return [
        {"task": task, "detail": detail, "seed": seed}
        for seed in seeds
        for task in tasks
        for detail in (BASE, *details_of(TASKS[task]))
    ]


def effects(runs, measure="mean"):
    """Return by detail and task: what having the detail gains, for each seed.

    The unit is what the base gains: its mean over the training (or its last returns) minus its first return.
    """
    gains = {}
    for task_name, task in TASKS.items():
        seeds = sorted(seed for name, detail, seed in runs if (name, detail) == (task_name, BASE))
        if not seeds:
            continue
        base = {seed: runs[task_name, BASE, seed] for seed in seeds}
        unit = statistics.mean(entry[measure] - entry["first"] for entry in base.values())
        if unit <= 0:  # the base has learnt nothing, so there is nothing to compare with
            continue
        for detail_name, detail in details_of(task).items():
            _, has_it = detail.change(task.base)
            sign = 2 * has_it - 1
            values = []
            for seed in seeds:
                if (task_name, detail_name, seed) in runs:
                    changed = runs[task_name, detail_name, seed][measure]
                    values.append(sign * (changed - base[seed][measure]) / unit)
            if values:
                gains.setdefault(detail_name, {})[task_name] = values
    return gains


def by_size(gains):
    """Details in the order of their largest mean effect on a task."""
    return sorted(gains, key=lambda name: -max(abs(statistics.mean(values)) for values in gains[name].values()))


def table(runs):
    """Columns and rows: a row for each detail, a column for each task."""
    gains = effects(runs)
    tasks = [name for name in TASKS if any(name in by_task for by_task in gains.values())]
    rows = []
    for detail_name in by_size(gains):
        cells = [detail_name]
        for task_name in tasks:
            cells.append(_cell(gains[detail_name].get(task_name)))
        rows.append(cells)
    return ["detail", *tasks], rows


def _cell(values):
    if values is None:
        return "–"
    return mean_and_range(values, "+.2f")


def bases(runs):
    """Columns and rows: what the base reaches on each task."""
    rows = []
    for task_name, task in TASKS.items():
        entries = [entry for (name, detail, _), entry in runs.items() if (name, detail) == (task_name, BASE)]
        if not entries:
            continue
        cells = [task_name, f"{task.total_steps:,}", str(len(entries))]
        for measure in ("first", "mean", "last"):
            cells.append(f"{statistics.mean(entry[measure] for entry in entries):.3g}")
        cells.append(f"{statistics.mean(entry['seconds'] for entry in entries):.0f}")
        rows.append(cells)
    return ["task", "steps", "seeds", "first return", "mean over the training", "last tenth", "CPU seconds"], rows


def read_effects(path):
    """Return the tasks and details of the page's table, and the mean effects ``[details, tasks]``; NaN for a dash."""
    tasks, rows = read_table(path)
    means = [[numbers[0] if numbers else np.nan for numbers in cells] for cells in rows.values()]
    return tasks, list(rows), np.array(means)


def draw(path, data=DATA / "details.json"):
    """Draw the page's table as a matrix, and beside it the mean effect on control and on text of each detail."""
    tasks, details, effect = read_effects(data)
    figure, (left, right) = new_figure("details", columns=2, size=(14, 7), width_ratios=[1.15, 1])
    draw_matrix(left, tasks, details, effect)
    draw_comparison(right, tasks, details, effect)
    save(figure, path)


def draw_matrix(axes, tasks, details, effect):
    """Draw a coloured cell for each detail and task; effects beyond ± 1 have the colour of ± 1."""
    axes.imshow(effect, cmap="PuOr_r", vmin=-1, vmax=1, aspect="auto")
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_yticks(range(len(details)), details)
    for (row, column), value in np.ndenumerate(effect):
        if np.isfinite(value):
            colour = "white" if abs(value) > 0.7 else "black"
            axes.text(column, row, f"{value:+.2f}", ha="center", va="center", color=colour)
    num_control = sum(not TASKS[name].is_text for name in tasks)
    axes.axvline(num_control - 0.5, color="black", lw=1.5)
    axes.set_title("What the detail gains (1: as much as the training)")


OFFSETS = {"entropy bonus": (-5, 3), "value clipped": (5, -12), "rewards scaled": (5, -13), "discount": (5, -7)}
"""Where the names of points stand that others would cover, in points from the point."""


def draw_comparison(axes, tasks, details, effect):
    """Draw a point for each detail: its mean effect on text over that on control."""
    is_text = np.array([TASKS[name].is_text for name in tasks])
    on_control = np.nanmean(effect[:, ~is_text], axis=1)
    on_text = np.nanmean(effect[:, is_text], axis=1)
    axes.axhline(0, color="0.8", lw=1)
    axes.axvline(0, color="0.8", lw=1)
    axes.scatter(on_control, on_text, color=COLOURS[0])
    axes.set(xlabel="mean over the control tasks", ylabel="mean over the text tasks")
    axes.set_title("Control against text")
    for name, x, y in zip(details, on_control, on_text, strict=True):
        offset = OFFSETS.get(name, (5, 3))
        side = "left" if offset[0] > 0 else "right"
        axes.annotate(name, (x, y), xytext=offset, textcoords="offset points", ha=side, fontsize=9)


def write_tables(runs, path):
    """Write the table of effects to a file, and that of the bases beside it."""
    command = "python examples/studies/details.py"
    save_table_of_runs(path, *table(runs), command, kinds=["text"])
    save_table_of_runs(path.with_stem(f"{path.stem}-base"), *bases(runs), command, kinds=["text"])


def main():
    """Run what is missing, or print, write and draw what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--table", action="store_true", help="print the runs so far")
    parser.add_argument("--json", type=Path, help="write the runs so far to NAME.json and NAME-base.json")
    parser.add_argument("--figure", type=Path, help="draw the table of docs/results, or of --json, into this SVG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not (options.table or options.figure or options.json):
        seeds = [int(seed) for seed in options.seeds.split(",")]
        for entry in RUNS.run_missing(settings_of(seeds, options.tasks.split(",")), run):
            print(*entry.values(), flush=True)
        return

    # Tables of the runs so far
    if options.table or options.json:
        runs = RUNS.read()
        if not runs:
            parser.exit(2, f"{RUNS.path} has no runs: run the study first\n")
        if options.table:
            print_table(*bases(runs))
            print()
            print_table(*table(runs))
            print()
        if options.json:
            write_tables(runs, options.json)

    # The figure needs no runs
    if options.figure:
        draw(options.figure, options.json or DATA / "details.json")


if __name__ == "__main__":
    main()
