"""Observations of every space as one flat row of float32."""

import functools
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from algos import PPO, LSTMPolicy, MLPPolicy, PPOConfig, collect, evaluate
from algos.envs.flatten import flatten, flatten_one
from algos.make import make_policy
from tests.helpers.errors import refused

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
PLANE = spaces.Box(-1, 1, (3,), np.float32)
OBSERVATIONS = {
    "Discrete": spaces.Discrete(7, start=2),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(6),
    "Dict": spaces.Dict({"place": spaces.Box(-1, 1, (2, 2)), "door": spaces.Discrete(3)}),
    "Tuple": spaces.Tuple([spaces.Discrete(5), spaces.Dict({"flags": spaces.MultiBinary(3)}), PLANE]),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_a_batch_is_flattened_as_by_gymnasium(name):
    space = OBSERVATIONS[name]
    space.seed(0)
    samples = [space.sample() for _ in range(7)]
    batch = concatenate(space, samples, create_empty_array(space, 7))
    expected = np.stack([np.asarray(spaces.flatten(space, sample), dtype=np.float32) for sample in samples])
    found = flatten(space, batch)
    if isinstance(space, spaces.Box):
        assert found is batch
    else:
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == np.float32 and flatten(space, found) is found
        np.testing.assert_array_equal(flatten_one(space, samples[0]), expected[0])


@pytest.mark.parametrize(
    ("space", "right", "wrong"),
    [
        (spaces.Discrete(4), 3, 4),
        (spaces.Discrete(4), 0, -1),
        (spaces.Discrete(4, start=1), 4, 0),
        (spaces.MultiDiscrete([3, 4]), np.array([2, 3]), np.array([3, 0])),
        (spaces.MultiDiscrete([3, 4], start=[1, 0]), np.array([1, 0]), np.array([0, 0])),
        (spaces.Dict(door=spaces.Discrete(3)), {"door": 2}, {"door": 7}),
        (spaces.Dict(image=spaces.Box(0, 255, (8, 8, 3), np.uint8), door=spaces.Discrete(3)),
         {"image": np.zeros((8, 8, 3), np.uint8), "door": 2}, {"image": np.zeros((8, 8, 3), np.uint8), "door": 7}),
    ],
    ids=str,
)  # fmt: skip
@MODES
def test_a_value_outside_the_space_is_refused(space, right, wrong, mode):
    """In the second slot, at the last step but one, at the last, and at none."""
    for shown, is_outside in [([right] * 3, False), ([right, wrong, right], True), ([right, right, wrong], True)]:
        slots = [Counter(space, [right] * 3, 2), Counter(space, shown, 2)]
        env = SyncVectorEnv([lambda n=n, slots=slots: slots[n] for n in (0, 1)], autoreset_mode=mode)
        policy = make_policy(env)
        if not is_outside:
            assert collect(env, policy, num_steps=6).shape == (2, 6)
            continue
        part = space["door"] if isinstance(space, spaces.Dict) else space
        value = wrong["door"] if isinstance(space, spaces.Dict) else wrong
        words = f"has the value {value}, which is not in {part}"
        with refused(ValueError, re.escape(words), "(row|slot) 1", "observation space"):
            collect(env, policy, num_steps=6)


def test_observations_without_a_fixed_size_are_refused():
    for space in (spaces.Text(5), spaces.Sequence(PLANE), spaces.Dict({"a": PLANE, "b": spaces.Text(3)})):
        for policy in (MLPPolicy, LSTMPolicy):
            with refused(ValueError, "observation_space is", "cannot read", "expected Box", "--wrapper"):
                policy(space, spaces.Discrete(2))


class Counter(gym.Env):
    """Shows its clock in any space: observation number t of a list; ends at ``length``."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, shown, length=5):
        self.observation_space, self.shown, self.length = space, shown, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.shown[0], {}

    def step(self, action):
        self.time += 1
        return self.shown[self.time], 1.0, self.time == self.length, False, {}


def counter(space, mode, length=5, num_envs=2):
    space.seed(0)
    shown = [space.sample() for _ in range(length + 1)]
    lengths = [length - n for n in range(num_envs)]
    env = SyncVectorEnv([lambda n=n: Counter(space, shown, n) for n in lengths], autoreset_mode=mode)
    return env, np.stack([spaces.flatten(space, x) for x in shown])


@MODES
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_every_observation_arrives_flat(name, mode):
    env, flat = counter(OBSERVATIONS[name], mode)
    policy = make_policy(env)
    rollout = collect(env, policy, num_steps=23, seed=0)
    for slot, length in enumerate([5, 4]):
        row = rollout[slot][rollout["mask"][slot]]
        time = torch.arange(len(row)) % length
        assert int(row["terminated"].sum()) >= 3
        np.testing.assert_array_equal(row["observation"], flat[time])
        np.testing.assert_array_equal(row["next_observation"], flat[time + 1])
    PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=16, num_epochs=1)).learn(64)
    assert len(evaluate(env, policy, num_episodes=3)[0]) == 3


# --- what is not in the space ----------------------------------------------------------------------------------------

CAMERA = spaces.Box(0, 255, (3, 8, 10), np.uint8)
PARTS = spaces.Dict({"camera": CAMERA, "place": spaces.Box(-1, 1, (2,)), "speed": spaces.Box(-1, 1, (3,))})


def parts(**changed):
    """Two observations of `PARTS`."""
    rows = {"camera": np.zeros((2, 3, 8, 10), np.uint8), "place": np.zeros((2, 2)), "speed": np.zeros((2, 3))}
    return rows | changed


@pytest.mark.parametrize(("changed", "words"), [
    ({"camera": np.zeros((2, 8, 10, 3), np.uint8)}, [r"shape \(2, 8, 10, 3\)", r"expected \(2, 3, 8, 10\)"]),
    ({"camera": np.ones((2, 3, 8, 10), np.float32)}, ["are float32", "the space is Box", "return uint8"]),
    ({"place": np.zeros((2, 3)), "speed": np.zeros((2, 2))}, [r"shape \(2, 3\)", r"expected \(2, 2\)"]),
])  # fmt: skip
def test_parts_of_another_shape_or_kind_are_refused(changed, words):
    with refused(ValueError, *words):
        flatten(PARTS, parts(**changed))


def test_a_missing_part_is_refused():
    rows = parts()
    del rows["place"]
    with refused(ValueError, "the parts camera, speed", "'place'"):
        flatten(PARTS, rows)


def test_pixels_of_another_integer_are_read_as_they_are():
    rows = parts(camera=np.full((2, 3, 8, 10), 200))
    assert np.array_equal(flatten(PARTS, rows), flatten(PARTS, parts(camera=np.full((2, 3, 8, 10), 200, np.uint8))))


class Room(gym.Env):
    """Shows an image of its own making for three steps."""

    observation_space = CAMERA
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros((3, 8, 10), np.uint8), {}

    def step(self, action):
        self.time += 1
        return np.full((3, 8, 10), 80 * self.time, np.uint8), 1.0, self.time == 3, False, {}


@pytest.mark.parametrize(("change", "words"), [
    (lambda image: image.transpose(0, 2, 3, 1).copy(), [r"shape \(2, 8, 10, 3\)", r"expected .*\(2, 3, 8, 10\)"]),
    (lambda image: image / np.float32(255), ["are float32", "networks divide by 255"]),
], ids=["channels last", "scaled"])  # fmt: skip
def test_a_wrapper_that_changes_images_must_change_their_space(change, words):
    env = gym.wrappers.vector.TransformObservation(SyncVectorEnv([Room] * 2), change)
    with refused(ValueError, *words):
        PPO(env, num_steps=8).learn(16)


class Overwrites(gym.Env):
    """Counts the steps in one array, which it returns again and again; also as a part of a dictionary."""

    action_space = spaces.Discrete(2)

    def __init__(self, in_dict=False):
        self.observation_space = spaces.Box(0, 10, (1,))
        self.in_dict = in_dict
        if in_dict:
            self.observation_space = spaces.Dict({"time": self.observation_space})
        self.time = np.zeros(1, np.float32)

    def observe(self):
        return {"time": self.time} if self.in_dict else self.time

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time[:] = 0
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        return self.observe(), 1.0, False, bool(self.time[0] == 4), {}


class Window(gym.Env):
    """Shows windows of one array of data, which overlap, and which nobody writes into."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 100, (3,))
    data = np.arange(100, dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.data[:3], {}

    def step(self, action):
        self.time += 1
        return self.data[self.time : self.time + 3], 1.0, False, self.time == 2, {}


def test_windows_of_one_array_are_not_written_over(caplog):
    env = SyncVectorEnv([Window], autoreset_mode=AutoresetMode.SAME_STEP)
    collect(env, MLPPolicy(Window.observation_space, Window.action_space), num_steps=10)
    assert "same array" not in caplog.text


def test_a_last_observation_that_another_process_writes_over_is_told(caplog):
    """By AsyncVectorEnv; FrozenLake may end where it began by chance."""
    lake = functools.partial(gym.make, "FrozenLake-v1", max_episode_steps=4)
    for make_env, is_lost in ((Overwrites, True), (Window, False), (lake, False)):
        env = AsyncVectorEnv([make_env] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        policy = MLPPolicy(env.single_observation_space, env.single_action_space)
        rollout = collect(env, policy, num_steps=40)
        env.close()
        assert caplog.text.count("same array from step and reset") == is_lost
        caplog.clear()
    next_observation = rollout["next_observation"][rollout["truncated"]].argmax(-1)
    assert (next_observation == 0).any() and (next_observation != 0).any()


@MODES
@pytest.mark.parametrize("in_dict", [False, True])
def test_a_last_observation_that_a_reset_writes_over_is_told(mode, in_dict, caplog):
    """In SAME_STEP mode Gymnasium resets before it copies; in the others the last observation is the fourth step's."""
    env = SyncVectorEnv([lambda: Overwrites(in_dict)] * 2, autoreset_mode=mode)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    rollout = collect(env, policy, num_steps=10)
    collect(env, policy, num_steps=10)
    is_lost = mode is AutoresetMode.SAME_STEP
    assert caplog.text.count("same array from step and reset") == is_lost
    last = rollout["next_observation"][rollout["truncated"]].unique().tolist()
    assert last == [0 if is_lost else 4]
