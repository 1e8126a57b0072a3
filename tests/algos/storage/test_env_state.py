"""States of environments, read and set."""

import json
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.toy_text.blackjack import BlackjackEnv
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation, RescaleAction, TimeLimit, TransformReward

from algos import PPO, evaluate
from algos.make import make_vector_environment
from algos.storage.env_state import changed_arguments, env_state, set_env_state, share_objects
from algos.storage.serialization import from_json, to_json
from textenv.importing import read_module


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


def parts_of(env):
    """Wrappers and environments of a vector of environments."""
    parts = [env]
    for part in parts:
        parts += vars(part).get("envs", ())
        if "env" in vars(part):
            parts.append(vars(part)["env"])
    return parts


def directly(make_env):
    return lambda value: SyncVectorEnv([lambda: make_env(value)] * 2)


@pytest.mark.parametrize("make, one, other, said", [
    (directly(lambda g: TimeLimit(PendulumEnv(g=g), 50)), 3.0, 30.0, "had g 3.0, now 30.0"),
    (directly(lambda is_slippery: FrozenLakeEnv(is_slippery=is_slippery)), True, False, "had P "),
    (directly(lambda sab: BlackjackEnv(sab=sab)), True, False, "had sab True, now False"),
    (lambda limit: CartPoleVectorEnv(2, max_episode_steps=limit), 10, 500, "had max_episode_steps 10, now 500"),
    (
        lambda rows: gymnasium.make_vec("FrozenLake-v1", 2, vectorization_mode="sync", desc=np.array(rows, "c")),
        ["SF", "HG"],
        ["SH", "FG"],
        "had desc ",
    ),
    (
        directly(lambda low: RescaleAction(PendulumEnv(), np.array([low], "f"), np.array([1], "f"))),
        -1,
        -2,
        "had the arguments {'min_action': array([-1.]",
    ),
])  # fmt: skip
def test_other_settings_that_gymnasium_does_not_know_are_named(make, one, other, said, tmp_path, caplog):
    """A run that is resumed with them began new episodes of the former environment without a word."""
    PPO(make(one), num_steps=16, seed=1).learn(100, run_dir=tmp_path)
    PPO(make(one), num_steps=16, seed=1).learn(200, run_dir=tmp_path, resume=tmp_path)
    assert "begin anew" not in caplog.text

    env = make(other)
    name = said.split()[1]
    wanted = [vars(part)[name] for part in parts_of(env) if name in vars(part)]
    PPO(env, num_steps=16, seed=1).learn(300, resume=tmp_path)
    assert said in caplog.text and "its episodes begin anew" in caplog.text
    assert wanted or "arguments" in said
    found = [vars(part)[name] for part in parts_of(env) if name in vars(part)]
    assert all(map(np.array_equal, found, wanted)) and len(found) == len(wanted)


@pytest.mark.parametrize("make_env", [PendulumEnv, lambda: gymnasium.make("CartPole-v1"), FrozenLakeEnv])
@pytest.mark.parametrize("touched", [(True, False), (False, True), (True, True)])
def test_an_environment_that_was_used_before_goes_on(make_env, touched, tmp_path, caplog):
    """What a reset changes is no setting."""
    weights = []
    for folder, steps in ((None, (200,)), (tmp_path, (96, 200))):
        for number, total in enumerate(steps):
            env = SyncVectorEnv([make_env] * 2)
            if touched[number]:
                env.reset(seed=5)
                env.step(env.action_space.sample())
            agent = PPO(env, num_steps=16, seed=1)
            agent.learn(total, run_dir=folder, resume=folder if number else None)
        weights.append([weight.clone() for weight in agent.policy.parameters()])
    assert "begin anew" not in caplog.text
    assert all(map(torch.equal, *weights))


# --- what wrappers call ----------------------------------------------------------------------------------------------


class Shrinking:
    """Pays r/√n at the n-th call: a reward with a state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, reward):
        self.calls += 1
        return reward / self.calls**0.5


class SavedShrinking(Shrinking):
    """The same, with the two methods by which a state is saved."""

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def shrinking(kind, num_envs=2):
    """A vector environment whose wrappers pay shrinking rewards, each slot by an object of its own."""
    return gymnasium.make_vec(
        "Pendulum-v1", num_envs, vectorization_mode="sync", wrappers=[lambda env: TransformReward(env, kind())]
    )


def trained(env, steps, **options):
    """Metrics of each iteration of a training, without those of time."""
    history = PPO(env, num_steps=64, num_epochs=1, seed=3).learn(steps, **options)
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in history]


def test_an_object_that_a_wrapper_calls_goes_on_from_its_state(tmp_path, caplog):
    parts = tmp_path / "parts"
    whole = trained(shrinking(SavedShrinking), 800, run_dir=tmp_path / "whole")
    trained(shrinking(SavedShrinking), 300, run_dir=parts)
    assert trained(shrinking(SavedShrinking), 800, run_dir=parts, resume=parts) == whole
    assert any("episode/return" in row for row in whole) and "which no checkpoint has" not in caplog.text


def test_an_object_without_methods_for_its_state_is_named(tmp_path, caplog):
    trained(shrinking(Shrinking), 300, run_dir=tmp_path)
    assert caplog.text.count("the training changes Shrinking.calls, which no checkpoint has") == 1


def test_evaluations_pay_what_the_training_would_pay_now():
    training_env = shrinking(SavedShrinking)
    training_env.reset(seed=1)
    for _ in range(30):
        training_env.step(training_env.action_space.sample())
    for num_envs in (1, 2, 3):
        env = shrinking(SavedShrinking, num_envs)
        share_objects(training_env, env)
        assert [single.get_wrapper_attr("func").calls for single in env.envs] == [30] * num_envs


def test_an_evaluation_does_not_change_what_the_training_calls():
    """Both environments pay by the same object."""
    shrink = SavedShrinking()
    env = gymnasium.make_vec(
        "Pendulum-v1", 2, vectorization_mode="sync", wrappers=[lambda env: TransformReward(env, shrink)]
    )
    evaluate(env, PPO(env).policy, num_episodes=1)
    assert shrink.calls == 0


class Own(gymnasium.Env):
    """An environment of one's own, whose state is unknown: a resumed run resets it."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(2, np.float32), 1.0, self.time == 5, False, {}


def test_what_is_called_goes_on_where_the_environment_begins_anew(tmp_path, caplog):
    shrink = SavedShrinking()
    other = SavedShrinking()
    trained(SyncVectorEnv([lambda: TransformReward(Own(), shrink)]), 64, run_dir=tmp_path)
    trained(SyncVectorEnv([lambda: TransformReward(Own(), other)]), 128, run_dir=tmp_path, resume=tmp_path)
    assert "begins new episodes" in caplog.text
    assert shrink.calls > 60 and other.calls > shrink.calls + 50


@pytest.mark.parametrize("name", ["own_env", "textenvironments", "algos_of_mine"])
def test_an_environment_in_a_file_is_not_taken_for_ours(name, tmp_path, monkeypatch, caplog):
    """A file of the working folder is imported under a name inside `textenv.importing`; others begin as ours do."""
    (tmp_path / f"{name}.py").write_text("import gymnasium\nclass Mine(gymnasium.Env): pass\n")
    monkeypatch.chdir(tmp_path)
    module = read_module(name)
    monkeypatch.delitem(sys.modules, name)
    assert env_state(module.Mine()) is None
    assert f"{name}.py:Mine cannot be saved mid-episode: only Gymnasium's small games and ours" in caplog.text


# --- wrappers with a memory of limited length ------------------------------------------------------------------------


def test_stacked_frames_go_on_from_their_state(tmp_path):
    """`FrameStackObservation` keeps its frames in a deque with a limit."""

    def stacked():
        wrappers = [lambda env: FrameStackObservation(env, 4)]
        return gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync", wrappers=wrappers)

    parts = tmp_path / "parts"
    whole = trained(stacked(), 800, run_dir=tmp_path / "whole")
    trained(stacked(), 300, run_dir=parts)
    assert trained(stacked(), 800, run_dir=parts, resume=parts) == whole
