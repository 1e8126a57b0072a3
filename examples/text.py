"""Train PPO to write positive reviews and watch the score grow. The twin of cartpole.py: only environment, policy,
preset differ.

python examples/text.py
"""

import gymnasium
import torch

import textenv  # noqa: F401 (registers the environments)
from algos import PPO, LMPolicy, evaluate, presets

torch.set_num_threads(1)  # fastest for networks of this size


def main(total_steps=48_000):
    env = gymnasium.make_vec("textenv/Reviews-v0", num_envs=64, kl_coef=0.1)
    policy = LMPolicy.load("embedded", seed=1)
    agent = PPO(env, policy, presets.TEXT_EMBEDDED)

    history = [metrics for metrics in agent.learn(total_steps) if "episode/return" in metrics]  # where an episode ended
    for metrics in history[:: max(1, len(history) // 10)]:
        print(f"{metrics['steps']:>7} steps  return {metrics['episode/return']:6.3f}")

    test_env = gymnasium.make_vec("textenv/Reviews-v0", num_envs=64, split="test")
    returns, _ = evaluate(test_env, policy, num_episodes=288, seed=1)
    print(f"mean score of 288 reviews: {sum(returns) / len(returns):.3f} (best possible: below 1)")
    return returns


if __name__ == "__main__":
    main()
