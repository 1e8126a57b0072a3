"""The game of guessing a number: best play, its words, and how guesses are read."""

import gymnasium
import numpy as np
import pytest

from algos import LMPolicy, collect
from tests.helpers.games import play, replies
from textenv.games import (
    BinarySearch,
    GuessNumber,
)
from textenv.games.guess_number import last_whole_number


@pytest.mark.parametrize(("low", "high"), [(1, 100), (0, 0), (-5, 2), (1, 127), (1, 128)])
def test_binary_search_finds_every_number(low, high):
    env, turns = GuessNumber(low, high), []
    for secret in range(low, high + 1):
        total, used = play(env, BinarySearch(low, high), options={"secret": secret})
        assert total == env.best_return == 1
        turns.append(used)
    assert max(turns) == env.max_guesses == int(np.ceil(np.log2(high - low + 2)))


def test_fewer_guesses_find_fewer_numbers():
    env = GuessNumber(1, 10, max_guesses=3)
    wins = [play(env, BinarySearch(1, 10), options={"secret": secret})[0] for secret in range(1, 11)]
    assert sum(wins) == 7 and env.best_return == 0.7


def test_a_game_of_guessing_word_for_word():
    env = GuessNumber(1, 20)
    assert env.reset(options={"secret": 7})[0] == (
        "I have chosen a whole number from 1 to 20. You have 5 guesses. Write a number; I will say higher or lower."
    )
    assert replies(env, "between 1 and 20, so 10", "is it 3?", "no idea", "25", "8")  == [
        ("lower", 0.0, False),
        ("higher", 0.0, False),
        ("I saw no whole number. Write one from 1 to 20.", 0.0, False),
        ("That is out of range. Write a number from 1 to 20.", 0.0, False),
        ("lower\nThat was your last guess; it is 7.", 0.0, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "number"),
    [("1-5", 5), ("-5", -5), ("x=-5", -5), ("1.5", None), ("50.", 50), ("7, or 8!", 8), ("0012", 12), ("٣", None),
     ("a7b", 7), ("3 to 4.5", 3), ("5,123", 5123), ("-1,234,567.", -1234567), ("1,2,30", 30), ("12,34", 34),
     ("1,234.5", None), ("1,100 to 2,300", 2300), ("9" * 5000, 10**18), ("-" + "9" * 5000, -(10**18)), ("", None)],
)  # fmt: skip
def test_the_last_whole_number_is_the_guess(text, number):
    assert last_whole_number(text) == number


def test_secrets_are_uniform():
    env = GuessNumber(1, 4)
    env.reset(seed=0)
    counts = np.zeros(4)
    for _ in range(4000):
        env.reset()
        counts[next((i for i in range(3) if env.step(str(i + 1))[1] == 1), 3)] += 1  # three guesses of four
    assert (abs(counts - 1000) < 150).all()  # 5 standard deviations of 27


def test_a_game_without_room_is_cut_with_a_warning(caplog):
    env = gymnasium.make_vec("textenv/GuessNumber-v0", num_envs=2, high=100_000, max_length=99)
    rollout = collect(env, LMPolicy.load("embedded"), num_episodes=4)
    assert rollout["truncated"].any()
    assert caplog.text.count("no room for the next turn (max_length is 99 tokens): raise max_length") == 1
