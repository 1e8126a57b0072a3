"""Descriptions of classic control agree with the environments' own state, and are exact enough to act by."""

import math

import gymnasium
import numpy as np
import pytest

from tests.helpers.descriptions import observations_of_play, sentence, signed_numbers
from textenv.words.describing import description_of


def states_and_texts(name):
    """States of the environment in a random game, and their descriptions."""
    env = gymnasium.make(name)
    describe = description_of(env)
    for observation in observations_of_play(env, 300):
        yield np.array(env.unwrapped.state, dtype=np.float64), describe(observation)


def speeds_after_each_word(name, state):
    """For each word the state after its action, from one state."""
    env = gymnasium.make(name)
    ends = {}
    for action, word in enumerate(description_of(env).action_words):
        env.reset(seed=0)
        env.unwrapped.state = state
        env.step(action)
        ends[word] = env.unwrapped.state
    return ends


def test_cart_and_pole_are_in_centimetres_and_degrees():
    for state, text in states_and_texts("CartPole-v1"):
        expected = state * [100, 100, 180 / math.pi, 180 / math.pi]
        assert text.startswith("Cart ") and ". Pole " in text
        np.testing.assert_allclose(signed_numbers(text), expected, atol=0.501)


@pytest.mark.parametrize("seed", range(3))
def test_a_policy_that_reads_the_text_balances_the_pole(seed):
    env = gymnasium.make("CartPole-v1")
    describe = description_of(env)
    observation, _ = env.reset(seed=seed)
    for step in range(500):
        cart, speed, pole, turn = signed_numbers(describe(observation))
        word = "right" if cart / 100 + speed / 50 + pole + turn / 3 > 0 else "left"
        observation, _, terminated, truncated, _ = env.step(describe.action_words.index(word))
        assert not terminated, step
    assert truncated


def test_a_word_of_cart_pole_pushes_as_it_says():
    ends = speeds_after_each_word("CartPole-v1", np.zeros(4))
    assert ends["left"][1] < 0 < ends["right"][1]


@pytest.mark.parametrize("name", ["MountainCar-v0", "MountainCarContinuous-v0"])
def test_the_car_is_measured_from_the_lowest_point(name):
    heights = np.sin(3 * np.linspace(-1.2, 0.6, 100001))
    bottom = np.linspace(-1.2, 0.6, 100001)[heights.argmin()]
    for (position, speed), text in states_and_texts(name):
        assert text.startswith("Car ")
        np.testing.assert_allclose(signed_numbers(text), [100 * (position - bottom), 1000 * speed], atol=0.502)


@pytest.mark.parametrize("name", ["MountainCar-v0", "MountainCarContinuous-v0"])
def test_the_car_is_told_where_the_flag_is(name):
    env = gymnasium.make(name)
    flag = 100 * (env.unwrapped.goal_position + math.pi / 6)
    assert signed_numbers(description_of(env).instructions) == [round(flag)]


@pytest.mark.parametrize("seed", range(3))
def test_a_policy_that_reads_the_text_reaches_the_flag(seed):
    env = gymnasium.make("MountainCar-v0")
    describe = description_of(env)
    observation, _ = env.reset(seed=seed)
    terminated = truncated = False
    while not (terminated or truncated):
        _, speed = signed_numbers(describe(observation))
        word = "right" if speed >= 0 else "left"
        observation, _, terminated, truncated, _ = env.step(describe.action_words.index(word))
    assert terminated


def test_a_word_of_mountain_car_pushes_as_it_says():
    ends = speeds_after_each_word("MountainCar-v0", (-math.pi / 6, 0.0))
    assert ends["left"][1] < ends["wait"][1] < ends["right"][1]
    assert ends["wait"][1] == pytest.approx(0)


def degrees(angle):
    """An angle from -180 to 180 degrees."""
    return (math.degrees(angle) + 180) % 360 - 180


def test_both_links_are_in_degrees():
    for (upper, lower, upper_speed, lower_speed), text in states_and_texts("Acrobot-v1"):
        upper_text = signed_numbers(sentence(text, "Upper"))
        lower_text = signed_numbers(sentence(text, "Lower"))
        np.testing.assert_allclose(upper_text, [degrees(upper), math.degrees(upper_speed)], atol=0.501)
        np.testing.assert_allclose(lower_text, [degrees(lower), math.degrees(lower_speed)], atol=0.501)


def test_a_word_of_acrobot_turns_as_it_says():
    ends = speeds_after_each_word("Acrobot-v1", np.zeros(4))
    assert ends["left"][3] < -0.1 and ends["right"][3] > 0.1
    assert ends["wait"][3] == pytest.approx(0)


def test_left_of_the_pendulum_is_left_on_the_screen():
    """The environment draws an angle above zero counterclockwise, which is to the left of upright."""
    for (angle, speed), text in states_and_texts("Pendulum-v1"):
        np.testing.assert_allclose(signed_numbers(text), [-degrees(angle), -math.degrees(speed)], atol=0.501)


@pytest.mark.parametrize("name, sign", [("Pendulum-v1", -1), ("MountainCarContinuous-v0", 1)])
def test_five_words_push_from_left_to_right(name, sign):
    env = gymnasium.make(name)
    words = description_of(env).action_words
    lowest, highest = env.action_space.low[0], env.action_space.high[0]
    speeds = {}
    for word, force in zip(words, np.linspace(lowest, highest, len(words)), strict=True):
        env.reset(seed=0)
        env.unwrapped.state = np.zeros(2)
        env.step(np.array([force], dtype=np.float32))
        speeds[word] = sign * env.unwrapped.state[1]
    ordered = ["left", "half left", "wait", "half right", "right"]
    assert sorted(speeds, key=speeds.get) == ordered
