"""The default description of every space, and which environments are known."""

import copy
import itertools
import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from hypothesis import given, settings, strategies as st

from tests.helpers.descriptions import observations_of_play
from tests.helpers.generated_spaces import Random, dicts, observation_spaces, tuples
from textenv.lm.loading import load_tokenizer
from textenv.words.actions import ActionWords
from textenv.words.describing import KNOWN, SpaceDescription, description_of, restore_description

texts = st.integers(1, 5).map(lambda length: spaces.Text(length, min_length=0, charset='ab" ,='))
open_spaces = st.one_of(
    texts,
    st.builds(spaces.Sequence, observation_spaces, stack=st.booleans()),
    st.builds(spaces.Graph, st.just(spaces.Box(-1, 1, (2,))), st.sampled_from([None, spaces.Discrete(3)])),
    st.lists(st.one_of(observation_spaces, texts), min_size=1, max_size=3).map(spaces.OneOf),
)
every_space = st.one_of(observation_spaces, open_spaces, dicts(open_spaces), tuples(open_spaces))


def differ(space, one, two):
    """Whether two observations of fixed size differ by more than the rounding to three digits."""
    if isinstance(space, spaces.Dict):
        return any(differ(part, one[name], two[name]) for name, part in space.items())
    if isinstance(space, spaces.Tuple):
        return any(map(differ, space, one, two))
    if np.issubdtype(space.dtype, np.floating):
        larger = np.maximum(np.abs(one), np.abs(two))
        return bool(np.any(np.abs(one - two) > 0.011 * larger))
    return bool(np.any(one != two))


@pytest.mark.heavy
@settings(derandomize=True, deadline=None, database=None)
@given(every_space, st.integers(0, 1000))
def test_every_space_has_a_text_equal_for_equals(space, seed):
    describe = SpaceDescription(space)
    space.seed(seed)
    observation = space.sample()
    text = describe(observation)
    assert isinstance(text, str) and text.strip()
    assert describe(copy.deepcopy(observation)) == text


@pytest.mark.heavy
@settings(derandomize=True, deadline=None, database=None)
@given(observation_spaces, st.integers(0, 1000))
def test_observations_that_differ_have_other_texts(space, seed):
    describe = SpaceDescription(space)
    space.seed(seed)
    one = space.sample()
    two = space.sample()
    if differ(space, one, two):
        assert describe(one) != describe(two)


@pytest.mark.heavy
@settings(derandomize=True, deadline=None, database=None)
@given(observation_spaces, st.integers(0, 1000))
def test_one_of_a_batch_has_the_same_text(space, seed):
    describe = SpaceDescription(space)
    space.seed(seed)
    observations = [space.sample() for _ in range(3)]
    batch = concatenate(space, observations, create_empty_array(space, 3))
    batched_space = gymnasium.vector.utils.batch_space(space, 3)
    assert [*map(describe, iterate(batched_space, batch))] == [*map(describe, observations)]


@pytest.mark.parametrize(
    "space, one, two",
    [
        (spaces.Text(5, min_length=0, charset='"'), "", '""'),
        (spaces.Text(5, charset="a\n"), "a", "a\n"),
        (spaces.Sequence(spaces.Discrete(20)), (1, 2), (12,)),
        (spaces.Tuple([spaces.Text(9), spaces.Text(9)]), ('a", x1="b', "c"), ("a", 'b", x1="c')),
        (spaces.Box(-99, 99, (2, 2), np.int64), np.array([[1, 11], [0, 0]]), np.array([[11, 1], [0, 0]])),
        (spaces.Box(0, 2**64 - 1, (), np.uint64), np.uint64(2**64 - 1), np.uint64(2**64 - 2)),
    ],
)
def test_texts_that_could_be_mistaken_differ(space, one, two):
    assert SpaceDescription(space)(one) != SpaceDescription(space)(two)


def test_names_come_from_keys_and_indices():
    space = spaces.Dict(
        {
            "speed": spaces.Box(-1, 1, (2,)),
            "10": spaces.Tuple([spaces.Discrete(3), spaces.Dict(inner=spaces.MultiBinary(2))]),
        },
        sort_keys=False,
    )
    observation = {
        "speed": np.array([0.5, np.nan], np.float32),
        "10": (np.int64(2), {"inner": np.array([0, 1], np.int8)}),
    }
    assert SpaceDescription(space)(observation) == "speed0=0.5, speed1=nan, 10_0=2, 10_1_inner0=0, 10_1_inner1=1"


def test_integers_in_rows_are_drawn_as_a_map():
    space = spaces.Box(0, 9, (2, 3), np.uint8)
    describe = SpaceDescription(space)
    assert describe(np.array([[0, 0, 7], [1, 0, 0]])) == "007\n100\n7 at (0,2), 1 at (1,0)"
    assert describe(np.array([[1, 2, 7], [1, 3, 0]])) == "127\n130"
    both = SpaceDescription(spaces.Tuple([spaces.Discrete(2), space, spaces.Discrete(2), space]))
    ones = np.ones((2, 3), np.uint8)
    assert both((0, ones, 1, 2 * ones)) == "x0=0, x1=\n111\n111\nx2=1, x3=\n222\n222"


def test_a_map_of_larger_numbers_has_spaces():
    describe = SpaceDescription(spaces.Box(0, 99, (2, 2), np.int64))
    assert describe(np.array([[1, 12], [11, 2]])) == "1 12\n11 2\n1 at (0,0), 12 at (0,1), 11 at (1,0), 2 at (1,1)"
    start = np.array([[0, 126], [0, 126]], np.int8)
    describe = SpaceDescription(spaces.MultiDiscrete(np.full((2, 2), 2, np.int8), np.int8, start=start))
    assert describe(np.array([[0, 127], [1, 126]], np.int8)).startswith("0 127\n1 126\n")


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (64, 64, 3), np.uint8),
        spaces.Dict(view=spaces.Box(0, 255, (17, 17, 3), np.uint8), speed=spaces.Discrete(3)),
        spaces.Box(-1, 1, (201,)),
        spaces.Space(),
    ],
    ids=["image", "image in a dict", "many numbers", "foreign space"],
)
def test_an_image_or_foreign_space_has_no_words(space):
    with pytest.raises(ValueError, match="give describe="):
        SpaceDescription(space)


def test_an_environment_without_a_table_entry_gets_the_default():
    space = spaces.Box(-1, 1, (2,), np.float64)
    describe = description_of(Random(space, spaces.Discrete(2)))
    assert describe(np.array([0.5, -1])) == "x0=0.5, x1=-1"
    assert describe.action_words is None and describe.instructions == ""
    saved = json.loads(json.dumps(describe.saved()))
    assert restore_description(saved, space)(np.array([0.5, -1])) == "x0=0.5, x1=-1"


def test_a_wrapper_of_the_observation_leads_to_the_default():
    env = gymnasium.make("FrozenLake-v1")
    assert description_of(gymnasium.wrappers.TimeLimit(env, 5)).saved()["name"] == "FrozenLake"
    shifted = gymnasium.wrappers.TransformObservation(env, lambda state: 15 - state, env.observation_space)
    assert description_of(shifted).saved()["name"] == "SpaceDescription"
    timed = gymnasium.wrappers.TimeAwareObservation(env)
    assert description_of(timed).saved()["name"] == "SpaceDescription"


def test_another_observation_space_leads_to_the_default():
    env = gymnasium.make("FrozenLake-v1")
    assert description_of(env, observation_space=spaces.Discrete(16)).saved()["name"] == "FrozenLake"
    describe = description_of(env, observation_space=spaces.Box(0, 1, (1,)))
    assert describe(np.array([0.5])) == "x0=0.5"


def test_a_wrapper_of_the_actions_takes_their_words_away():
    env = gymnasium.make("FrozenLake-v1", is_slippery=False)
    two = gymnasium.wrappers.TransformAction(env, lambda action: action + 1, spaces.Discrete(2))
    description = description_of(two)
    assert description(0) == description_of(env)(0)
    assert description.action_words is None
    assert "Words" in description_of(env).instructions and "Words" not in description.instructions
    assert restore_description(description.saved(), env.observation_space) == description


class OtherLake(FrozenLakeEnv):
    pass


class LakeWithTime(FrozenLakeEnv):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Discrete(160)


class TaxiEnv(Random):
    """Has the name of a known class, but isn't it."""


def test_a_subclass_is_known_with_the_same_observations():
    assert description_of(OtherLake(map_name="8x8")).saved()["name"] == "FrozenLake"
    assert description_of(LakeWithTime()).saved()["name"] == "SpaceDescription"
    foreign = TaxiEnv(spaces.Discrete(500), spaces.Discrete(6))
    assert description_of(foreign).saved()["name"] == "SpaceDescription"


def test_a_subclass_with_other_actions_has_no_words():
    env = CartPoleEnv()
    env.action_space = spaces.Discrete(3)
    description = description_of(env)
    assert description.saved()["name"] == "CartPole" and description.action_words is None


@pytest.mark.parametrize(
    "saved, message",
    [
        ({"name": "Chess", "arguments": {}}, "'Chess' was saved, expected SpaceDescription or one of FrozenLake"),
        ({"name": "FrozenLake"}, "arguments None, expected a dictionary"),
        ({"name": "FrozenLake", "arguments": {"rows": ["SF", "G"]}}, "expected texts of one length"),
        ({"name": "FrozenLake", "arguments": {"rows": ["SG"], "wind": 1}}, "wind"),
        ({"name": "FrozenLake", "arguments": {"rows": ["SG"]}}, r"does not read Discrete\(16\)"),
        ({}, "None was saved"),
    ],
)
def test_a_damaged_saved_description_is_refused(saved, message):
    with pytest.raises(ValueError, match=message):
        restore_description(saved, spaces.Discrete(16))


ENVIRONMENTS = [
    "FrozenLake-v1",
    "CliffWalking-v1",
    "Taxi-v4",
    "Blackjack-v1",
    "CartPole-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Acrobot-v1",
    "Pendulum-v1",
    "LunarLander-v3",
    "LunarLanderContinuous-v3",
    "MiniGrid-DoorKey-6x6-v0",
]


PACKAGES = {"LunarLander-v3": "Box2D", "LunarLanderContinuous-v3": "Box2D", "MiniGrid-DoorKey-6x6-v0": "minigrid"}


def made(name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    return gymnasium.make(name)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_saved_descriptions_give_equal_texts(name):
    env = made(name)
    description = description_of(env)
    saved = json.loads(json.dumps(description.saved()))
    restored = restore_description(saved, env.observation_space)
    assert restored.instructions == description.instructions
    assert restored.action_words == description.action_words
    for observation in observations_of_play(env, 20):
        assert restored(observation) == description(observation) != ""


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_sample_of_the_space_has_a_text(name):
    env = made(name)
    env.observation_space.seed(0)
    description = description_of(env)
    for _ in range(20):
        text = description(env.observation_space.sample())
        assert isinstance(text, str) and text.strip()


ALIKE = [{"half left", "half right"}, {"drop", "done"}]
"""Words that begin with the same token."""


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_words_differ_in_their_first_token(name):
    tokenizer = load_tokenizer("embedded")
    env = made(name)
    for words in ActionWords(env.action_space, description_of(env).action_words).choices:
        for one, two in itertools.combinations(words, 2):
            first_tokens = {tokenizer.encode(one)[0], tokenizer.encode(two)[0]}
            assert (len(first_tokens) == 1) == ({one, two} in ALIKE), (one, two)


LONG = {"LunarLander-v3": 70, "LunarLanderContinuous-v3": 70, "MiniGrid-DoorKey-6x6-v0": 85}
"""Maximum number of tokens of the embedded model in one text; 45 elsewhere."""


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_texts_are_short(name):
    tokenizer = load_tokenizer("embedded")
    env = made(name)
    description = description_of(env)
    assert len(tokenizer.encode(description.instructions)) <= 70
    for observation in observations_of_play(env, 100):
        assert len(tokenizer.encode(description(observation))) <= LONG.get(name, 45)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_no_word_begins_with_another(name):
    env = made(name)
    for words in ActionWords(env.action_space, description_of(env).action_words).choices:
        for word in words:
            assert [other for other in words if other.startswith(word)] == [word]


def test_every_entry_of_the_table_is_tested():
    names = {description_of(made(name)).saved()["name"] for name in ENVIRONMENTS}
    assert names == {path.rpartition(":")[2] for path in KNOWN.values()}
