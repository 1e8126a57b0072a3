"""A model that knows English learns to add and subtract: SmolLM2 with LoRA, PPO, a reward that checks the answer.

    python examples/arithmetic.py

The questions are those of reasoning-gym's ``chain_sum``, with two numbers below ten; a quarter of them is for testing
only. An answer is its first number, and the reward 1 if it is right: about .6 before training.
"""

import argparse
import re
from dataclasses import replace

from algos import PPO, LMPolicy, evaluate, presets
from textenv import ReasoningGym, TextVectorEnv


def first_number(completion):
    found = re.search(r"-?\d+", completion)
    return found.group() if found else ""


def make_environment(split, tokenizer):
    task = ReasoningGym("chain_sum", split, extract=first_number, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    return TextVectorEnv(
        task=task, tokenizer=tokenizer, num_envs=32, max_new_tokens=4, max_prompt_tokens=32, stop=["\n"]
    )


def main(model="smollm2", total_steps=3_000, seed=1):
    policy = LMPolicy.load(model, lora="r=8,alpha=16,targets=q_proj+v_proj", seed=seed)
    test = make_environment("test", policy.tokenizer)
    print(f"right before: {evaluate(test, policy, num_episodes=128).mean_return:.2f}")
    config = replace(presets.TEXT, num_episodes=32, minibatch_size=16, learning_rate=3e-4, seed=seed)
    history = PPO(make_environment("train", policy.tokenizer), policy, config, kl_coef=0.01).learn(
        total_steps, progress=True
    )
    print(f"right after: {evaluate(test, policy, num_episodes=128).mean_return:.2f}")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--total-steps", type=int, default=3_000, help="tokens to write")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    main(arguments.model, arguments.total_steps, arguments.seed)
