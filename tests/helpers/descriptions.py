"""What a description says, read back from its text, and observations to describe."""

import json
import re

from textenv.words.describing import restore_description

FUNCTIONS = """
import gymnasium

def cell(observation):
    return f"{observation // 4} {observation % 4}"

def size(observation, env):
    return f"{observation} of {env.observation_space.n}"

def wordless(observation):
    return observation

class Halved(gymnasium.Wrapper):
    def step(self, action):
        observation, reward, *ends = self.env.step(action)
        return observation, reward / 2, *ends
"""
"""A file with functions for FrozenLake: three that describe, of which one returns no text, and a wrapper."""
SIGNS = {"left": -1, "right": 1, "up": -1, "down": 1, "north": -1, "south": 1, "west": -1, "east": 1}


def observations_of_play(env, count, *, sample_action=None):
    """The first observations of a game with random actions, which begins anew when it is over.

    Args:
        env: the environment, which is where it made the observation when that is yielded.
        count: number of observations.
        sample_action: function that draws an action; None: that of the action space.
    """
    env.action_space.seed(0)
    sample_action = sample_action or env.action_space.sample
    observation, _ = env.reset(seed=0)
    for _ in range(count):
        yield observation
        observation, _, terminated, truncated, _ = env.step(sample_action())
        if terminated or truncated:
            observation, _ = env.reset()


def signed_numbers(text):
    """The numbers of a text in their order; left, up, north and west are below zero."""
    pairs = re.findall(r"(\d+)(?: (left|right|up|down|north|south|west|east)\b)?", text)
    return [int(digits) * SIGNS.get(side, 1) for digits, side in pairs]


def step_sum(text):
    """The rows and columns of a way such as "2 up, 1 right"."""
    steps = {"row": 0, "column": 0}
    for digits, side in re.findall(r"(\d+) (\w+)", text):
        axis = "column" if side in ("left", "right", "west", "east") else "row"
        steps[axis] += int(digits) * SIGNS[side]
    return steps["row"], steps["column"]


def sentence(text, first_word):
    """The sentence that begins with a word, without that word; empty if there is none."""
    match = re.search(rf"(?:^|\. ){first_word} ([^.]*)\.", text)
    return match[1] if match else ""


def through_json(description, env):
    """A description after it was saved as JSON and restored."""
    saved = json.loads(json.dumps(description.saved()))
    return restore_description(saved, env.observation_space)
