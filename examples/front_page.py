"""The README's figure: PPO on CartPole, and PPO on a language model at several KL coefficients.

python examples/front_page.py docs/figures/front_page.svg     # 2 minutes on one core
"""

import sys
from dataclasses import replace

import gymnasium
import matplotlib
import torch

import textenv  # noqa: F401 (registers textenv/Reviews-v0)
from algos import PPO, LMPolicy, MLPPolicy, presets

SEEDS, COEFFICIENTS = range(1, 6), (0.02, 0.1, 0.4)
BLUES, COLOURS = "#4c72b0", ("#d55e00", "#0072b2", "#009e73")  # the latter are told apart by colour-blind people


def cartpole(seed, total_steps=35_000):
    """Steps and returns of a training."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=16)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, seed=seed)
    history = PPO(env, policy, replace(presets.CARTPOLE, seed=seed)).learn(total_steps)
    return [(each["steps"], each["episode/return"]) for each in history if "episode/return" in each]


def reviews(kl_coef, seed=1, total_steps=40_000):
    """KL and scores of a training."""
    env = gymnasium.make_vec("textenv/Reviews-v0", num_envs=64, kl_coef=kl_coef)
    history = PPO(env, LMPolicy.load("embedded", seed=seed), replace(presets.TEXT, seed=seed)).learn(total_steps)
    return [(max(each["reference/kl"], 0.0), each["episode/return"]) for each in history]


def main(path, seeds=SEEDS, coefficients=COEFFICIENTS, **steps):
    torch.set_num_threads(1)
    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {
        "svg.hashsalt": "front page",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for seed in seeds:
        left.plot(*zip(*cartpole(seed, **steps), strict=True), color=BLUES, alpha=0.7)
    left.set(title="PPO on CartPole-v1, five seeds", xlabel="environment steps", ylabel="return", ylim=(0, 520))
    for kl_coef, colour in zip(coefficients, COLOURS, strict=False):
        right.plot(
            *zip(*reviews(kl_coef, **steps), strict=True),
            "o",
            ms=4,
            alpha=0.7,
            color=colour,
            label=f"kl_coef={kl_coef}",
        )
    right.set(
        title="the same PPO on a language model",
        xlabel="KL to the first model, nats an answer",
        ylabel="score of the reviews",
    )
    right.legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
