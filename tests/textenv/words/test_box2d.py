"""The description of LunarLander agrees with the bodies of the physics engine."""

import math

import gymnasium
import numpy as np
import pytest

from tests.helpers.descriptions import observations_of_play, sentence, signed_numbers
from textenv.words.box2d import LunarLander
from textenv.words.describing import description_of


def test_a_vector_by_hand():
    observation = np.array([-0.25, 0.5, 0.0, -1.234, -0.5, 0.4, 1, 1], np.float32)
    text = "Pad 25 right, 50 down. Moving 0, 123 down. Tilt 29 right, moving 57 left. Both legs down."
    assert LunarLander()(observation) == text


def landers(name):
    """The environment after each step of a random game, and its description."""
    env = gymnasium.make(name)
    describe = description_of(env)
    for observation in observations_of_play(env, 400):
        yield env.unwrapped, describe(observation)


@pytest.mark.parametrize("name", ["LunarLander-v3", "LunarLanderContinuous-v3"])
def test_the_text_agrees_with_the_bodies(name):
    pytest.importorskip("Box2D")
    leg_texts = set()
    for env, text in landers(name):
        body = env.lander
        pad = (env.helipad_x1 + env.helipad_x2) / 2
        pad_right, pad_down = signed_numbers(sentence(text, "Pad"))
        assert pad_right == pytest.approx(10 * (pad - body.position.x), abs=0.51)
        assert pad_down == pytest.approx(15 * (body.position.y - env.helipad_y - 18 / 30), abs=0.51)
        speed_right, speed_down = signed_numbers(sentence(text, "Moving"))
        assert speed_right == pytest.approx(20 * body.linearVelocity.x, abs=0.51)
        assert speed_down == pytest.approx(-40 / 3 * body.linearVelocity.y, abs=0.51)
        tilt, turn = signed_numbers(sentence(text, "Tilt"))
        assert tilt == pytest.approx(-math.degrees(body.angle), abs=0.51)
        assert turn == pytest.approx(-math.degrees(body.angularVelocity), abs=0.51)

        # Legs by where they are
        names = []
        for leg in env.legs:
            if leg.ground_contact:
                x = (leg.position - body.position).dot(body.GetWorldVector((1, 0)))
                names.append("Left" if x < 0 else "Right")
        expected = {0: "", 1: f"{(names or [''])[0]} leg down.", 2: "Both legs down."}[len(names)]
        leg_text = text.partition("Tilt")[2].partition(". ")[2]
        leg_texts.add(leg_text)
        assert leg_text == expected
    assert len(leg_texts) > 2


def speeds_after(env, action):
    """Speed to the right, upwards, and clockwise after some steps of one action, from rest."""
    env.reset(seed=0)
    bodies = [env.unwrapped.lander, *env.unwrapped.legs]
    for body in bodies:
        body.linearVelocity = (0, 0)
        body.angularVelocity = 0
    for _ in range(5):
        env.step(action)
    lander = env.unwrapped.lander
    return np.array([lander.linearVelocity.x, lander.linearVelocity.y, -lander.angularVelocity])


def test_a_word_fires_as_it_says():
    pytest.importorskip("Box2D")
    env = gymnasium.make("LunarLander-v3")
    speeds = {word: speeds_after(env, action) for action, word in enumerate(description_of(env).action_words)}
    changes = {word: speed - speeds["wait"] for word, speed in speeds.items()}
    assert changes["left"][0] < -0.1 and changes["left"][2] < -0.1
    assert changes["right"][0] > 0.1 and changes["right"][2] > 0.1
    assert changes["up"][1] > 1


def test_powers_fire_as_the_instructions_say():
    pytest.importorskip("Box2D")
    env = gymnasium.make("LunarLanderContinuous-v3")
    description = description_of(env)
    assert "main (4, 5: on), side (1: left, 5: right)" in description.instructions
    main_words, side_words = description.action_words
    powers = dict(zip(main_words, np.linspace(-1, 1, 5), strict=True))
    assert side_words == main_words
    falling = speeds_after(env, np.array([-1.0, 0.0]))
    rises = [word for word in main_words if speeds_after(env, np.array([powers[word], 0.0]))[1] > falling[1] + 1]
    assert rises == ["4", "5"]
    sides = {word: speeds_after(env, np.array([-1.0, powers[word]]))[0] - falling[0] for word in side_words}
    assert [word for word in side_words if sides[word] < -0.1] == ["1"]
    assert [word for word in side_words if sides[word] > 0.1] == ["5"]
