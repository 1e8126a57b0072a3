"""Train PPO on a Gymnasium environment of your own.

python examples/custom_environment.py
"""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from algos import PPO, MLPPolicy, PPOConfig, evaluate

torch.set_num_threads(1)  # fastest for networks of this size


class Chase(gymnasium.Env):
    """Follow a point on a line: observe the distance to it, move by up to .2; each step costs the distance."""

    observation_space = spaces.Box(-2, 2, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)  # a new policy has noise of standard deviation 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.distance, self.steps = self.np_random.uniform(-1, 1), 0
        return np.array([self.distance], dtype=np.float32), {}

    def step(self, action):
        self.distance -= 0.2 * float(action[0])
        self.steps += 1
        truncated = self.steps == 20  # a time limit truncates: PPO adds the value of the last state
        return np.array([self.distance], dtype=np.float32), -abs(self.distance), False, truncated, {}


def main(total_steps=40_000):
    env = SyncVectorEnv([Chase] * 8, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, seed=1)
    config = PPOConfig(
        num_steps=64, num_epochs=8, minibatch_size=128, learning_rate=3e-3, final_learning_rate=0.0, gamma=0.9
    )
    before, _ = evaluate(env, policy, num_episodes=40, deterministic=True)
    PPO(env, policy, config).learn(total_steps)
    after, _ = evaluate(env, policy, num_episodes=40, deterministic=True)
    print(f"mean return {np.mean(before):.2f} before, {np.mean(after):.2f} after (best possible: about -.6)")
    return before, after


if __name__ == "__main__":
    main()
