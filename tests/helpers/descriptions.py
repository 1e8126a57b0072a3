"""What a description says, read back from its text."""

import json
import re

from textenv.words.describing import restore_description

SIGNS = {"left": -1, "right": 1, "up": -1, "down": 1, "north": -1, "south": 1, "west": -1, "east": 1}


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
