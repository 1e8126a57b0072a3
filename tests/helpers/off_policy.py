"""What the tests of SAC and TD3 share: a small environment, a batch, and Stable-Baselines3's view of both."""

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from tensordict import TensorDict


class Reach(gym.Env):
    """Five steps, each with a new target in [-1, 1]; the first number of the action, scaled, is to be the target.

    Observations are the time and the target. The bounds of the actions are neither symmetrical nor equal.
    """

    observation_space = spaces.Box(-1, 10, (2,), np.float32)
    action_space = spaces.Box(np.array([-1, 0], np.float32), np.array([2, 0.5], np.float32))

    def _observation(self):
        self.target = self.np_random.uniform(-1, 1)
        return np.array([self.time, self.target], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._observation(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.time += 1
        scaled = (action[0] - 0.5) / 1.5
        reward = -float((scaled - self.target) ** 2)
        return self._observation(), reward, False, self.time == 5, {}


def reach(slots=2):
    return SyncVectorEnv([Reach] * slots)


def random_batch(agent, size, *, seed):
    """Stored steps with random numbers, without noise."""
    generator = torch.Generator().manual_seed(seed)
    numbers = agent.policy.distribution.bounds.size
    scaled_action = 2 * torch.rand(size, numbers, generator=generator) - 1
    return TensorDict(
        {
            "observation": torch.randn(size, 2, generator=generator),
            "action": agent.policy.distribution.bounds.unscale(scaled_action),
            "reward": 3 * torch.randn(size, generator=generator),
            "next_observation": torch.randn(size, 2, generator=generator),
            "terminated": torch.rand(size, generator=generator) < 0.3,
        },
        batch_size=[size],
    )


def peer_batch(agent, batch):
    """The same steps for Stable-Baselines3, which stores scaled actions."""
    return ReplayBufferSamples(
        observations=batch["observation"],
        actions=agent.policy.distribution.bounds.scale(batch["action"]),
        next_observations=batch["next_observation"],
        dones=batch["terminated"].float()[:, None],
        rewards=batch["reward"][:, None],
    )


def copy_critics(critics, peer):
    """Copy the weights of our stacked critics into Stable-Baselines3's."""
    with torch.no_grad():
        for number, network in enumerate(peer.q_networks):
            for layer, weight, bias in zip(network[::2], critics.weights, critics.biases, strict=True):
                layer.weight.copy_(weight[number].reshape(weight.shape[1], -1).T)
                layer.bias.copy_(bias[number].flatten())
