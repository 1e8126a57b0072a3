"""The description of MiniGrid: what is in view and where, in steps, in the way of BabyAI-Text."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import gymnasium
import numpy as np
from gymnasium import spaces

from textenv.words.describing import KnownDescription
from textenv.words.phrases import sided, way

OBJECTS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
"""Names of the objects, by their number in an image."""
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
"""Names of the colors, by their number in an image."""
DOOR_STATES = ("open", "closed", "locked")
"""States of a door, by their number in an image."""
DIRECTIONS = ("east", "south", "west", "north")
"""Directions that the agent faces, by their number."""
PARTS = {"image", "direction", "mission"}
"""Keys of an observation."""
ALPHABET = "abcdefghijklmnopqrstuvwxyz ,"
"""Letters of a mission that `FlatObsWrapper` encodes, one of 28 numbers each."""


@dataclass(frozen=True, kw_only=True)
class MiniGrid(KnownDescription):
    """Any environment of MiniGrid, BabyAI's too: mission, direction, objects in view, walls, and what I carry.

    Objects come with the steps to them, the nearest first; walls only straight ahead, to the left and to the right. The
    observation is the environment's own, or that of `ImgObsWrapper`, `FlatObsWrapper` or `ViewSizeWrapper`.

    Args:
        mission: the mission if it is always the same, which then stands in the instructions; None: it changes, and each
            text has it, unless the observation is an image.
        form: ``"dict"``, ``"image"`` or ``"flat"``.
        view_size: number of rows and columns in view.
        num_actions: number of actions, the first ones of `ACTIONS`.

    Raises:
        ValueError: if the form is unknown, or a value has another type.

    Example:
        >>> image = np.zeros((3, 3, 3), np.uint8)
        >>> image[1, 0] = (4, 4, 2)  # two steps ahead
        >>> image[1, 2] = (5, 4, 0)  # in my hands
        >>> MiniGrid(form="image", view_size=3)(image)
        'Locked yellow door 2 forward. Carrying yellow key.'
    """

    ACTIONS: ClassVar[tuple[str, ...]] = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
    """Words of all actions."""
    READABLE_WRAPPERS = ("ImgObsWrapper", "FlatObsWrapper", "ViewSizeWrapper")

    mission: str | None = None
    form: str = "dict"
    view_size: int = 7
    num_actions: int = 7

    def __post_init__(self) -> None:
        if self.form not in ("dict", "image", "flat"):
            raise ValueError(f"form is {self.form!r:.100}, expected dict, image or flat")
        if not isinstance(self.mission, str | None):
            raise ValueError(f"mission is {self.mission!r:.100}, expected a text or None")
        if not isinstance(self.view_size, int) or not isinstance(self.num_actions, int):
            raise ValueError(f"sizes are {self.view_size!r:.50} and {self.num_actions!r:.50}, expected integers")

    @classmethod
    def of(cls, env: gymnasium.Env) -> Self | None:
        """Read the mission if it never changes, and what the observation is."""
        grid: Any = env.unwrapped
        if not isinstance(grid.observation_space, spaces.Dict) or not {*grid.observation_space} >= PARTS:
            return None
        mission_space: Any = grid.observation_space["mission"]
        # BabyAI's subclass has no placeholders either, but other missions
        is_constant = type(mission_space).__name__ == "MissionSpace" and not mission_space.ordered_placeholders
        space = env.observation_space
        form = "image"
        if isinstance(space, spaces.Dict):
            form = "dict"
        elif len(space.shape or ()) == 1:
            form = "flat"
        mission = grid.mission if is_constant else None
        return cls(
            mission=mission,
            form=form,
            view_size=_image_space(env).shape[0],
            num_actions=int(grid.action_space.n),
        )

    @property
    def aim(self) -> str:
        """The mission if it is always the same."""
        if self.mission is None:
            return "Do the mission."
        return _sentence(self.mission) if self.mission else "There is no mission."

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the actions."""
        return self.ACTIONS[: self.num_actions]

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether the space has the form and the view."""
        if self.form == "dict":
            if not isinstance(observation_space, spaces.Dict) or not {*observation_space} >= PARTS:
                return False
            observation_space = observation_space["image"]
        shape = observation_space.shape or ()
        if self.form != "flat":
            return shape == (self.view_size, self.view_size, 3)
        letter_size = math.prod(shape) - 3 * self.view_size**2
        return len(shape) == 1 and letter_size > 0 and letter_size % len(ALPHABET) == 0

    def __call__(self, observation: Any) -> str:
        """Describe what is in view."""
        sentences = []
        if self.form == "dict":
            if observation["mission"] != self.mission:
                sentences.append(f"Mission: {observation['mission']}.")
            sentences.append(f"Facing {DIRECTIONS[int(observation['direction'])]}.")
            image = np.asarray(observation["image"])
        elif self.form == "image":
            image = np.asarray(observation)
        else:
            image, letters = np.split(np.asarray(observation), [3 * self.view_size**2])
            image = image.reshape(self.view_size, self.view_size, 3)
            if self.mission is None:
                sentences.append(f"Mission: {_decoded(letters)}.")
        sentences += [*_objects_in_words(image), *_walls_in_words(image), *_hands_in_words(image)]
        return " ".join(sentences) or "Nothing in view."


def _image_space(env: gymnasium.Env) -> spaces.Box:
    """Return the space of the image in an environment's observation, below a wrapper that takes it out of its Dict."""
    while not isinstance(env.observation_space, spaces.Dict):
        assert isinstance(env, gymnasium.Wrapper)
        env = env.env
    image_space = env.observation_space["image"]
    assert isinstance(image_space, spaces.Box)
    return image_space


def _decoded(letters: np.ndarray) -> str:
    """Read the mission that `FlatObsWrapper` has encoded, uint8 ``[letters * 28]``."""
    one_hot = letters.reshape(-1, len(ALPHABET))
    return "".join(ALPHABET[row.argmax()] for row in one_hot if row.any())


def _objects_in_words(image: np.ndarray) -> list[str]:
    """Describe the objects of an image ``[columns, rows, 3]``, the nearest first; I am below, in the middle."""
    size = image.shape[0]
    middle = size // 2
    ways_to_things: dict[str, list[str]] = {}
    for forward, right in _cells_in_view(size):
        code = image[middle + right, size - 1 - forward]
        if _object(code) not in ("unseen", "empty", "wall"):
            way_to_cell = way(sided(forward, positive="forward"), sided(right))
            ways_to_things.setdefault(_thing(code), []).append(way_to_cell)
    return [_sentence(f"{name} {'; '.join(ways)}") for name, ways in ways_to_things.items()]


@functools.cache
def _cells_in_view(size: int) -> tuple[tuple[int, int], ...]:
    """Return the steps forward and to the right to each cell of a view but my own, the nearest cell first."""
    middle = size // 2
    cells = []
    for forward in range(size):
        for right in range(-middle, middle + 1):
            if (forward, right) != (0, 0):
                cells.append((forward, right))
    return tuple(sorted(cells, key=lambda cell: (cell[0] + abs(cell[1]), cell[1])))


def _walls_in_words(image: np.ndarray) -> list[str]:
    """Describe the nearest walls straight ahead, to the left and to the right."""
    size = image.shape[0]
    middle = size // 2
    lines = {
        "forward": image[middle, size - 2 :: -1],
        "left": image[middle - 1 :: -1, size - 1],
        "right": image[middle + 1 :, size - 1],
    }
    walls = []
    for word, codes in lines.items():
        names = [_object(code) for code in codes]
        if "wall" in names:
            walls.append(f"{names.index('wall') + 1} {word}")
    if not walls:
        return []
    name = "Wall" if len(walls) == 1 else "Walls"
    return [f"{name} {', '.join(walls)}."]


def _hands_in_words(image: np.ndarray) -> list[str]:
    """Describe what I carry, which an image shows where I stand."""
    size = image.shape[0]
    my_cell = image[size // 2, size - 1]
    return [] if _object(my_cell) in ("unseen", "empty") else [f"Carrying {_thing(my_cell)}."]


def _object(code: np.ndarray) -> str:
    """Return the name of a cell's object."""
    return _name(OBJECTS, "object", code[0])


def _thing(code: np.ndarray) -> str:
    """Return the name of a cell's object with its color, and with the state of a door."""
    name = _object(code)
    if name == "lava":
        return name
    colored = f"{_name(COLORS, 'color', code[1])} {name}"
    return f"{_name(DOOR_STATES, 'state', code[2])} {colored}" if name == "door" else colored


def _name(names: Sequence[str], kind: str, number: Any) -> str:
    """Return the name with a number; a number that MiniGrid does not use stands for itself."""
    return names[int(number)] if number < len(names) else f"{kind} {int(number)}"


def _sentence(text: str) -> str:
    """Return a text as a sentence."""
    return f"{text[0].upper()}{text[1:]}."
