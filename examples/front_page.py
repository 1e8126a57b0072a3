"""The README's figure: PPO on CartPole, and the same PPO on a language model at several KL coefficients, with answers.

python examples/front_page.py docs/figures/front_page.svg     # 3 minutes on one core
"""

import sys
import textwrap
from dataclasses import replace

import gymnasium
import matplotlib
import numpy as np
import torch

import textenv  # noqa: F401 (registers textenv/Reviews-v0)
from algos import PPO, LMPolicy, MLPPolicy, presets

SEEDS, COEFFICIENTS, SHOWN = range(1, 6), (0.02, 0.1, 0.4, 0.8), 0.1
PROMPTS = ("this quiet film about a lost dog", "the new thriller", "her latest comedy")
BLUE, ORANGE = "#0072b2", "#d55e00"  # told apart by colour-blind people


def cartpole(seed, total_steps=35_000):
    """Steps and returns of a training."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=16)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, seed=seed)
    history = PPO(env, policy, replace(presets.CARTPOLE, seed=seed)).learn(total_steps)
    return np.array([(each["steps"], each["episode/return"]) for each in history if "episode/return" in each])


def reviews(kl_coef, seed, total_steps=40_000):
    """KL and score of each iteration, and the answers to `PROMPTS` before and after."""
    env = gymnasium.make_vec("textenv/Reviews-v0", num_envs=64, kl_coef=kl_coef)
    policy = LMPolicy.load("embedded", seed=seed)
    before = policy.generate(list(PROMPTS), seed=3)
    history = PPO(env, policy, replace(presets.TEXT, seed=seed)).learn(total_steps)
    points = np.array([(max(each["reference/kl"], 0.0), each["episode/return"]) for each in history])
    return points, before, policy.generate(list(PROMPTS), seed=3)


def draw_curves(axes, seeds, **steps):
    curves = [cartpole(seed, **steps) for seed in seeds]
    grid = np.linspace(max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves), 100)
    for curve in curves:
        axes.plot(*curve.T, color=BLUE, alpha=0.3, lw=1)
    axes.plot(grid, np.mean([np.interp(grid, *curve.T) for curve in curves], 0), color=BLUE, lw=2.5)
    axes.set(title=f"PPO on CartPole-v1: mean and {len(seeds)} seeds", ylim=(0, 520))
    axes.set(xlabel="environment steps", ylabel="return")


def draw_frontier(axes, trained, seeds):
    """Mean KL and score over the last quarter of each training: small dots; their means over the seeds: the line."""
    ends = {coef: [run[0][-len(run[0]) // 4 :].mean(0) for run in runs] for coef, runs in trained.items()}
    start = np.mean([run[0][0] for runs in trained.values() for run in runs], 0)
    axes.scatter(*np.concatenate(list(ends.values())).T, s=12, color=ORANGE, alpha=0.4, lw=0)
    line = np.array([start, *sorted((np.mean(each, 0) for each in ends.values()), key=lambda point: point[0])])
    axes.plot(*line.T, "o-", color=ORANGE, lw=2)
    axes.annotate("before training", start, (6, -3), textcoords="offset points")
    for coef, each in ends.items():
        axes.annotate(f"β = {coef:g}", np.mean(each, 0), (5, -13), textcoords="offset points")
    axes.set(title=f"the same PPO on a language model: reward–KL frontier, {len(seeds)} seeds")
    axes.set(xlabel="KL to the reference model, nats per answer", ylabel="reward (how positive a review is)")
    axes.margins(x=0.12)


def write_answers(axes, before, after):
    axes.axis("off")
    for x, title, answers in ((0.0, "before training", before), (0.52, f"after training (β = {SHOWN:g})", after)):
        axes.text(x, 1.0, title, weight="bold", va="top", transform=axes.transAxes)
        for place, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
            text = "\n".join(textwrap.wrap(prompt + answer, 72))
            axes.text(x, 0.8 - 0.3 * place, text, va="top", fontsize=10, transform=axes.transAxes)


def main(path, seeds=SEEDS, coefficients=COEFFICIENTS, **steps):
    torch.set_num_threads(1)
    matplotlib.use("svg")
    from matplotlib import pyplot

    look = {"svg.hashsalt": "front page", "font.size": 11, "axes.titlesize": 12}
    matplotlib.rcParams |= look | {"axes.spines.top": False, "axes.spines.right": False}
    figure = pyplot.figure(figsize=(12, 5.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3.6, 1.5))
    left, right, below = (figure.add_subplot(place) for place in (grid[0, 0], grid[0, 1], grid[1, :]))
    draw_curves(left, seeds, **steps)
    trained = {coef: [reviews(coef, seed, **steps) for seed in list(seeds)[:3]] for coef in coefficients}
    draw_frontier(right, trained, list(seeds)[:3])
    write_answers(below, *trained[SHOWN][0][1:])
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
