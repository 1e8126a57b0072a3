"""The README's figure: one environment, played by a network and by a language model; and the language model's frontier.

python examples/front_page.py docs/figures/front_page.svg     # 4 minutes on one core

Above: FrozenLake-v1 without slipping (Gymnasium), one of its observations as each policy gets it, and what it does
there after the training. Below: returns of both in training, and what PPO on texts gains for the KL that it pays.
"""

import sys
import textwrap
from dataclasses import replace

import gymnasium
import matplotlib
import matplotlib.patches
import numpy as np
import torch
from matplotlib.figure import Figure

import textenv  # noqa: F401 (registers textenv/Reviews-v0)
from algos import PPO, LMPolicy, WordsPolicy, make_policy, presets

SEEDS = range(1, 6)
FRONTIER_SEEDS = range(1, 4)
COEFFICIENTS = (0.02, 0.1, 0.4, 0.8)
STEPS = 20_000
TEXT_STEPS = 40_000
SQUARE = 4
"""The observation that is shown: row 1, column 0."""
WORDS = ("left", "down", "right", "up")
BLUE, ORANGE = "#0072b2", "#d55e00"  # told apart by colour-blind people
COLOURS = {"S": "#f4f4f4", "F": "#dcecf7", "H": "#7f8fa6", "G": "#f0c75e"}


def lake():
    """FrozenLake-v1 of 4 by 4 squares, without slipping, 16 at once."""
    return gymnasium.make_vec("FrozenLake-v1", num_envs=16, is_slippery=False, vectorization_mode="sync")


def train_on_lake(policy, config, seed, total_steps):
    """Train; return steps and returns of each iteration."""
    history = PPO(lake(), policy, replace(config, seed=seed)).learn(total_steps)
    return np.array([(row["steps"], row["episode/return"]) for row in history if "episode/return" in row])


def probabilities(policy):
    """Probability of each action at the square that is shown."""
    step = policy.act(np.full(4_000, SQUARE))
    return np.bincount(np.asarray(step.action), minlength=len(WORDS)) / 4_000


def reviews(kl_coef, seed, total_steps):
    """KL and score of each iteration of a training on reviews."""
    env = gymnasium.make_vec("textenv/Reviews-v0", num_envs=64, kl_coef=kl_coef)
    history = PPO(env, LMPolicy.load("embedded", seed=seed), replace(presets.TEXT, seed=seed)).learn(total_steps)
    return np.array([(max(row["reference/kl"], 0.0), row["episode/return"]) for row in history])


def draw_map(axes):
    """The squares of the lake, and where the walker stands."""
    squares = lake().envs[0].unwrapped.desc.astype(str)
    for row, letters in enumerate(squares):
        for column, letter in enumerate(letters):
            axes.add_patch(
                matplotlib.patches.Rectangle((column, -row - 1), 1, 1, color=COLOURS[letter], ec="white", lw=2)
            )
            label = {"S": "start", "H": "hole", "G": "goal"}.get(letter, "")
            axes.text(column + 0.5, -row - 0.5, label, ha="center", va="center", fontsize=10)
            axes.text(column + 0.06, -row - 0.06, 4 * row + column, va="top", fontsize=8, color="#555555")
    axes.plot(SQUARE % 4 + 0.5, -(SQUARE // 4) - 0.5, "o", color="black", ms=14)
    axes.set(xlim=(0, 4), ylim=(-4, 0), aspect="equal", title="one environment: FrozenLake")
    axes.axis("off")


def draw_mind(axes, *, title, sees, choices, colour):
    """What a policy gets, and the probabilities of its actions after the training."""
    axes.set_title(title, color=colour, weight="bold")
    axes.text(0, 1.0, sees, va="top", transform=axes.transAxes, fontsize=10.5)
    below = axes.inset_axes((0.12, 0.0, 0.8, 0.5))
    places = range(len(WORDS))
    below.barh(places, choices, color=colour)
    below.set_yticks(places, WORDS)
    below.set(xlim=(0, 1), xticks=(0, 1), xlabel="probability after training")
    below.invert_yaxis()
    axes.axis("off")


def draw_curves(axes, curves, title, colour):
    """The mean over the seeds, and each seed."""
    grid = np.linspace(max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves), 100)
    for curve in curves:
        axes.plot(*curve.T, color=colour, alpha=0.25, lw=1)
    mean = np.mean([np.interp(grid, *curve.T) for curve in curves], axis=0)
    axes.plot(grid, mean, color=colour, lw=2.5, label=title)


def draw_frontier(axes, trained):
    """KL and score, means over the last quarter of each training: dots; their means over the seeds: the line."""
    ends = {coef: [run[-len(run) // 4 :].mean(0) for run in runs] for coef, runs in trained.items()}
    start = np.mean([run[0] for runs in trained.values() for run in runs], axis=0)
    axes.scatter(*np.concatenate(list(ends.values())).T, s=12, color=ORANGE, alpha=0.4, lw=0)
    means = sorted((np.mean(each, axis=0) for each in ends.values()), key=lambda point: point[0])
    axes.plot(*np.array([start, *means]).T, "o-", color=ORANGE, lw=2)
    axes.annotate("before training", start, (6, -3), textcoords="offset points")
    for coef, each in ends.items():
        label = f"kl_coef = {coef:g}" if coef == max(ends) else f"{coef:g}"
        axes.annotate(label, np.mean(each, axis=0), (5, -13), textcoords="offset points")
    axes.set(title="another task, film reviews: reward and distance", ylabel="reward: how positive a review is")
    axes.set(xlabel="KL divergence from the model before training (nats per answer)")
    axes.margins(x=0.12)


def main(
    path, seeds=SEEDS, frontier_seeds=FRONTIER_SEEDS, coefficients=COEFFICIENTS, steps=STEPS, text_steps=TEXT_STEPS
):
    """Train everything and draw it into ``path``."""
    torch.set_num_threads(1)
    look = {"svg.hashsalt": "front page", "font.size": 11, "axes.titlesize": 12, "savefig.facecolor": "white"}
    matplotlib.rcParams |= look | {"axes.spines.top": False, "axes.spines.right": False}

    # Training
    networks = [make_policy(lake(), seed=seed) for seed in seeds]
    readers = [WordsPolicy.of(lake(), "embedded", seed=seed) for seed in seeds]
    network_curves = [
        train_on_lake(policy, presets.TOY_TEXT, seed, steps) for policy, seed in zip(networks, seeds, strict=True)
    ]
    reader_curves = [
        train_on_lake(policy, presets.WORDS, seed, steps) for policy, seed in zip(readers, seeds, strict=True)
    ]
    trained = {coef: [reviews(coef, seed, text_steps) for seed in frontier_seeds] for coef in coefficients}

    # The environment and both policies
    figure = Figure(figsize=(12, 7), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.2))
    axes = above.subplots(1, 3, width_ratios=(1, 1.3, 1.3))
    draw_map(axes[0])
    draw_mind(
        axes[1],
        title="a network sees a number",
        sees=str(SQUARE),
        choices=probabilities(networks[0]),
        colour=BLUE,
    )
    text = "\n".join(textwrap.wrap(readers[0].texts(np.array([SQUARE]))[0], 50))
    draw_mind(
        axes[2],
        title="a language model reads a text",
        sees=f"“{text}”",
        choices=probabilities(readers[0]),
        colour=ORANGE,
    )

    # Returns in training, and the frontier
    left, right = below.subplots(1, 2)
    draw_curves(left, network_curves, "a network (MLPPolicy)", BLUE)
    draw_curves(left, reader_curves, "a language model (WordsPolicy)", ORANGE)
    left.set(
        title=f"both learn it by the same PPO class (mean and {len(networks)} seeds)",
        xlabel="environment steps",
        ylabel="return",
    )
    left.legend(frameon=False, loc="lower right")
    draw_frontier(right, trained)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
