"""States of environments, read and set."""

import json

import gymnasium
import numpy as np
import pytest

from algos.make import make_vector_environment
from algos.storage.env_state import changed_arguments, env_state, set_env_state
from algos.storage.serialization import from_json, to_json


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "MountainCar-v0", "Pendulum-v1"])
def test_an_environment_goes_on_from_its_state(env_id):
    """Two environments, one put into the state of the other in mid-episode, give the same ever after."""
    one, other = (make_vector_environment(env_id, 2, seed_each=True) for _ in range(2))
    one.reset(seed=3)
    one.action_space.seed(0)
    actions = [one.action_space.sample() for _ in range(60)]
    for action in actions[:7]:
        one.step(action)
    tensors = {}
    saved = json.loads(json.dumps(to_json(env_state(one), tensors)))
    set_env_state(other, from_json(saved, tensors))
    for action in actions[7:]:
        for x, y in zip(one.step(action)[:4], other.step(action)[:4], strict=True):
            assert np.array_equal(x, y)


@pytest.mark.parametrize("env_id, one, other, said", [
    ("Pendulum-v1", {"g": 9.0}, {"g": 3.0}, '"g": 9.0'),
    ("CartPole-v1", {}, {"max_episode_steps": 50}, '"max_episode_steps": 500'),
    ("FrozenLake-v1", {"is_slippery": False}, {}, '"is_slippery": false'),
    ("FrozenLake-v1", {"map_name": "4x4"}, {"desc": ["SF", "HG"]}, '"desc": ["SF", "HG"]'),
])  # fmt: skip
@pytest.mark.parametrize("mode", ["sync", None])
def test_other_arguments_of_an_environment_are_named(env_id, one, other, said, mode):
    def make(arguments, count=2):
        return gymnasium.make_vec(env_id, count, vectorization_mode=mode, **arguments)

    saved = env_state(make(one))
    assert said in changed_arguments(make(other), saved)
    assert changed_arguments(make(one), saved) == changed_arguments(make(one, 3), saved) == ""
    # Earlier versions do not know the arguments
    for part in saved:
        del part["made_with"]
    assert changed_arguments(make(other), saved) == ""


def test_an_empty_list_of_wrappers_is_none():
    def make(**arguments):
        return gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync", **arguments)

    assert changed_arguments(make(wrappers=[]), env_state(make())) == ""
    assert changed_arguments(make(), env_state(make(wrappers=[]))) == ""
