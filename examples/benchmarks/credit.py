"""When does a critic help? PPO, RLOO and GRPO at equal rollouts and equal generated tokens.

PPO and GRPO take 4 steps on a rollout, in two epochs; RLOO takes one, and "PPO, one step" too: these pairs differ in
the advantages alone. "PPO, own critic" has a second model for the value. "PPO, gradient" trains the value head by its
gradient alone instead of fitting it; "λ apart" has targets of λ = 1 for it; "VAPO" too, and a λ by length and a tenth
of the training for the value alone; "VinePPO" has three completions every eight tokens instead of a value. The methods
after GRPO have other losses or advantages; REINFORCE++ takes 4 steps on a rollout.

python examples/benchmarks/credit.py                      # every task, every method, seeds 1 to 5
python examples/benchmarks/credit.py --seconds            # and once more, for as many processor seconds as PPO takes
python examples/benchmarks/credit.py --tune --seeds 101   # every learning rate, on a seed that the table does not use

Tasks, all with the embedded model (rewards are shares of the best return):

- reviews: textenv/Reviews-v0, a classifier's probability at the end of some 15 tokens.
- stops, dense: up to 64 tokens; each full stop after two or more other tokens earns 1/21 at its own token.
- stops, late: the same sum, paid at the last token.
- talk, dense: examples/conversation.py, three questions; each right answer is paid at once.
- talk, late: the same sum, paid after the third answer.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import gymnasium
import torch

from algos import (
    GRPO,
    PPO,
    RLOO,
    GRPOConfig,
    LMPolicy,
    REINFORCEPlusPlus,
    REINFORCEPlusPlusConfig,
    RLOOConfig,
    presets,
)
from textenv import TextVectorEnv, TokenVectorEnv
from textenv.embedded.grammar import openings
from textenv.prompts.prompts import split_prompts

sys.path.append(str(Path(__file__).parents[1]))
from conversation import Interview

EPISODES = 64
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
GRADIENT = {
    "PPO, gradient": {},
    "PPO, gradient, λ apart": {"value_gae_lambda": 1.0},
    "VAPO": {"value_gae_lambda": 1.0, "length_adaptive_lambda": 0.5, "value_pretraining": 0.1},
    "VinePPO": {"vine_samples": 3, "vine_interval": 8, "gae_lambda": 0.0},
}
"""Fields of the config of PPO whose value head is not fitted."""
OF_GRPO = {
    "GRPO": {},
    "GRPO, clip-higher": {"clip_higher": 0.28},
    "GRPO, dual clip": {"policy_loss": "dual_clipped_policy_loss"},
    "GRPO, GSPO": {"policy_loss": "gspo_policy_loss", "clip_range": 3e-4, "clip_higher": 4e-4},
    "GRPO, CISPO": {"policy_loss": "cispo_policy_loss", "clip_range": 1.0, "clip_higher": 4.0},
    "GRPO, clip-cov": {"policy_loss": "clip_cov_policy_loss"},
    "GRPO, KL-cov": {"policy_loss": "kl_cov_policy_loss"},
    "GRPO, without deviation": {"scale_by_std": False},
}
"""Fields of the config of GRPO, with the numbers of the papers."""
METHODS = ("PPO", "PPO, one step", "RLOO", "PPO, own critic", *GRADIENT, *OF_GRPO, "REINFORCE++")
RATE = 3e-3
"""The best area of every method on every task that was tried with ``--tune --seeds 101``."""


def stops(completion_ids, tokenizer, late):
    """Reward per token: 1/21 at a full stop after two or more other tokens; if late, all of it at the last token."""
    stop, rewards = tokenizer(".")["input_ids"][0], []
    for ids in completion_ids:
        last, earned = -1, [0.0] * len(ids)
        for place, token in enumerate(ids):
            if token == stop:
                earned[place], last = (1 / 21 if place - last > 2 else 0.0), place
        rewards.append([0.0] * (len(ids) - 1) + [sum(earned)] if late and ids else earned)
    return rewards


def make_env(task, tokenizer):
    """Environment, KL coefficient, tokens of a training and the return that counts as 1."""
    kind, _, paid = task.partition(", ")
    if kind == "reviews":
        return gymnasium.make_vec("textenv/Reviews-v0", num_envs=EPISODES), 0.1, 16_000, 1.0
    if kind == "talk":
        pay = "end" if paid == "late" else "turn"
        options = dict(num_envs=EPISODES, max_new_tokens=12, max_length=96, pay_at=pay)
        return TokenVectorEnv(Interview, tokenizer=tokenizer, **options), 0.01, 40_000, 3.0
    reward = lambda completion_ids, **_: stops(completion_ids, tokenizer, paid == "late")  # noqa: E731
    prompts = split_prompts(openings(), "train")
    options = dict(tokenizer=tokenizer, num_envs=EPISODES, max_new_tokens=64)
    return TextVectorEnv(prompts=prompts, reward=reward, **options), 0.001, 50_000, 1.0


def train(task, method, seed, rate, scale=1.0):
    """Area under the curve of the return, return of the last tenth, explained variance and seconds of processor.

    The training has ``scale`` times the tokens of its task.
    """
    torch.set_num_threads(1)
    policy = LMPolicy.load("embedded", seed=seed, critic="copy" if method == "PPO, own critic" else None)
    env, kl_coef, tokens, best = make_env(task, policy.tokenizer)
    common = dict(num_episodes=EPISODES, learning_rate=rate, final_learning_rate=rate / 3, max_grad_norm=1.0, seed=seed)
    if method == "RLOO":
        agent = RLOO(env, policy, RLOOConfig(**common), kl_coef=kl_coef)
    elif method in OF_GRPO:
        config = GRPOConfig(**common, num_epochs=2, minibatch_size=32, **OF_GRPO[method])
        agent = GRPO(env, policy, config, kl_coef=kl_coef)
    elif method == "REINFORCE++":
        config = REINFORCEPlusPlusConfig(**common, num_epochs=2, minibatch_size=32, gamma=1.0)
        agent = REINFORCEPlusPlus(env, policy, config, kl_coef=kl_coef)
    elif method in GRADIENT:
        config = dataclasses.replace(presets.TEXT, **common, fit_value_head=False, **GRADIENT[method])
        agent = PPO(env, policy, config, kl_coef=kl_coef)
    else:
        once = dict(num_epochs=1, minibatch_size=EPISODES) if method == "PPO, one step" else {}
        agent = PPO(env, policy, dataclasses.replace(presets.TEXT, **common, **once), kl_coef=kl_coef)
    tokens = round(scale * tokens)
    start = time.process_time()
    history = list(agent.learn(tokens))
    weights = [metrics["rollout/steps"] for metrics in history]
    returns = [metrics["episode/return"] / best for metrics in history]
    late = [x for x, metrics in zip(returns, history, strict=True) if metrics["steps"] > 0.9 * tokens]
    explained = [metrics.get("value/explained_variance", 0.0) for metrics in history]
    area = sum(map(float.__mul__, returns, map(float, weights))) / sum(weights)
    result = dict(area=area, final=statistics.fmean(late), explained=statistics.fmean(explained))
    return result | dict(kl=history[-1]["reference/kl"], cpu=time.process_time() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = ("stops, dense", "stops, late", "talk, dense", "reviews", "talk, late")
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--seconds", action="store_true", help="also train for the seconds that PPO takes")
    parser.add_argument("--tune", action="store_true", help="try every learning rate instead of the chosen one")
    arguments = parser.parse_args()
    if arguments.seconds and arguments.methods[0] != "PPO":
        parser.error("--seconds compares with PPO: name it first in --methods")
    seconds = {}
    for task, method in itertools.product(arguments.tasks, arguments.methods):
        if method == "VinePPO" and task.startswith("talk"):
            print(f"{task}, {method}: left out, because only single turns can be completed again", flush=True)
            continue
        for rate in RATES if arguments.tune else [RATE]:
            runs = [train(task, method, seed, rate) for seed in arguments.seeds]
            show(runs, task=task, method=method, rate=rate, equal="tokens")
            if method == "PPO":
                seconds[task] = statistics.fmean(run["cpu"] for run in runs)
            if arguments.seconds:
                scale = seconds[task] / statistics.fmean(run["cpu"] for run in runs)
                runs = [train(task, method, seed, rate, scale) for seed in arguments.seeds]
                show(runs, task=task, method=method, rate=rate, equal="seconds")


def show(runs, **labels):
    """Print the mean, smallest and largest of each figure of some runs."""
    columns = {name: [run[name] for run in runs] for name in runs[0]}
    shown = {name: f"{statistics.fmean(x):.3f} [{min(x):.3f}, {max(x):.3f}]" for name, x in columns.items()}
    print(json.dumps(labels | shown, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
