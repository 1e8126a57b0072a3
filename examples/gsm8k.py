"""PPO on grade-school arithmetic (GSM8K): the reward is 1 if the last number of an answer is that of the data.

python examples/gsm8k.py --data ../shared/data/gsm8k/prompts.jsonl --model path/or/hub-name

Give --model an instruction-tuned model of at least half a billion parameters, as the large libraries do for this task.
Without --model, a tiny GPT-2 from scratch that may only write digits shows that all parts fit together. It cannot
reason, and stays at the score of guessing, about one answer in a hundred.
"""

import argparse
from pathlib import Path

from algos import PPO, LMPolicy, presets
from textenv import Rewards, TextVectorEnv, check_no_overlap, load_prompts, split_prompts
from textenv.lm.loading import load_tokenizer
from textenv.rewards import numeric_answer


def tiny_policy():
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = load_tokenizer("embedded")
    shape = dict(n_layer=2, n_embd=64, n_head=2, n_positions=512, vocab_size=len(tokenizer), dtype="float32")
    ends = dict(bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id)
    return LMPolicy(GPT2LMHeadModel(GPT2Config(**shape, **ends)), tokenizer, seed=1)


def main(data, model=None, total_steps=6_000):
    prompts = load_prompts(data)
    train, test = split_prompts(prompts, "train"), split_prompts(prompts, "test")
    check_no_overlap(train, test)
    policy = LMPolicy.load(model) if model else tiny_policy()
    tokenizer = policy.tokenizer
    fits = [row for row in train if len(tokenizer(row["prompt"])["input_ids"]) <= 256]
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
    only_digits = {"max_new_tokens": 4, "allowed": lambda turn: [*digits, tokenizer.eos_token_id]}
    limits = {"max_new_tokens": 300} if model else only_digits
    env = TextVectorEnv(
        prompts=fits, reward=Rewards({"answer": numeric_answer()}), tokenizer=tokenizer, num_envs=32,
        max_prompt_tokens=256, **limits,
    )  # fmt: skip
    agent = PPO(env, policy, presets.TEXT, kl_coef=0.001)
    history = agent.learn(total_steps)
    for metrics in history[:: max(1, len(history) // 10)]:
        print(
            f"{metrics['steps']:>6} steps  right {metrics['reward/answer']:.3f}  tokens {metrics['episode/length']:.1f}"
        )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="../shared/data/gsm8k/prompts.jsonl")
    parser.add_argument("--model")
    parser.add_argument("--total-steps", type=int, default=6_000)
    arguments = parser.parse_args()
    if not Path(arguments.data).exists():
        parser.error(f"there is no {arguments.data}: give GSM8K's prompts.jsonl, with prompt and answer in each line")
    main(arguments.data, arguments.model, arguments.total_steps)
