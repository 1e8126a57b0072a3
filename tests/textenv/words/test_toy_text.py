"""Descriptions of the toy text environments agree with the environments' own state."""

import itertools

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from tests.helpers.descriptions import sentence, step_sum, through_json
from textenv.words.describing import description_of

LAKES = {
    "4x4": {"map_name": "4x4"},
    "8x8": {"map_name": "8x8", "is_slippery": False},
    "random": {"desc": generate_random_map(size=6, seed=3)},
    "oblong": {"desc": ["SFHFG", "FFFFF", "GFFHH"], "is_slippery": False},
}


def lake(name):
    return gymnasium.make("FrozenLake-v1", **LAKES[name])


def ends_of_steps(env, start):
    """For each word the observation after its action, from a state of a toy text environment."""
    ends = {}
    for action, word in enumerate(description_of(env).action_words):
        env.reset(seed=0)
        env.unwrapped.s = start
        ends[word] = env.step(action)[0]
    return ends


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
        steps = step_sum(sentence(describe(state), "Goal"))
        assert desc[tuple(cell + steps)] == b"G"
        assert np.abs(steps).sum() == np.abs(goals - cell).sum(1).min()


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


def test_a_lake_names_the_end():
    describe = description_of(lake("4x4"))
    assert describe(15) == "Row 3, column 3. Goal here. Hole up."
    assert describe(5) == "Row 1, column 1. Goal 2 down, 2 right. Hole here."


def test_a_word_of_a_lake_moves_as_it_says():
    env = gymnasium.make("FrozenLake-v1", desc=["FFF", "FSF", "FFG"], is_slippery=False)
    assert ends_of_steps(env, 4) == {"left": 3, "right": 5, "up": 1, "down": 7}


def test_a_slippery_lake_says_so():
    assert "slippery" in description_of(lake("4x4")).instructions
    assert "slippery" not in description_of(lake("8x8")).instructions
    assert "slippery" in description_of(gymnasium.make("CliffWalkingSlippery-v1")).instructions
    assert "slippery" not in description_of(gymnasium.make("CliffWalking-v1")).instructions


@pytest.mark.parametrize("name", LAKES)
def test_a_saved_lake_gives_equal_texts(name):
    env = lake(name)
    description = description_of(env)
    restored = through_json(description, env)
    assert restored == description and restored(1) == description(1)


def test_the_cliff_is_where_a_step_costs_100():
    env = gymnasium.make("CliffWalking-v1")
    describe = description_of(env)
    for state in range(37):
        row, column = np.unravel_index(state, env.unwrapped.shape)
        text = describe(state)
        assert text.startswith(f"Row {row}, column {column}.")
        assert step_sum(sentence(text, "Goal")) == (3 - row, 11 - column)
        cliffs = sentence(text, "Cliff").split(", ")
        for action, word in enumerate(describe.action_words):
            [(_, _, reward, _)] = env.unwrapped.P[state][action]
            assert (word in cliffs) == (reward == -100)


def test_a_word_of_the_cliff_moves_as_it_says():
    env = gymnasium.make("CliffWalking-v1")
    assert ends_of_steps(env, 13) == {"left": 12, "right": 14, "up": 1, "down": 25}


def color_name(rgb):
    return {(255, 0, 0): "red", (0, 255, 0): "green", (255, 255, 0): "yellow", (0, 0, 255): "blue"}[rgb]


def test_every_state_of_taxi_says_what_is_next():
    env = gymnasium.make("Taxi-v4")
    taxi = env.unwrapped
    describe = description_of(env)
    for state in range(500):
        row, column, passenger, goal = taxi.decode(state)
        passenger_name, _, passenger_way = sentence(describe(state), "Passenger").partition(", ")
        goal_name, _, goal_way = sentence(describe(state), "Goal").partition(", ")
        assert goal_name == color_name(taxi.locs_colors[goal])
        if passenger == 4:
            assert passenger_name == "in taxi"
            steps = step_sum(goal_way)
            place = taxi.locs[goal]
        else:
            assert passenger_name == "at " + color_name(taxi.locs_colors[passenger])
            steps = step_sum(passenger_way)
            place = taxi.locs[passenger]
        assert (row + steps[0], column + steps[1]) == place


def test_taxi_names_the_walls_that_stop_it():
    """A wall is where a step inside the map ends where it began."""
    env = gymnasium.make("Taxi-v4")
    describe = description_of(env)
    for state in range(500):
        _, column, _, _ = env.unwrapped.decode(state)
        walls = []
        for word, border in (("east", 4), ("west", 0)):
            [(_, end, _, _)] = env.unwrapped.P[state][describe.action_words.index(word)]
            if end == state and column != border:
                walls.append(word)
        assert sentence(describe(state), "Wall") == ", ".join(walls)


def test_every_state_of_taxi_has_another_text():
    describe = description_of(gymnasium.make("Taxi-v4"))
    assert len({describe(state) for state in range(500)}) == 500


def test_a_word_of_taxi_does_as_it_says():
    env = gymnasium.make("Taxi-v4")
    taxi = env.unwrapped
    ends = ends_of_steps(env, taxi.encode(2, 2, 0, 1))
    moves = {"south": (3, 2), "north": (1, 2), "east": (2, 3), "west": (2, 1)}
    assert {word: tuple(taxi.decode(ends[word]))[:2] for word in moves} == moves
    waiting = ends_of_steps(env, taxi.encode(0, 0, 0, 1))
    assert tuple(taxi.decode(waiting["pickup"])) == (0, 0, 4, 1)
    riding = ends_of_steps(env, taxi.encode(0, 4, 4, 1))
    assert tuple(taxi.decode(riding["dropoff"])) == (0, 4, 1, 1)


def best_sum(hand):
    """The largest sum up to 21 with each ace as 1 or 11, and whether one counts 11; else the smallest sum."""
    values = [(1, 11) if card == 1 else (card,) for card in hand]
    sums = sorted(map(sum, itertools.product(*values)))
    best = max([total for total in sums if total <= 21], default=sums[0])
    return best, best > sum(hand)


def test_blackjack_says_the_cards_of_both():
    env = gymnasium.make("Blackjack-v1")
    describe = description_of(env)
    hit = describe.action_words.index("hit")
    texts = set()
    for seed in range(100):
        observation, _ = env.reset(seed=seed)
        is_over = False
        while not is_over:
            total, has_ace = best_sum(env.unwrapped.player)
            hand = f"{total} with a usable ace" if has_ace else f"{total}"
            card = env.unwrapped.dealer[0]
            dealer = "ace" if card == 1 else f"{card}"
            texts.add(describe(observation))
            assert describe(observation) == f"I have {hand}. Dealer shows {dealer}."
            cards = len(env.unwrapped.player)
            observation, _, is_over, _, _ = env.step(hit)
            assert len(env.unwrapped.player) == cards + 1
    assert any("usable" in text for text in texts) and any("shows ace" in text for text in texts)


def test_stick_ends_a_game_of_blackjack():
    env = gymnasium.make("Blackjack-v1")
    env.reset(seed=0)
    cards = list(env.unwrapped.player)
    assert env.step(description_of(env).action_words.index("stick"))[2]
    assert env.unwrapped.player == cards
