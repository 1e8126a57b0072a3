"""Train PPO on CartPole-v1 with hidden velocities and a recurrent policy. The same PPO as in cartpole.py.

python examples/hidden_velocities.py
"""

import gymnasium
import torch
from gymnasium.wrappers.vector import TransformObservation

from algos import PPO, LSTMPolicy, evaluate, presets

torch.set_num_threads(1)  # fastest for networks of this size


def make_env(num_envs):
    """CartPole that only shows the position of the cart and the angle of the pole."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=num_envs)
    space = env.single_observation_space
    shown = gymnasium.spaces.Box(space.low[[0, 2]], space.high[[0, 2]])
    return TransformObservation(env, lambda observation: observation[:, [0, 2]], single_observation_space=shown)


def main(total_steps=150_000):
    env = make_env(num_envs=32)
    spaces = env.single_observation_space, env.single_action_space
    policy = LSTMPolicy(*spaces, normalize_observations=True, seed=1)
    agent = PPO(env, policy, presets.CARTPOLE_LSTM)

    history = [metrics for metrics in agent.learn(total_steps) if "episode/return" in metrics]  # where an episode ended
    for metrics in history[:: max(1, len(history) // 10)]:
        print(f"{metrics['steps']:>7} steps  return {metrics['episode/return']:6.1f}")

    returns, _ = evaluate(make_env(num_envs=20), policy, num_episodes=20, seed=1)
    print(f"mean return of 20 episodes: {sum(returns) / len(returns):.1f} (best possible: 500)")
    return returns


if __name__ == "__main__":
    main()
