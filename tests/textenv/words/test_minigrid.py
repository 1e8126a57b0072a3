"""The description of MiniGrid agrees with the grid, the agent and its hands."""

import re

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tests.helpers.descriptions import observations_of_play, through_json
from textenv.words import minigrid as described
from textenv.words.describing import description_of, restore_description

minigrid = pytest.importorskip("minigrid")
from minigrid.core import constants  # noqa: E402
from minigrid.core.world_object import Ball, Door, Key, Wall  # noqa: E402
from minigrid.envs import EmptyEnv  # noqa: E402
from minigrid.wrappers import (  # noqa: E402
    FlatObsWrapper,
    FullyObsWrapper,
    ImgObsWrapper,
    OneHotPartialObsWrapper,
    RGBImgPartialObsWrapper,
    ViewSizeWrapper,
)

NAMES = [
    "MiniGrid-Empty-Random-6x6-v0",
    "MiniGrid-DoorKey-6x6-v0",
    "MiniGrid-Fetch-8x8-N3-v0",
    "MiniGrid-KeyCorridorS3R3-v0",
    "MiniGrid-LavaCrossingS9N2-v0",
    "MiniGrid-Dynamic-Obstacles-6x6-v0",
    "MiniGrid-Playground-v0",
    "MiniGrid-ObstructedMaze-1Dlhb-v0",
    "BabyAI-GoToLocal-v0",
]
NUMBER = r"\d+ (?:forward|left|right)"
POSITION = rf"{NUMBER}(?:, {NUMBER})?"


def offset(position):
    """Steps forward and to the right of a text such as "2 forward, 1 left"."""
    steps = {word: int(digits) for digits, word in re.findall(r"(\d+) (\w+)", position)}
    return steps.get("forward", 0), steps.get("right", 0) - steps.get("left", 0)


def parsed(text):
    """The sentences of a description: things with their places, walls, what is carried, and the others."""
    facts = {"things": set(), "walls": {}, "carrying": None, "others": []}
    for sentence in text.removesuffix(".").split(". "):
        if sentence.startswith("Wall"):
            facts["walls"] = {word: int(digits) for digits, word in re.findall(r"(\d+) (\w+)", sentence)}
        elif sentence.startswith("Carrying "):
            facts["carrying"] = sentence.removeprefix("Carrying ")
        elif match := re.fullmatch(rf"(.*?) ({POSITION}(?:; {POSITION})*)", sentence):
            facts["things"] |= {(match[1].lower(), *offset(position)) for position in match[2].split("; ")}
        else:
            facts["others"].append(sentence)
    return facts


def thing_name(thing):
    """What a reader calls an object of the grid."""
    if thing.type == "lava":
        return "lava"
    if thing.type == "door":
        state = "open" if thing.is_open else "locked" if thing.is_locked else "closed"
        return f"{state} {thing.color} door"
    return f"{thing.color} {thing.type}"


def cells_in_view(env, view_size):
    """Objects of the whole grid that the agent can see, by steps forward and right; cells outside are walls."""
    _, is_visible = env.gen_obs_grid(view_size)
    cells = {}
    for forward in range(view_size):
        for right in range(-(view_size // 2), view_size // 2 + 1):
            x, y = env.agent_pos + forward * env.dir_vec + right * env.right_vec
            if is_visible[right + view_size // 2, view_size - 1 - forward]:
                is_inside = 0 <= x < env.width and 0 <= y < env.height
                cells[forward, right] = env.grid.get(x, y) if is_inside else Wall()
    return cells


def states(env, steps=120):
    """Play at random, mostly forward, and give each observation."""
    rng = np.random.default_rng(0)
    actions = np.array([0, 1, 2, 2, 2, 3, 5, 5])
    available_actions = actions[actions < env.action_space.n]
    return observations_of_play(env, steps, sample_action=lambda: rng.choice(available_actions))


def check_facts(text, env, view_size=7):
    """Compare a text with the state of the environment."""
    facts = parsed(text)
    cells = cells_in_view(env, view_size)
    expected = {
        (thing_name(thing), *way)
        for way, thing in cells.items()
        if thing is not None and thing.type != "wall" and way != (0, 0)
    }
    assert facts["things"] == expected
    walls = {}
    for word, forward, right in (("forward", 1, 0), ("left", 0, -1), ("right", 0, 1)):
        for distance in range(1, view_size):
            thing = cells.get((distance * forward, distance * right))
            if thing is not None and thing.type == "wall":
                walls[word] = distance
                break
    assert facts["walls"] == walls
    assert facts["carrying"] == (thing_name(env.carrying) if env.carrying else None)
    return facts


@pytest.mark.parametrize("name", NAMES)
def test_the_text_agrees_with_the_grid(name):
    env = gymnasium.make(name)
    describe = description_of(env)
    grid = env.unwrapped
    seen = set()
    for observation in states(env):
        text = describe(observation)
        facts = check_facts(text, grid)
        seen |= {thing for thing, _, _ in facts["things"]}

        # What stands in front
        in_front = grid.grid.get(*grid.front_pos)
        if in_front is None:
            assert facts["walls"].get("forward") != 1
        elif in_front.type == "wall":
            assert facts["walls"]["forward"] == 1
        else:
            assert (thing_name(in_front), 1, 0) in facts["things"]

        # Direction and mission
        compass = {(1, 0): "east", (0, 1): "south", (-1, 0): "west", (0, -1): "north"}[tuple(grid.dir_vec.tolist())]
        sentences = {f"Facing {compass}"}
        if grid.mission.lower() not in describe.instructions.lower():
            sentences.add(f"Mission: {grid.mission}")
        assert sorted(facts["others"]) == sorted(sentences)
    assert seen


@pytest.mark.parametrize("name", ["MiniGrid-DoorKey-6x6-v0", "MiniGrid-KeyCorridorS3R3-v0", "BabyAI-GoToLocal-v0"])
@pytest.mark.parametrize("view_size", [7, 5])
def test_images_and_flat_observations_are_read_too(name, view_size):
    env = gymnasium.make(name)
    grid = env.unwrapped
    if view_size != 7:
        env = ViewSizeWrapper(env, view_size)
    images = ImgObsWrapper(env)
    flat = FlatObsWrapper(env)
    describe_image = description_of(images)
    describe_flat = description_of(flat)
    for observation in states(env, steps=60):
        text = describe_image(images.observation(observation))
        facts = check_facts(text, grid, view_size)
        assert facts["others"] == ["Nothing in view"] * (text == "Nothing in view.")
        flat_text = describe_flat(flat.observation(observation))
        mission = f"Mission: {grid.mission}. "
        is_in_instructions = grid.mission.lower() in describe_flat.instructions.lower()
        assert (
            flat_text == text if is_in_instructions else flat_text == (mission + text).removesuffix(" Nothing in view.")
        )
    for description, wrapped in ((describe_image, images), (describe_flat, flat)):
        restored = through_json(description, wrapped)
        observation, _ = wrapped.reset(seed=3)
        assert restored == description and restored(observation) == description(observation)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("MiniGrid")])
def test_a_mission_that_never_changes_is_in_the_instructions(name):
    env = gymnasium.make(name)
    missions = {env.reset(seed=seed)[0]["mission"] for seed in range(10)}
    mission = description_of(env).mission
    if any(part in name for part in ("Fetch", "KeyCorridor", "ObstructedMaze")):
        assert mission is None
    else:
        assert missions == {mission}


@pytest.mark.parametrize("wrapper", [FullyObsWrapper, RGBImgPartialObsWrapper, OneHotPartialObsWrapper])
def test_what_other_wrappers_show_is_not_known(wrapper):
    """In a grid of 7 x 7 the whole grid has the shape of the view."""
    env = wrapper(gymnasium.make("MiniGrid-Empty-Random-6x6-v0", size=7))
    with pytest.raises(ValueError, match="give describe="):
        description_of(env)
    try:
        name = description_of(ImgObsWrapper(env)).saved()["name"]
    except ValueError as error:
        assert "give describe=" in str(error)
    else:
        assert name == "SpaceDescription"


def test_names_are_those_of_minigrid():
    assert {name: number for number, name in enumerate(described.OBJECTS)} == constants.OBJECT_TO_IDX
    assert {name: number for number, name in enumerate(described.COLORS)} == constants.COLOR_TO_IDX
    assert {name: number for number, name in enumerate(described.DOOR_STATES)} == constants.STATE_TO_IDX


def words_of_all(env):
    """The number of each word."""
    return {word: action for action, word in enumerate(description_of(env).action_words)}


def standing_before(thing, carrying=None):
    """An environment whose agent faces a thing."""
    env = gymnasium.make("MiniGrid-Empty-8x8-v0")
    env.reset(seed=0)
    grid = env.unwrapped
    grid.grid.set(*grid.front_pos, thing)
    grid.carrying = carrying
    return env


def test_a_word_turns_or_moves_as_it_says():
    env = standing_before(None)
    words = words_of_all(env)
    grid = env.unwrapped
    assert list(grid.right_vec) == [0, 1]
    env.step(words["right"])
    assert list(grid.dir_vec) == [0, 1]
    env.step(words["left"])
    assert list(grid.dir_vec) == [1, 0]
    front = tuple(grid.front_pos)
    env.step(words["forward"])
    assert tuple(grid.agent_pos) == front


def test_a_word_handles_things_as_it_says():
    key = Key("red")
    env = standing_before(key)
    words = words_of_all(env)
    grid = env.unwrapped
    observation = env.step(words["pickup"])[0]
    assert grid.carrying is key and "Carrying red key." in description_of(env)(observation)
    env.step(words["drop"])
    assert grid.carrying is None and grid.grid.get(*grid.front_pos) is key

    door = Door("blue", is_locked=True)
    env = standing_before(door, carrying=Key("blue"))
    observation = env.step(words["toggle"])[0]
    assert door.is_open and "Open blue door 1 forward." in description_of(env)(observation)

    env = standing_before(Ball("grey"))
    before = env.unwrapped.hash()
    env.step(words["done"])
    assert env.unwrapped.hash() == before


def test_fewer_actions_have_fewer_words():
    env = gymnasium.make("MiniGrid-Dynamic-Obstacles-6x6-v0")
    assert tuple(description_of(env).action_words) == ("left", "right", "forward")
    assert description_of(env).instructions == "Get to the green goal square. Words: left, right, forward."


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"form": "picture"}, "form is 'picture', expected dict, image or flat"),
        ({"mission": 3}, "mission is 3, expected a text or None"),
        ({"view_size": "7"}, "expected integers"),
        ({"view_size": 5}, "does not read"),
    ],
)
def test_damaged_arguments_are_refused(arguments, message):
    env = gymnasium.make("MiniGrid-Empty-8x8-v0")
    saved = {"name": "MiniGrid", "arguments": arguments}
    with pytest.raises(ValueError, match=message):
        restore_description(saved, env.observation_space)


class NumberedGrid(EmptyEnv):
    """Observes a number, not what is in view."""

    def __init__(self):
        super().__init__(size=5)
        self.observation_space = spaces.Discrete(25)


def test_a_subclass_with_other_observations_is_not_known():
    description = description_of(NumberedGrid())
    assert description.saved()["name"] == "SpaceDescription" and description(3) == "3"
