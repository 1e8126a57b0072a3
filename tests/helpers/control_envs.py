"""Control environments whose values, masks or successors are known, and a policy to tell them by."""

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from algos.policies.policy import Policy, Step


class Chain(gym.Env):
    """States 0 to 6, one up at every step, starting at 0 to 2; leaving s pays s + 1, and 6 is the end."""

    observation_space = spaces.Box(0, 10, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(3))
        return self.observe(), {}

    def step(self, action):
        self.state += 1
        return self.observe(), float(self.state), self.state == 6, False, {}

    def observe(self):
        return np.array([self.state], dtype=np.float32)


class ExactCritic(nn.Module):
    """V(s) = s + 1 + γ V(s + 1), V(6) = 0; far off the chain a value that would spoil every advantage."""

    def __init__(self, gamma):
        super().__init__()
        self.table = torch.zeros(7)
        for state in reversed(range(6)):
            self.table[state] = state + 1 + gamma * self.table[state + 1]
        self.table[6] = 1000.0  # where an episode terminated the value must not count

    def forward(self, observation):
        return self.table[observation.long()]


def chain(mode, limit=None, num_envs=4):
    def make():
        return Chain() if limit is None else gym.wrappers.TimeLimit(Chain(), limit)

    return SyncVectorEnv([make for _ in range(num_envs)], autoreset_mode=mode)


def replayed(entry):
    """The observation that a single CartPole gives after this entry's observation and action."""
    single = gym.make("CartPole-v1").unwrapped
    single.reset(seed=0)
    single.state = entry["observation"].double().numpy()
    return torch.from_numpy(single.step(int(entry["action"]))[0])


class Lean(Policy):
    """Pushes to the side the pole leans to: an action that is a function of the observation."""

    def act(self, observation, *, action_mask=None, deterministic=False):
        action = torch.from_numpy(observation[:, 2] + 0.3 * observation[:, 0] > 0).long()
        return Step(action, torch.from_numpy(observation[:, 3]).float())


class Gate(gym.Env):
    """Action ``t % 3`` is the only one open at time t; the episode is ``length`` steps long."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, length):
        self.length = length

    def observe(self):
        return np.array([self.time], np.float32), {"action_mask": (np.arange(3) == self.time % 3).astype(np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe()

    def step(self, action):
        assert action == self.time % 3, f"action {action} is closed at time {self.time}"
        self.time += 1
        observation, info = self.observe()
        return observation, 1.0, self.time == self.length, False, info


class Signals(gym.Env):
    """Shows one of three signals; the action of its number pays 1. Four signals an episode."""

    observation_space, action_space = spaces.Box(0, 1, (3,)), spaces.Discrete(3)

    def show(self):
        self.signal = int(self.np_random.integers(3))
        return np.eye(3, dtype=np.float32)[self.signal]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.show(), {}

    def step(self, action):
        reward, self.time = float(action == self.signal), self.time + 1
        return self.show(), reward, self.time == 4, False, {}


def signals(num_envs=8):
    return SyncVectorEnv([Signals] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
