"""Programs that ask the model beside string environments that answer it: the same dialogue, in turn, in one process.

    python examples/benchmarks/programs.py
    python examples/benchmarks/programs.py --model smollm2 --episodes 16 --rounds 5

The dialogue has six short turns, once as a string environment in `TokenVectorEnv`, once as a function that plays it
with ``ask`` in `ProgramVectorEnv`. The ratio is the seconds of the first divided by those of the second; 1 would mean
that a program costs nothing.
"""

import argparse
import statistics
import time

import gymnasium
import torch
from gymnasium import spaces

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


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10, help="pairs of measurements")
    options = parser.parse_args()
    torch.set_num_threads(1)

    policy = LMPolicy.load(options.model)
    arguments = {"tokenizer": policy.tokenizer, "num_envs": options.num_envs, "max_turns": TURNS, **LIMITS}
    string_env = TokenVectorEnv(Film, chat=False, max_prompt_tokens=16, pay_at="end", **arguments)
    program_env = ProgramVectorEnv(film, **arguments)

    def seconds(env, seed):
        """Seconds of a rollout, and its tokens."""
        start = time.perf_counter()
        rollout = collect(env, policy, num_episodes=options.episodes, seed=seed)
        return time.perf_counter() - start, rollout

    pairs = []
    for round_number in range(options.rounds + 1):
        policy.generator.manual_seed(round_number)
        of_strings, rollout = seconds(string_env, round_number)
        policy.generator.manual_seed(round_number)
        of_program, program_rollout = seconds(program_env, round_number)
        assert torch.equal(rollout["action"], program_rollout["action"]), "they play the same games"
        if round_number > 0:  # the first one warms up
            pairs.append((of_strings, of_program))
    ratios = [of_strings / of_program for of_strings, of_program in pairs]
    print("| model | TokenVectorEnv, s | ProgramVectorEnv, s | ratio | lowest, highest of the pairs |")
    print("| --- | --- | --- | --- | --- |")
    print(
        f"| {options.model} | {statistics.median(first for first, _ in pairs):.2f} | "
        f"{statistics.median(second for _, second in pairs):.2f} | {statistics.median(ratios):.2f} | "
        f"{min(ratios):.2f}, {max(ratios):.2f} |"
    )


if __name__ == "__main__":
    main()
