"""A saved agent knows its spaces: kind, dtype, bounds, start, order of parts; and acts as before."""

import json
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import given, settings, strategies as st

import algos
from algos import DQN, PPO, SAC, TD3, CNNPolicy, GSDEPolicy, LSTMPolicy, MLPPolicy, QPolicy, evaluate
from algos.envs.flatten import flatten, flatten_one, unflatten
from algos.envs.spaces import acts_alike, describe_space, reads_alike, restore_space
from tests.helpers.errors import refused
from tests.helpers.generated_spaces import (
    FLOATS,
    Random,
    action_spaces,
    boxes,
    check_parts,
    discretes,
    extreme_spaces,
    observation_spaces,
)  # fmt: skip

checked = settings(derandomize=True, deadline=None, database=None, max_examples=150)
few = settings(derandomize=True, deadline=None, database=None, max_examples=40)
DATA = Path(__file__).parents[2] / "data"
VECTOR, TWO = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)


def saved(space):
    return json.loads(json.dumps(describe_space(space), allow_nan=False))


def check_same(one, two):
    assert type(one) is type(two) and one == two
    if isinstance(one, spaces.Dict):
        assert list(one) == list(two)
        one, two = list(one.values()), list(two.values())
    if isinstance(one, (list, spaces.Tuple)):
        for part, other in zip(one, two, strict=True):
            check_same(part, other)
        return
    assert one.dtype == two.dtype and one.shape == two.shape
    if isinstance(one, spaces.Box):
        for name in ("low", "high", "bounded_below", "bounded_above"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    if isinstance(one, (spaces.Discrete, spaces.MultiDiscrete)):
        np.testing.assert_array_equal(one.start, two.start)


@pytest.mark.heavy
@checked
@given(extreme_spaces)
def test_a_restored_space_is_the_one_described(space):
    restored = restore_space(saved(space))
    check_same(space, restored)
    assert reads_alike(space, restored)


def batch_of(space, count=4):
    space.seed(0)
    samples = [space.sample() for _ in range(count)]
    return samples, concatenate(space, samples, create_empty_array(space, count))


@pytest.mark.heavy
@checked
@given(observation_spaces)
def test_observations_flatten_one_hot_and_unflatten(space):
    samples, batch = batch_of(space)
    flat = flatten(space, batch)
    np.testing.assert_array_equal(flatten_one(space, samples[1]), flat[1])
    if not isinstance(space, spaces.Box):
        assert flatten(space, flat) is flat, "once more changes nothing"
    check_parts(space, unflatten(space, torch.from_numpy(np.stack([flat, flat]))), batch)


def test_unflatten_refuses_another_size():
    space = spaces.Dict({"a": TWO, "b": VECTOR})
    with refused(ValueError, r"shape \(7, 4\)", r"expected \[\*, 5\]"):
        unflatten(space, torch.zeros(7, 4))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(3),
        spaces.Sequence(TWO),
        spaces.Graph(VECTOR, None),
        spaces.OneOf([TWO, VECTOR]),
        spaces.Dict(a=TWO, b=spaces.Tuple([spaces.Text(3)])),
        spaces.Dict([((1, 2), TWO)]),
        spaces.Box(0, 1, (2,), np.longdouble),
        spaces.Box(0, 1, (2,), np.dtype(">f4")),
        spaces.Discrete(2, dtype=np.dtype(">i4")),
        spaces.Tuple([]),
        spaces.Box(0, 1, (0,)),
        spaces.Box(0, 255, (0, 8, 8), np.uint8),
        spaces.Dict(a=spaces.Box(0, 1, (2, 0))),
    ],
    ids=str,
)
def test_a_policy_refuses_unreadable_observations(space):
    for kind in (MLPPolicy, LSTMPolicy, QPolicy):
        with pytest.raises(ValueError, match="observation_space is"):
            kind(space, TWO)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=2**63 - 1, dtype=np.uint64),
        spaces.MultiDiscrete([2, 2], start=[0, 2**63], dtype=np.uint64),
        spaces.Box(0, 1, (2,), np.longdouble),
        spaces.Discrete(2, dtype=np.dtype(">i4")),
        spaces.Box(0, 1, (0,)),
        spaces.MultiDiscrete(np.array([], dtype=np.int64)),
    ],
    ids=str,
)
def test_a_policy_refuses_actions_torch_cannot_hold(space):
    with refused(ValueError, "action_space is", "expected"):
        MLPPolicy(VECTOR, space)


def test_a_part_without_numbers_is_read_beside_others():
    space = spaces.Dict(a=spaces.Box(0, 1, (0,)), b=VECTOR)
    action, _ = MLPPolicy(space, TWO).predict(space.sample())
    assert action in TWO


def test_the_full_range_of_uint64_is_saved():
    space = spaces.Box(0, 2**64 - 1, (2,), np.uint64)
    saved = json.loads(json.dumps(describe_space(space)))
    assert saved["high"] == "18446744073709551615"
    assert restore_space(saved) == space
    for damaged in ("18446744073709551616", "-1", "9" * 100, "nine"):
        with pytest.raises(ValueError, match=r"a bound of uint64 was saved|invalid literal"):
            restore_space(saved | {"high": damaged})


# --- saved policies act alike --------------------------------------------------------------------


def check_acts_alike(policy, loaded, batch):
    assert acts_alike(policy.action_space, loaded.action_space)
    for deterministic in (True, False, False):
        loaded.generator.set_state(policy.generator.get_state())
        one, two = (player.act(batch, deterministic=deterministic) for player in (policy, loaded))
        np.testing.assert_array_equal(one.action.numpy(), two.action.numpy())
        np.testing.assert_array_equal(one.log_prob.numpy(), two.log_prob.numpy())


def check_saved(policy):
    """Save and load a policy; both act alike, and the loaded one is evaluated in the environment."""
    space = policy.observation_space
    with tempfile.TemporaryDirectory() as folder:
        arguments = json.loads(json.dumps(policy.save(Path(folder))))
        loaded = type(policy).load(Path(folder), arguments)
    with np.errstate(over="ignore"):  # a Box of float64 has numbers beyond float32
        check_acts_alike(policy, loaded, batch_of(space)[1])
        env = SyncVectorEnv([lambda: Random(space, policy.action_space)] * 2)
        assert evaluate(env, loaded, num_episodes=2).mean_return == 3


@pytest.mark.heavy
@few
@given(observation_spaces, action_spaces, st.sampled_from([MLPPolicy, LSTMPolicy]))
def test_a_saved_policy_acts_alike_whatever_its_spaces(observation_space, action_space, kind):
    check_saved(kind(observation_space, action_space, hidden=4 if kind is LSTMPolicy else (4,), seed=3))


@pytest.mark.heavy
@few
@given(observation_spaces, boxes(dtypes=FLOATS))
def test_a_saved_gsde_policy_acts_alike(observation_space, action_space):
    check_saved(GSDEPolicy(observation_space, action_space, hidden=(4,), seed=3))


@pytest.mark.heavy
@few
@given(observation_spaces, discretes())
def test_a_saved_q_policy_acts_alike(observation_space, action_space):
    check_saved(QPolicy(observation_space, action_space, hidden=(4,), seed=3))


@pytest.mark.heavy
@few
@given(st.sampled_from([(16, 8, 3), (2, 9, 7), (6, 6)]), st.sampled_from([0, 5]), action_spaces)
def test_a_saved_cnn_policy_acts_alike(shape, low, action_space):
    check_saved(CNNPolicy(spaces.Box(low, 255, shape, np.uint8), action_space, hidden=4, seed=3))


SEEN_TO_FAIL = {
    "MultiBinary": (VECTOR, spaces.MultiBinary(3)),
    "Discrete int32": (VECTOR, spaces.Discrete(3, dtype=np.int32)),
    "Discrete int8 at its end": (spaces.Discrete(8, start=120, dtype=np.int8), TWO),
    "MultiDiscrete int32": (VECTOR, spaces.MultiDiscrete([2, 3], dtype=np.int32)),
    "Box float16 actions": (VECTOR, spaces.Box(-1, 1, (2,), np.float16)),
    "Box float64 actions": (VECTOR, spaces.Box(0, 1, (2,), np.float64)),
    "Box bool": (spaces.Box(0, 1, (3,), bool), TWO),
    "Box uint16": (spaces.Box(0, 9, (3,), np.uint16), TWO),
    "Box uint64": (spaces.Box(0, 9, (3,), np.uint64), TWO),
    "Dict in another order": (spaces.Dict(OrderedDict([("speed", VECTOR), ("angle", VECTOR)])), TWO),
    "Box actions, Dict": (spaces.Dict({"b": VECTOR, "a": TWO}), spaces.Box(-3, 1, (2, 2), np.float32)),
    "Dict in a Tuple": (spaces.Tuple([TWO, spaces.Dict([("b", VECTOR), ("a", VECTOR)])]), TWO),
}


BOXES = [name for name, (_, action_space) in SEEN_TO_FAIL.items() if isinstance(action_space, spaces.Box)]
FOR_BOXES = [(algorithm, name) for algorithm in (SAC, TD3) for name in BOXES]
FOR_DQN = [(DQN, name) for name, (_, action_space) in SEEN_TO_FAIL.items() if isinstance(action_space, spaces.Discrete)]


@pytest.mark.heavy
@pytest.mark.parametrize(("algorithm", "name"), [*((PPO, name) for name in SEEN_TO_FAIL), *FOR_DQN, *FOR_BOXES])
def test_a_loaded_agent_fits_its_environment(algorithm, name, tmp_path):
    observation_space, action_space = SEEN_TO_FAIL[name]
    env = SyncVectorEnv([lambda: Random(observation_space, action_space)] * 2)
    sizes = dict(minibatch_size=8) if algorithm is PPO else dict(batch_size=8, learning_starts=8, buffer_size=64)
    agent = algorithm(env, seed=1, num_steps=8, **sizes)
    agent.learn(32)
    loaded = algos.load(agent.save(tmp_path))
    check_same(loaded.observation_space, observation_space)
    check_same(loaded.action_space, action_space)
    check_acts_alike(agent.policy, loaded, batch_of(observation_space)[1])
    expected = evaluate(env, agent.policy, num_episodes=3, seed=2).rollout
    found = evaluate(env, loaded, num_episodes=3, seed=2).rollout
    torch.testing.assert_close(found["log_prob"], expected["log_prob"], rtol=0, atol=0)


def test_parts_in_another_order_are_refused():
    pairs = [("speed", VECTOR), ("angle", VECTOR)]
    env = SyncVectorEnv([lambda: Random(spaces.Dict(pairs), TWO)])
    policy = MLPPolicy(spaces.Dict(dict(pairs)), TWO)
    with refused(ValueError, "reads Dict.'angle'", "environment has Dict.'speed'", "same order"):
        evaluate(env, policy, num_episodes=1)


def test_a_part_of_another_dtype_is_refused():
    """Bytes of an image are no numbers from 0 to 1."""
    env = SyncVectorEnv([lambda: Random(spaces.Dict(image=spaces.Box(0, 255, (3,), np.uint8)), TWO)])
    policy = MLPPolicy(spaces.Dict(image=spaces.Box(0, 1, (3,))), TWO)
    with refused(ValueError, "reads Dict", "environment has Dict"):
        evaluate(env, policy, num_episodes=1)


IMAGE = spaces.Box(0, 255, (8, 8), np.uint8)
FOUR = spaces.Discrete(4)
READ_DIFFERENTLY = {
    "pixels as fractions of 1": (IMAGE, spaces.Box(0, 1, (8, 8))),
    "fractions of 1 as pixels": (spaces.Box(0, 1, (8, 8)), IMAGE),
    "pixels of unknown scale": (IMAGE, spaces.Box(-np.inf, np.inf, (8, 8))),
    "brighter pixels": (spaces.Box(0, 3, (8, 8), np.uint8), IMAGE),
    "bytes as fractions of 1": (spaces.Box(0, 255, (3,), np.uint8), spaces.Box(0, 1, (3,))),
    "a choice as numbers": (FOUR, spaces.Box(-1, 1, (4,))),
    "numbers as a choice": (spaces.Box(-1, 1, (4,)), FOUR),
    "one choice as two": (FOUR, spaces.MultiDiscrete([2, 2])),
    "a choice as flags": (FOUR, spaces.MultiBinary(4)),
    "a choice from 1 on": (FOUR, spaces.Discrete(4, start=1)),
    "fractions of 1 in a Dict": (spaces.Dict(a=IMAGE), spaces.Dict(a=spaces.Box(0, 1, (8, 8)))),
    "numbers in a Tuple": (spaces.Tuple([FOUR, VECTOR]), spaces.Tuple([spaces.Box(-1, 1, (4,)), VECTOR])),
}
ONE_HOT = spaces.Box(0, 1, (4,), np.int64)
DICT = spaces.Dict(a=VECTOR, b=TWO)
READ_ALIKE = {
    "float64": (VECTOR, spaces.Box(-1, 1, (3,), np.float64)),
    "other bounds of floats": (VECTOR, spaces.Box(-np.inf, 9, (3,))),
    "other integers": (spaces.Box(0, 9, (3,), np.uint8), spaces.Box(0, 99, (3,), np.int64)),
    "pixels as floats": (IMAGE, spaces.Box(0, 255, (8, 8))),
    "pixels as int32": (IMAGE, spaces.Box(0, 255, (8, 8), np.int32)),
    "a board of symbols, from an agent of version 0.9": (IMAGE, spaces.Box(0, 10, (8, 8), np.uint8)),
    "a choice, flattened": (FOUR, ONE_HOT),
    "a choice, flattened in training": (ONE_HOT, FOUR),
    "a choice, one-hot as floats": (spaces.Box(0, 1, (4,)), FOUR),
    "a choice, from an agent of format 2": (spaces.Box(-np.inf, np.inf, (4,)), FOUR),
    "a Dict, flattened": (DICT, spaces.flatten_space(DICT)),
    "a Dict, flattened in training": (spaces.flatten_space(DICT), DICT),
    "float64 in a Dict": (DICT, spaces.Dict(a=spaces.Box(-1, 1, (3,), np.float64), b=TWO)),
}


def plays_and_trains(observation_space, env_space):
    """Evaluate and train a policy of one space in an environment of the other."""
    kind = CNNPolicy if observation_space is IMAGE else MLPPolicy
    policy = kind(observation_space, TWO, hidden=4 if kind is CNNPolicy else (4,))
    env = SyncVectorEnv([lambda: Random(env_space, TWO)] * 2)
    evaluate(env, policy, num_episodes=1)
    PPO(env, policy, num_steps=4).learn(8)


@pytest.mark.parametrize("name", READ_DIFFERENTLY)
def test_what_would_be_read_differently_is_refused(name):
    """The policy saw nearly black images, and played on without a word."""
    observation_space, env_space = READ_DIFFERENTLY[name]
    assert not reads_alike(observation_space, env_space)
    with refused(ValueError, "reads", "but the environment has", "from the same space", "or wrap the environment"):
        plays_and_trains(observation_space, env_space)


@pytest.mark.parametrize("name", READ_ALIKE)
def test_what_is_read_alike_is_accepted(name):
    observation_space, env_space = READ_ALIKE[name]
    assert reads_alike(observation_space, env_space)
    plays_and_trains(observation_space, env_space)


def test_an_agent_of_version_0_9_acts_as_it_did_there():
    """Trained and saved there, from spaces that it could not load; its actions and log-probs were printed there."""
    policy = algos.load(DATA / "agent-format-4")
    assert list(policy.observation_space) == ["speed", "angle"]
    speed, angle = np.array([[0.5, -0.5], [0.1, 0.9]], np.float32), np.array([1, 0], np.int32)
    step = policy.act({"angle": angle, "speed": speed}, deterministic=True)
    assert step.action.tolist() == [[1, 0, 1], [1, 0, 1]]
    assert step.log_prob.tolist() == pytest.approx([-0.140637, -0.143308], abs=1e-5)
    parts = [("speed", spaces.Box(-1, 1, (2,))), ("angle", spaces.Discrete(2, dtype=np.int32))]
    assert evaluate(Random(spaces.Dict(parts), spaces.MultiBinary(3)), policy, num_episodes=1).mean_return == 3


def test_descriptions_of_version_0_9_are_read():
    """Without bounds and dtypes of integers; they fit environments whose spaces have both."""
    former = {
        "Box": ({"shape": [2], "dtype": "float32"}, spaces.Box(-1, 1, (2,))),
        "Discrete": ({"n": 3, "start": 1}, spaces.Discrete(3, start=1, dtype=np.int32)),
        "MultiDiscrete": ({"choices": [2, 3], "start": [0, 1]}, spaces.MultiDiscrete([2, 3], np.int8, start=[0, 1])),
        "MultiBinary": ({"binary": [3]}, spaces.MultiBinary(3)),
        "Dict": (
            {"dict": [["b", {"n": 2, "start": 0}], ["a", {"shape": [1], "dtype": "uint8"}]]},
            spaces.Dict([("b", spaces.Discrete(2, dtype=np.int16)), ("a", spaces.Box(0, 9, (1,), np.uint8))]),
        ),
    }  # fmt: skip
    for description, space in former.values():
        assert reads_alike(restore_space(description), space)
    unbounded = restore_space({"shape": [2], "dtype": "float32"})
    assert np.isinf(unbounded.low).all() and np.isinf(unbounded.high).all()
