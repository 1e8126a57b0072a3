"""States of environments, read and set."""

import json

import numpy as np
import pytest

from algos.make import make_vector_environment
from algos.storage.env_state import env_state, set_env_state
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
