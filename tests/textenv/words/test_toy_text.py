"""Descriptions of the toy text environments agree with the environments' own state."""

import json
import re

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from textenv.words.describing import description_of, restore_description

LAKES = {
    "4x4": {"map_name": "4x4"},
    "8x8": {"map_name": "8x8", "is_slippery": False},
    "random": {"desc": generate_random_map(size=6, seed=3)},
    "oblong": {"desc": ["SFHFG", "FFFFF", "GFFHH"], "is_slippery": False},
}


def lake(name):
    return gymnasium.make("FrozenLake-v1", **LAKES[name])


def number_before(word, text):
    """The number before a word, 0 if the word is not there."""
    match = re.search(rf"(\d+) {word}\b", text)
    return int(match[1]) if match else 0


def sentence(text, first_word):
    """The words of the sentence that begins with a word."""
    match = re.search(rf"\b{first_word} ([^.]*)\.", text)
    return match[1] if match else ""


def restored(description, env):
    saved = json.loads(json.dumps(description.saved()))
    return restore_description(saved, env.observation_space)


@pytest.mark.parametrize("name", LAKES)
def test_a_lake_says_where_i_am(name):
    env = lake(name)
    describe = description_of(env)
    desc = env.unwrapped.desc
    for state in range(desc.size):
        row, column = np.unravel_index(state, desc.shape)
        assert describe(state).startswith(f"Row {row}, column {column}.")


@pytest.mark.parametrize("name", LAKES)
def test_a_lake_says_the_way_to_the_nearest_goal(name):
    env = lake(name)
    describe = description_of(env)
    desc = env.unwrapped.desc
    goals = np.argwhere(desc == b"G")
    for state in range(desc.size):
        cell = np.array(np.unravel_index(state, desc.shape))
        way = sentence(describe(state), "Goal")
        down = number_before("down", way) - number_before("up", way)
        right = number_before("right", way) - number_before("left", way)
        end = cell + [down, right]
        assert desc[tuple(end)] == b"G"
        assert abs(down) + abs(right) == np.abs(goals - cell).sum(1).min()


@pytest.mark.parametrize("name", LAKES)
def test_a_lake_names_the_holes_that_a_step_ends_in(name):
    """The table of transitions says where a step of a lake without slipping ends."""
    env = gymnasium.make("FrozenLake-v1", **{**LAKES[name], "is_slippery": False})
    describe = description_of(env)
    letters = env.unwrapped.desc.ravel()
    for state, letter in enumerate(letters):
        if letter in b"HG":
            continue
        holes = sentence(describe(state), "Hole").split(", ")
        for action, word in enumerate(describe.action_words):
            [(_, end, _, _)] = env.unwrapped.P[state][action]
            assert (word in holes) == (letters[end] == b"H")


def test_a_word_of_a_lake_moves_as_it_says():
    env = gymnasium.make("FrozenLake-v1", desc=["FFF", "FSF", "FFG"], is_slippery=False)
    words = description_of(env).action_words
    ends = {}
    for action, word in enumerate(words):
        env.reset(seed=0)
        ends[word] = env.step(action)[0]
    assert ends == {"left": 3, "right": 5, "up": 1, "down": 7}


def test_a_slippery_lake_says_so():
    assert "slippery" in description_of(lake("4x4")).instructions
    assert "slippery" not in description_of(lake("8x8")).instructions


@pytest.mark.parametrize("name", LAKES)
def test_a_saved_lake_gives_equal_texts(name):
    env = lake(name)
    description = description_of(env)
    assert restored(description, env) == description
    assert restored(description, env)(1) == description(1)
