"""Train on a reward of several named parts, and print the contribution of each.

python examples/composite_reward.py
"""

from algos import PPO, LMPolicy, presets
from textenv import Rewards, TextVectorEnv, check_reward
from textenv.rewards import length_window, repetition, sentiment


def mentions_music(completions):
    return [float("music" in text or "song" in text) for text in completions]


def main(total_steps=40_000):
    policy = LMPolicy.load("embedded", seed=1)
    reward = Rewards(
        {
            "sentiment": sentiment(),
            "music": (mentions_music, 0.5),
            "length": (length_window(8, 16, edge=4), 0.3),
            "repetition": (repetition(), 0.3),
        }
    )
    check_reward(reward)  # finds a bug in seconds, before the training
    prompts = ["this film", "the new comedy", "her second drama"]
    env = TextVectorEnv(prompts=prompts, reward=reward, tokenizer=policy.tokenizer, num_envs=64)
    agent = PPO(env, policy, presets.TEXT, kl_coef=0.05)
    history = agent.learn(total_steps)
    for metrics in history[:: max(1, len(history) // 8)]:
        parts = "  ".join(f"{name} {metrics[f'reward/{name}']:+.2f}" for name in reward.functions)
        print(f"{metrics['steps']:>6} steps  score {metrics['episode/return']:.2f} = {parts}")
    return history


if __name__ == "__main__":
    main()
