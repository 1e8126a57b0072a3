"""Negative film reviews, with and without four penalties against repetition: SmolLM2, LoRA, PPO.

    python examples/negative_reviews.py --seed 1                # 10,000 tokens twice

The reward is minus VADER's sentiment, and there is no KL penalty, so that nothing else stands against repetition. The
penalties are the repeated share of an answer's words, word pairs and word triples, and the share of its word pairs that
another answer of the same batch has too. All are measured in both runs, on beginnings that the training does not have;
the untrained model, asked for the sentiment, is the judge that the reward does not know.
"""

import argparse
import json
from collections import Counter
from dataclasses import replace

from film_reviews import FILMS, LORA, SETTINGS, asked, make_environment, measure

from algos import PPO, LMPolicy
from textenv.rewards import repetition, vader


def echoes(completions):
    """Minus the share of an answer's word pairs that another answer of the batch has too."""
    pairs = [{*zip(words, words[1:], strict=False)} for words in (text.lower().split() for text in completions)]
    count = Counter(pair for each in pairs for pair in each)
    return [-sum(count[pair] > 1 for pair in each) / max(len(each), 1) for each in pairs]


PENALTIES = {"words": repetition(1), "pairs": repetition(2), "triples": repetition(3), "echoes": echoes}


def run(seed, total_steps, weight):
    """Train, and return figures from before and after, and answers."""
    policy = LMPolicy.load("smollm2", lora=LORA, seed=seed)
    reference = policy.reference()
    judges = {"judge: SmolLM2": asked(reference)} | PENALTIES
    before, _ = measure(policy, reference, judges)
    rewards = {"VADER": (vader(), -1.0)} | {name: (penalty, weight) for name, penalty in PENALTIES.items()}
    env = make_environment(rewards, FILMS, policy.tokenizer)
    PPO(env, policy, replace(SETTINGS["ppo"], seed=seed)).learn(total_steps, progress=True)
    return before, *measure(policy, reference, judges)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-steps", type=int, default=10_000, help="tokens to write in each run")
    parser.add_argument("--weight", type=float, default=0.5, help="of each penalty, in the second run")
    options = parser.parse_args()
    before, without, plain = run(options.seed, options.total_steps, 0.0)
    _, penalized, varied = run(options.seed, options.total_steps, options.weight)
    print(f"\n{'':32}{'before':>12}{'without':>12}{'with penalties':>16}")
    for name, value in before.items():
        print(f"{name:32}{value:12.2f}{without[name]:12.2f}{penalized[name]:16.2f}")
    for one, other in list(zip(plain, varied, strict=True))[:: len(plain) // 6]:
        print(f"\nwithout: {one!r}\n   with: {other!r}")
    print("\n" + json.dumps({"seed": options.seed, "before": before, "without": without, "with": penalized}))


if __name__ == "__main__":
    main()
