"""Seconds until a small language model has learnt the token-set task that the peers are measured on.

The task (``../shared/peers/llm/common.py``): prompts of 8 to 16 random tokens, 48 new ones, 32 responses a batch; the
reward is the number of new tokens whose id is below a quarter of the vocabulary, 48 at most; KL coefficient .05; a
GPT-2 of 2 layers, 128 wide, with random weights. A run has learnt when the mean of a batch reaches .9 of the 48.
"""

import dataclasses
import statistics
import time

import torch
from text_task import BATCH, NEW_TOKENS, SHAPES, make_env, make_model

from algos import PPO, LMPolicy, PPOConfig
from textenv import KLPenalty

TARGET, LIMIT = 0.9, 90.0
COMMON = dict(num_steps=None, num_episodes=BATCH, gamma=1.0, gae_lambda=1.0, bootstrap_truncated=False,
              minibatch_size=8, max_grad_norm=1.0, vf_coef=1e-3)  # fmt: skip
CONFIGS = {
    "own": PPOConfig(**COMMON, num_epochs=1, learning_rate=8e-3),
    "peers": PPOConfig(**COMMON, num_epochs=4, learning_rate=4e-3),
}
"""Settings of our own, and the peers' 4 epochs of 4 minibatches.

Rewards are counts up to 48, so squared errors of the value are large: with a greater coefficient they drown the
policy's gradient in the shared trunk.
"""


def seconds_to_target(settings, seed):
    """Iterations and seconds of training until a batch's mean reaches the target; None where it never did."""
    torch.set_num_threads(1)
    model, tokenizer = make_model(SHAPES["tiny"], seed=seed)
    env = make_env(tokenizer, seed=seed)
    policy = LMPolicy(model, tokenizer, seed=seed)
    penalty = KLPenalty(policy.reference(), 0.05)
    config = CONFIGS[settings]
    agent = PPO(env, policy, dataclasses.replace(config, seed=seed), penalty=penalty)
    start = time.perf_counter()

    def enough(metrics):
        late = time.perf_counter() - start > LIMIT
        return metrics["episode/return"] >= TARGET * NEW_TOKENS or late

    last = agent.learn(10**9, on_iteration=enough)[-1]
    share = last["episode/return"] / NEW_TOKENS
    reached = share >= TARGET
    return {
        "iterations": last["iteration"] if reached else None,
        "seconds": last["time/seconds"] if reached else None,
        "last": share,
    }


def learning(*, seeds, chosen):
    """Rows of the table: one for each settings."""
    rows = []
    for settings in CONFIGS:
        if not chosen(settings):
            continue
        runs = []
        for seed in range(1, seeds + 1):
            runs.append(seconds_to_target(settings, seed))
            print(f"{settings}, seed {seed}: {runs[-1]}", flush=True)
        seconds = [run["seconds"] if run["seconds"] is not None else float("inf") for run in runs]
        rows.append(
            {
                "suite": "learning",
                "case": settings,
                "seeds": seeds,
                "median seconds": statistics.median(seconds),
                "most seconds": max(seconds),
                "median iterations": statistics.median(run["iterations"] or float("inf") for run in runs),
                "values": runs,
            }
        )
    return rows
