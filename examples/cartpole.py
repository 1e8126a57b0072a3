"""Train PPO on CartPole-v1 and watch the return grow. The twin of text.py: only environment, policy, preset differ.

python examples/cartpole.py
"""

import gymnasium
import torch

from algos import PPO, MLPPolicy, evaluate, presets

torch.set_num_threads(1)  # fastest for networks of this size


def main(total_steps=35_000):
    env = gymnasium.make_vec("CartPole-v1", num_envs=16)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, seed=1)
    agent = PPO(env, policy, presets.CARTPOLE)

    history = [metrics for metrics in agent.learn(total_steps) if "episode/return" in metrics]  # where an episode ended
    for metrics in history[:: max(1, len(history) // 10)]:
        print(f"{metrics['steps']:>7} steps  return {metrics['episode/return']:6.1f}")

    test_env = gymnasium.make_vec("CartPole-v1", num_envs=20)
    returns, _ = evaluate(test_env, policy, num_episodes=20, seed=1)
    print(f"mean return of 20 episodes: {sum(returns) / len(returns):.1f} (best possible: 500)")
    return returns


if __name__ == "__main__":
    main()
