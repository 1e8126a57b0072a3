"""Train a language model with a reward function of your own: a plain Python function over texts.

python examples/custom_reward.py
"""

from algos import PPO, LMPolicy, presets
from textenv import TextVectorEnv


def mentions_music(prompts, completions, **columns):
    """1 for an answer that mentions music or a song, else 0."""
    return [float("music" in text or "song" in text) for text in completions]


def main(total_steps=40_000):
    policy = LMPolicy.load("embedded")  # or a folder, or a hub name
    env = TextVectorEnv(
        prompts=["this film", "the new comedy", "her second drama"],
        reward=mentions_music,
        tokenizer=policy.tokenizer,
        num_envs=64,
    )
    agent = PPO(env, policy, presets.TEXT, kl_coef=0.05)
    for metrics in agent.learn(total_steps):
        print(f"{metrics['steps']:>6} steps  reward {metrics['episode/return']:.2f}  KL {metrics['reference/kl']:.2f}")


if __name__ == "__main__":
    main()
