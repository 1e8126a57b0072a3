"""The description of MiniGrid: what is in view and where, in steps, in the way of BabyAI-Text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import gymnasium
import numpy as np
from gymnasium import spaces

from textenv.words.describing import KnownDescription
from textenv.words.phrases import sided

OBJECTS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
"""Names of the objects, by their number in an image."""
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
"""Names of the colors, by their number in an image."""
DOOR_STATES = ("open", "closed", "locked")
"""States of a door, by their number in an image."""
DIRECTIONS = ("east", "south", "west", "north")
"""Directions that the agent faces, by their number."""
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
        ValueError: if the form is unknown.

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

    @classmethod
    def of(cls, env: gymnasium.Env) -> Self:
        """Read the mission if it never changes, and what the observation is."""
        grid: Any = env.unwrapped
        mission_space = grid.observation_space["mission"]
        # BabyAI's subclass has no placeholders either, but other missions
        is_constant = type(mission_space).__name__ == "MissionSpace" and not mission_space.ordered_placeholders
        space = env.observation_space
        form = "image"
        if isinstance(space, spaces.Dict):
            form = "dict"
        elif len(space.shape or ()) == 1:
            form = "flat"
        return cls(
            mission=grid.mission if is_constant else None,
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
            has_parts = isinstance(observation_space, spaces.Dict) and {"image", "direction", "mission"} <= {
                *observation_space
            }
            return has_parts and observation_space["image"].shape == (self.view_size, self.view_size, 3)
        shape = observation_space.shape or ()
        if self.form == "image":
            return shape == (self.view_size, self.view_size, 3)
        letter_size = math.prod(shape) - 3 * self.view_size**2
        return len(shape) == 1 and letter_size > 0 and letter_size % len(ALPHABET) == 0

    def __call__(self, observation: Any) -> str:
        """Describe what is in view."""
        sentences = []
        if self.form == "dict":
            image = observation["image"]
            mission = observation["mission"]
            if mission != self.mission:
                sentences.append(f"Mission: {mission}.")
            sentences.append(f"Facing {DIRECTIONS[int(observation['direction'])]}.")
        elif self.form == "flat":
            image_size = 3 * self.view_size**2
            image = observation[:image_size].reshape(self.view_size, self.view_size, 3)
            mission = _decoded(observation[image_size:])
            if self.mission is None or mission != self.mission.lower():
                sentences.append(f"Mission: {mission}.")
        else:
            image = observation
        return " ".join([*sentences, *_view_in_words(np.asarray(image))]) or "Nothing in view."


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


def _view_in_words(image: np.ndarray) -> list[str]:
    """Describe an image ``[columns, rows, 3]`` of object, color and state; the agent is below, in the middle."""
    size = image.shape[0]
    middle = size // 2

    # Objects, the nearest first
    positions_by_name: dict[str, list[str]] = {}
    cells = [(size - 1 - row, column - middle) for row in range(size) for column in range(size)]
    for forward, right in sorted(cells, key=lambda cell: (cell[0] + abs(cell[1]), cell[1])):
        code = image[middle + right, size - 1 - forward]
        is_me = forward == right == 0
        if not is_me and _object(code) not in ("unseen", "empty", "wall"):
            steps = [step for step in (sided(forward, "back", "forward"), sided(right)) if step != "0"]
            positions_by_name.setdefault(_thing(code), []).append(", ".join(steps))
    sentences = [_sentence(f"{name} {'; '.join(positions)}") for name, positions in positions_by_name.items()]

    # The nearest walls
    walls = []
    for word, row_step, column_step, count in (
        ("forward", -1, 0, size - 1),
        ("left", 0, -1, middle),
        ("right", 0, 1, middle),
    ):
        for distance in range(1, count + 1):
            if _object(image[middle + distance * column_step, size - 1 + distance * row_step]) == "wall":
                walls.append(f"{distance} {word}")
                break
    if walls:
        name = "Wall" if len(walls) == 1 else "Walls"
        sentences.append(f"{name} {', '.join(walls)}.")

    # My hands
    my_cell = image[middle, size - 1]
    if _object(my_cell) not in ("unseen", "empty"):
        sentences.append(f"Carrying {_thing(my_cell)}.")
    return sentences


def _object(code: np.ndarray) -> str:
    """Return the name of a cell's object."""
    number = int(code[0])
    return OBJECTS[number] if number < len(OBJECTS) else f"object {number}"


def _thing(code: np.ndarray) -> str:
    """Return the name of a cell's object with its color, and with the state of a door."""
    name = _object(code)
    if name == "lava":
        return name
    color_number = int(code[1])
    color = COLORS[color_number] if color_number < len(COLORS) else f"color {color_number}"
    if name == "door":
        return f"{DOOR_STATES[int(code[2])]} {color} door"
    return f"{color} {name}"


def _sentence(text: str) -> str:
    """Return a text as a sentence."""
    return f"{text[0].upper()}{text[1:]}."
