"""`WordsPolicy` beside the other way in, `LanguageWrapper`: the same game, model and PPO, in turn in one process.

    python examples/benchmarks/words_speed.py
    python examples/benchmarks/words_speed.py --rounds 8 --json docs/results/data/words-speed.json

Both read a description of the last observation and write the word of an action, and no other. With `LanguageWrapper`
(textenv/Words-v0, ``history=1``) that is an episode of text, token by token. 16 environments, about 64 steps in each, 4
epochs of 4 minibatches, and so low a learning rate that play stays random. The figures are environment steps per second
of processor time on one thread, of collecting and updating; the ratio is the first divided by the second.
"""

import argparse
import dataclasses
import shlex
import sys
import time
from pathlib import Path

import gymnasium
import torch
from alternation import row
from page import machine, print_and_save

from algos import PPO, LMPolicy, WordsPolicy, presets

SLOTS = 16
STEPS = 64
"""Steps of each environment in a rollout."""
MINIBATCHES = 4
GAMES = {
    "FrozenLake-v1": ({"is_slippery": False}, 128),
    "CartPole-v1": ({}, 48),
}
"""Environments with their arguments, and the number of episodes that have as many steps as a rollout. FrozenLake has 16
texts, those of CartPole hardly come back."""
CONFIG = dataclasses.replace(
    presets.WORDS,
    num_steps=STEPS,
    minibatch_size=SLOTS * STEPS // MINIBATCHES,
    learning_rate=1e-6,
    final_learning_rate=1e-6,
)


class Counted(gymnasium.Wrapper):
    """Counts the steps of all environments."""

    steps = 0

    def step(self, action):
        """Count a step."""
        Counted.steps += 1
        return super().step(action)


def reader(game):
    """An agent with a `WordsPolicy`."""
    (options, _) = GAMES[game]
    env = gymnasium.make_vec(game, num_envs=SLOTS, vectorization_mode="sync", wrappers=[Counted], **options)
    return PPO(env, WordsPolicy.of(env, "embedded"), CONFIG)


def speaker(game):
    """An agent whose environment speaks with the model."""
    (options, episodes) = GAMES[game]
    env = gymnasium.make_vec(
        "textenv/Words-v0",
        env=game,
        env_kwargs=options,
        env_wrappers=[Counted],
        num_envs=SLOTS,
        history=1,
    )
    config = dataclasses.replace(CONFIG, num_steps=None, num_episodes=episodes, minibatch_size=episodes // MINIBATCHES)
    return PPO(env, LMPolicy.load("embedded"), config)


def steps_per_second(agent, iterations):
    """Environment steps per second of processor time, of some iterations of training."""
    Counted.steps = 0
    start = time.process_time()
    for _ in range(iterations):
        agent.update(agent.collect())
    return Counted.steps / (time.process_time() - start)


def measure(game, *, rounds, iterations):
    """A row of the table: pairs of trainings on a game."""
    agents = (reader(game), speaker(game))
    for agent in agents:
        steps_per_second(agent, 1)  # warms up
    pairs = [[steps_per_second(agent, iterations) for agent in agents] for _ in range(rounds)]
    ours, theirs = zip(*pairs, strict=True)
    return row(
        "words", f"{game}, embedded model", unit="steps/s", peer_name="LanguageWrapper", ours=ours, peer=theirs,
        rate=True,
    )  # fmt: skip


def main():
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="pairs of measurements")
    parser.add_argument("--iterations", type=int, default=2, help="iterations of each measurement")
    parser.add_argument("--json", type=Path, help="write the table to this file of docs/results/data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine("python " + " ".join(map(shlex.quote, sys.argv)))
    rows = [measure(game, rounds=options.rounds, iterations=options.iterations) for game in GAMES]
    print_and_save(rows, about, options.json, kinds=["words", "text"])


if __name__ == "__main__":
    main()
