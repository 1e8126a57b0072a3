"""What a worker takes for an observation and for a reward."""

import gymnasium
import numpy as np
import pytest

from algos.envs.env_worker import check_observation, check_paid_reward


def test_what_an_observation_is():
    spaces = gymnasium.spaces
    both = spaces.Dict(a=spaces.Discrete(3), b=spaces.Tuple([spaces.Box(0, 1, (2,), np.uint8)]))
    check_observation(both, {"a": 2, "b": (np.zeros(2, dtype=np.uint8),)})
    check_observation(spaces.Box(0, 1, (2,), np.float32), np.array([1.5, 0]))  # overstepped, of another precision
    for wrong, words in [
        ({"a": 2}, "expected a dictionary of a, b"),
        ({"a": 3, "b": (np.zeros(2, dtype=np.uint8),)}, "expected one of Discrete"),
        ({"a": 2, "b": (np.zeros(2),)}, "has dtype float64, expected uint8"),
        ({"a": 2, "b": ()}, "expected a tuple of 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_observation(both, wrong)
    check_paid_reward(np.float32(1))
    with pytest.raises(ValueError, match="expected a finite number"):
        check_paid_reward(np.ones(1))
