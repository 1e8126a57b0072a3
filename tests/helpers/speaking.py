"""A small network that speaks, and FrozenLake as a string environment."""

import gymnasium
import numpy as np
from gymnasium import spaces

from algos import MLPPolicy

WORDS = ("left", "down", "right", "up")
"""Words of FrozenLake's actions."""
AIM = "Find the goal."
PAYING_LAKE = {"is_slippery": False, "reward_schedule": (4, -2, -1)}
"""Arguments of a FrozenLake whose rewards differ: of a step to the goal, into a hole, and on the ice."""


class Speaker(MLPPolicy):
    """MLP for FrozenLake whose observations and actions have words."""

    def texts(self, observation):
        return [f"{AIM}\nYou are in cell {np.argmax(row)}." for row in observation]

    def words(self, action):
        return [WORDS[int(x)] for x in action]


def make_speaker(env, seed):
    return Speaker(env.single_observation_space, env.single_action_space, seed=seed)


class SpokenLake(gymnasium.Env):
    """The FrozenLake of `PAYING_LAKE` that tells its cell and is told one of `WORDS`."""

    def __init__(self, render_mode=None):
        self.lake = gymnasium.make("FrozenLake-v1", render_mode=render_mode, **PAYING_LAKE)
        self.observation_space = self.action_space = spaces.Text(100)
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        cell, info = self.lake.reset(seed=seed)
        return f"cell {cell}", info

    def step(self, action):
        cell, *outcome = self.lake.step(WORDS.index(action))
        return f"cell {cell}", *outcome

    def render(self):
        return self.lake.render()

    def close(self):
        self.lake.close()
