"""Train a language model on a one-turn task of your own, which samples prompts and scores answers.

python examples/custom_task.py
"""

import numpy as np

from algos import PPO, LMPolicy, presets
from textenv import Prompt, TextVectorEnv, check_text_env


class WordCount:
    """Review a film in exactly 6 words. Score: 1 for the exact number, 1/2 for one more or less, and so on."""

    SUBJECTS = ("this film", "the new comedy", "her second drama")

    def sample_prompts(self, numbers, *, seed):
        """One prompt per number; each depends on seed and number only."""
        prompts = []
        for number in numbers:
            rng = np.random.default_rng([seed, number])
            prompts.append(Prompt(str(rng.choice(self.SUBJECTS)), columns={"words": 6}))
        return prompts

    def score(self, turns):
        """Score each finished answer; one call gets all of them."""
        return [1 / (1 + abs(len(turn.completion.split()) - turn.prompt.columns["words"])) for turn in turns]


def main(total_steps=40_000):
    policy = LMPolicy.load("embedded", seed=1)
    env = TextVectorEnv(WordCount(), tokenizer=policy.tokenizer, num_envs=64, max_new_tokens=24)
    check_text_env(env)  # finds a bug in seconds, before the training
    agent = PPO(env, policy, presets.TEXT, kl_coef=0.02)
    history = agent.learn(total_steps)
    for metrics in history:
        print(f"{metrics['steps']:>6} steps  score {metrics['episode/return']:.2f}  KL {metrics['reference/kl']:.2f}")
    return history


if __name__ == "__main__":
    main()
