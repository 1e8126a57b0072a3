"""Programs that ask the model beside string environments that answer it: the same dialogue, in turn, in one process.

    python examples/benchmarks/programs.py
    python examples/benchmarks/programs.py --model embedded smollm2 --json docs/results/data/programs.json

The dialogue has six short turns, once as a string environment in `TokenVectorEnv`, once as a function that plays it
with ``ask`` in `ProgramVectorEnv`; who is first alternates. The figures are the seconds of a rollout, of 128 episodes
with the embedded model and of 16 with another; the ratio is the first divided by the second, and 1 would mean that a
program costs nothing. Threads wait for one another, so other work on the machine counts.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

import gymnasium
import torch
from alternation import row
from gymnasium import spaces
from page import machine, print_and_save

from algos import LMPolicy, collect
from textenv import ProgramVectorEnv, TokenVectorEnv

TURNS = 6
LIMITS = {"max_new_tokens": 8, "max_length": 128}
"""Of both."""
TEXT = spaces.Text(100)


class Film(gymnasium.Env):
    """Asks for a film, and then again and again what else was good; pays for the word."""

    observation_space = action_space = TEXT

    def reset(self, *, seed=None, options=None):
        """Begin with one of two questions."""
        super().reset(seed=seed)
        self.turn = 0
        return str(self.np_random.choice(["this film", "the plot"])), {}

    def step(self, action):
        """Reply to an answer."""
        self.turn += 1
        return "and the music", float("good" in action), self.turn == TURNS, False, {}


def film(ask, rng):
    """The same dialogue as a program, with the same texts and the same random numbers."""
    env = Film()
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    text = f"{observation}\n"
    total = 0.0
    ended = False
    while not ended:
        answer = ask(text)
        observation, reward, ended, _, _ = env.step(answer)
        text += f"{answer}\n{observation}\n"
        total += reward
    return total


def seconds(env, policy, episodes, seed):
    """Seconds of a rollout, and its actions."""
    policy.generator.manual_seed(seed)
    start = time.perf_counter()
    rollout = collect(env, policy, num_episodes=episodes, seed=seed)
    return time.perf_counter() - start, rollout["action"]


def measure(model, *, rounds):
    """A row of the table: pairs of rollouts of a model."""
    episodes = 128 if model == "embedded" else 16
    policy = LMPolicy.load(model)
    arguments = {"tokenizer": policy.tokenizer, "num_envs": min(episodes, 64), "max_turns": TURNS, **LIMITS}
    string_env = TokenVectorEnv(Film, chat=False, max_prompt_tokens=16, pay_at="end", **arguments)
    program_env = ProgramVectorEnv(film, **arguments)

    pairs = []
    for round_number in range(rounds + 1):
        envs = [program_env, string_env]
        if round_number % 2 == 1:
            envs.reverse()
        measured = {env: seconds(env, policy, episodes, round_number) for env in envs}
        of_program, program_actions = measured[program_env]
        of_strings, actions = measured[string_env]
        assert torch.equal(actions, program_actions), "they play the same games"
        if round_number > 0:  # the first one warms up
            pairs.append((of_program, of_strings))
    ours, theirs = zip(*pairs, strict=True)
    return row("programs", f"a program, {model}", unit="s", peer_name="string environment", ours=ours, peer=theirs)


def main():
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["embedded"])
    parser.add_argument("--rounds", type=int, default=10, help="pairs of measurements")
    parser.add_argument("--json", type=Path, help="write the table to this file of docs/results/data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine("python " + " ".join(map(shlex.quote, sys.argv)))
    rows = [measure(model, rounds=options.rounds) for model in options.model]
    print_and_save(rows, about, options.json, kinds=["programs", "text"])


if __name__ == "__main__":
    main()
