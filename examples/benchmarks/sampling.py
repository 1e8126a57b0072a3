"""What dynamic sampling and prompt samplers do where many prompts teach nothing: GRPO at equal generated tokens.

python examples/benchmarks/sampling.py                    # every method, seeds 1 to 3

48 prompts are openings of reviews. An answer of up to 16 tokens of the embedded model earns 1 if it has at least as
many full stops as the prompt's column ``stops`` says, else 0; the model does not see the column. Task mixed: three
tenths of the prompts ask for none (always solved), three tenths for 20 (impossible), the others for 1 to 8. Task steps:
all ask for 1 to 12, most of them for many.

Columns: mean success of held-out openings that ask for 1 to 8 (steps: 1 to 12), ``final`` of the last three
evaluations, ``area`` of all, ``ninth`` after nine updates; ``silent``: the share of rows without a signal; updates;
processor seconds.
"""

import argparse
import json
import statistics
import time

import torch

from algos import GRPO, Callback, GRPOConfig, LMPolicy, evaluate
from textenv import TextVectorEnv
from textenv.embedded.grammar import openings
from textenv.prompts.prompts import split_prompts

TOKENS = 30_000
NUM_PROMPTS = 48
COUNTS = {
    "mixed": [0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 20, 20, 20, 20, 20, 20],
    "steps": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 8, 9, 10, 11, 12, 9, 10, 11, 12, 10, 11, 12],
}
"""What the prompts ask for, one after another."""
METHODS = {
    "uniform": {},
    "max_refills=3": {"max_refills": 3},
    "pass_rate": {"sampler": "pass_rate"},
    "curriculum": {"sampler": "curriculum:column=stops,threshold=.7,max_levels=20"},
    "pass_rate, max_refills=3": {"sampler": "pass_rate", "max_refills": 3},
}


def enough_stops(completions, stops):
    return [float(text.count(".") >= count) for text, count in zip(completions, stops, strict=True)]


def make_env(split, counts, tokenizer, sampler=None):
    texts = split_prompts(openings(), split)[:NUM_PROMPTS]
    prompts = [{"prompt": text, "stops": counts[i % len(counts)]} for i, text in enumerate(texts)]
    return TextVectorEnv(
        prompts=prompts, reward=enough_stops, sampler=sampler, tokenizer=tokenizer, num_envs=64, max_new_tokens=16
    )  # fmt: skip


class Successes(Callback):
    """Success on the held-out prompts, every 2,000 tokens and after nine updates."""

    def __init__(self, env):
        self.env = env
        self.values = []
        self.ninth = None

    def on_iteration(self, run, metrics):
        due = int(metrics["steps"] // 2000) - len(self.values)
        if due > 0 or metrics["iteration"] == 9:
            success = evaluate(self.env, run.agent.policy, num_episodes=256, seed=7).mean_return
            self.values += due * [success]
            if metrics["iteration"] == 9:
                self.ninth = success


def train(task, seed, *, sampler=None, max_refills=0):
    """What the columns of the table say of one training."""
    torch.set_num_threads(1)
    policy = LMPolicy.load("embedded", seed=seed)
    env = make_env("train", COUNTS[task], policy.tokenizer, sampler)
    asked = sorted(set(COUNTS[task]) - {0, 20})
    successes = Successes(make_env("test", asked, policy.tokenizer))
    config = GRPOConfig(
        num_episodes=64, group_size=8, learning_rate=1e-3, max_grad_norm=1.0, max_refills=max_refills, seed=seed
    )
    start = time.process_time()
    history = GRPO(env, policy, config).learn(TOKENS, callbacks=[successes])
    silent = statistics.fmean(metrics["rollout/silent_rows"] / 64 for metrics in history)
    return {
        "final": statistics.fmean(successes.values[-3:]),
        "area": statistics.fmean(successes.values),
        "ninth": successes.ninth,
        "silent": silent,
        "updates": len(history),
        "cpu": time.process_time() - start,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=COUNTS, default=[*COUNTS])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    for task in arguments.tasks:
        for method in arguments.methods:
            runs = [train(task, seed, **METHODS[method]) for seed in arguments.seeds]
            columns = {name: [run[name] for run in runs] for name in runs[0]}
            shown = {name: f"{statistics.fmean(x):.2f} [{min(x):.2f}, {max(x):.2f}]" for name, x in columns.items()}
            print(json.dumps({"task": task, "method": method} | shown), flush=True)


if __name__ == "__main__":
    main()
