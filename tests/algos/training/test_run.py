"""The history of a run, saved and read; what a run warns of at its start."""

import json
import logging

import gymnasium as gym
import pytest
from gymnasium.vector import SyncVectorEnv

from algos import PPO
from algos.storage.serialization import from_json, to_json
from algos.training.run import History, Run
from tests.helpers.resumable_agents import mlp


def test_a_history_is_the_same_after_it_was_saved():
    rows = [{"steps": 1, "a": 0.5}, {"steps": 2, "a": float("nan"), "b": 3.0}, {"steps": 3, "a": -1e300}, {"steps": 4}]
    tensors = {}
    saved = json.loads(json.dumps(to_json(History(rows).state(), tensors)))
    again = History.from_state(from_json(saved, tensors))
    again.append({"steps": 5, "a": 1.0})
    assert str(list(again)) == str([*rows, {"steps": 5, "a": 1.0}])
    assert list(History.from_state(History([]).state())) == []


def of_all_slots():
    return gym.wrappers.vector.NormalizeObservation(gym.make_vec("CartPole-v1", num_envs=2))


def of_each_slot():
    return SyncVectorEnv([lambda: gym.wrappers.NormalizeReward(gym.make("CartPole-v1"))] * 2)


@pytest.mark.parametrize(
    ("make_env", "wrapper"),
    [(of_all_slots, "NormalizeObservation"), (of_each_slot, "NormalizeReward"), (lambda: of_all_slots().env, None)],
)
def test_wrappers_that_an_evaluation_would_lack_are_warned_of(make_env, wrapper, caplog):
    env = make_env()
    with caplog.at_level(logging.WARNING):
        Run(PPO(env, mlp(env), num_steps=4, minibatch_size=8))
    warnings = [record.getMessage() for record in caplog.records if "running statistics" in record.getMessage()]
    assert len(warnings) == (wrapper is not None)
    if wrapper is not None:
        assert f"the running statistics of {wrapper} stay" in warnings[0] and "normalize_rewards=True" in warnings[0]
