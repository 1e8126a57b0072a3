"""Observations in words: what a description is, the default of every space, and the table of known environments."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, cast, runtime_checkable

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import iterate

from textenv.json_files import Json
from textenv.words.actions import ActionWords
from textenv.words.phrases import number_in_words

KNOWN = {
    "FrozenLakeEnv": "textenv.words.toy_text:FrozenLake",
    "CliffWalkingEnv": "textenv.words.toy_text:CliffWalking",
    "TaxiEnv": "textenv.words.toy_text:Taxi",
    "BlackjackEnv": "textenv.words.toy_text:Blackjack",
    "CartPoleEnv": "textenv.words.classic_control:CartPole",
    "MountainCarEnv": "textenv.words.classic_control:MountainCar",
    "Continuous_MountainCarEnv": "textenv.words.classic_control:MountainCarContinuous",
    "AcrobotEnv": "textenv.words.classic_control:Acrobot",
    "PendulumEnv": "textenv.words.classic_control:Pendulum",
    "LunarLander": "textenv.words.box2d:LunarLander",
    "MiniGridEnv": "textenv.words.minigrid:MiniGrid",
}
"""Environments with a description of their own: the name of the class, and the description. Imported when needed."""
KNOWN_PACKAGES = ("gymnasium", "minigrid")
"""Packages of the classes in `KNOWN`; a class of another package may have one of these names too."""
MAX_NUMBERS = 200
"""Maximum number of numbers in one observation that `SpaceDescription` puts into words."""
MAX_LISTED_CELLS = 4
"""A map with at most this many cells that are not 0 has their coordinates behind it."""


@runtime_checkable
class Description(Protocol):
    """How one environment is put into words. It reads the observation alone, and no environment."""

    @property
    def instructions(self) -> str:
        """What the game is and which words act, one or two short sentences; may be empty."""

    @property
    def action_words(self) -> Sequence[str] | Sequence[Sequence[str]] | None:
        """Words of the actions, as `ActionWords` takes them; None: the numbers."""

    def __call__(self, observation: Any) -> str:
        """Describe one observation of the environment, not a batch."""

    def saved(self) -> dict[str, Json]:
        """Return the name and the arguments, for `restore_description`."""


@dataclass(frozen=True, kw_only=True)
class KnownDescription:
    """What the descriptions of known environments share: their sentences about actions, and how they are saved.

    A subclass has the facts that never change, such as a map, as fields that JSON can hold.

    Args:
        names_actions: False if a wrapper gave the environment other actions, which `WORDS` does not name.
    """

    names_actions: bool = True

    AIM: ClassVar[str] = ""
    """What to do in this environment."""
    WORDS: ClassVar[tuple[str, ...]] = ()
    """Words of the actions, in their order."""
    READABLE_WRAPPERS: ClassVar[tuple[str, ...]] = ()
    """Names of the wrappers that change the observation, and whose observation is read too."""

    @classmethod
    def of(cls, env: gymnasium.Env) -> Self | None:
        """Read the facts that never change from the environment; return None if its observations are others."""
        return cls()

    @classmethod
    def restored(cls, arguments: Mapping[str, Any]) -> Self:
        """Rebuild the description from the saved arguments."""
        return cls(**arguments)

    @property
    def aim(self) -> str:
        """What to do in this environment."""
        return self.AIM

    @property
    def words(self) -> Sequence[str]:
        """Words of the actions, in their order."""
        return self.WORDS

    @property
    def action_words(self) -> Sequence[str] | Sequence[Sequence[str]] | None:
        """Words of the actions; None if they have none."""
        return self.words if self.names_actions else None

    @property
    def instructions(self) -> str:
        """The aim, and the words of the actions."""
        if not self.names_actions:
            return self.aim
        return f"{self.aim} Words: {', '.join(self.words)}."

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether this description can read observations of the space."""
        raise NotImplementedError

    def __call__(self, observation: Any) -> str:
        """Describe one observation."""
        raise NotImplementedError

    def saved(self) -> dict[str, Json]:
        """Return the name and the arguments, for `restore_description`."""
        arguments: dict[str, Json] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):  # JSON has lists only
                value = list(value)
            arguments[field.name] = value
        return {"name": type(self).__name__, "arguments": arguments}


class SpaceDescription:
    """The description of any space: named numbers, such as ``x0=0.5, x1=-3``.

    Numbers have three significant digits, integers all of theirs. A number's name comes from the keys of a Dict and
    from its indices, ``x`` without keys; one alone has no name. Integers in rows and columns are drawn as a map. If few
    cells are not 0, their coordinates ``(row, column)`` stand below the map.

    Args:
        space: the space of one observation.

    Raises:
        ValueError: if an observation has more than `MAX_NUMBERS` numbers, such as an image, or the space is of an
            unknown kind.

    Example:
        >>> describe = SpaceDescription(spaces.Dict(speed=spaces.Box(-1, 1, (2,)), level=spaces.Discrete(5)))
        >>> describe({"speed": np.array([0.12345, -1]), "level": 3})
        'speed0=0.123, speed1=-1, level=3'
    """

    instructions = ""
    action_words = None

    def __init__(self, space: spaces.Space) -> None:
        count = _count(space)
        if count > MAX_NUMBERS:
            raise ValueError(
                f"an observation of {space!s:.200} has {count} numbers, expected at most {MAX_NUMBERS} to put into "
                "words: give describe=, a function of the observation that returns a text"
            )
        self.space = space

    def __call__(self, observation: Any) -> str:
        """Describe one observation of the space."""
        parts = list(_parts(self.space, observation, ""))
        if not parts:
            return "nothing"
        if len(parts) == 1 and not parts[0][0]:
            return parts[0][1]
        description = ""
        for name, text in parts:
            if "\n" in text:  # a map has lines of its own
                description += f"{name}=\n{text}\n"
            else:
                description += f"{name}={text}, "
        return description.removesuffix("\n").removesuffix(", ")

    def saved(self) -> dict[str, Json]:
        """Return the name, for `restore_description`, which gets the space from elsewhere."""
        return {"name": "SpaceDescription", "arguments": {}}


def description_of(env: gymnasium.Env, *, observation_space: spaces.Space | None = None) -> Description:
    """Return the description of a known environment, else the default for its observations.

    An environment is known if its class, or one that it inherits from, is in `KNOWN`, and if no wrapper has changed its
    observation. If a wrapper has changed its actions, the known description gives them no words.

    Args:
        env: the environment, with its wrappers; its map and such facts are read once, here.
        observation_space: the space of the observations to be described; None: that of ``env``.

    Raises:
        ValueError: if it is not known, and its observations cannot be put into words.
    """
    if observation_space is None:
        observation_space = env.observation_space
    if observation_space == env.observation_space:
        description = known_description(env)
        if description is not None:
            return description
    return SpaceDescription(observation_space)


def known_description(env: gymnasium.Env) -> KnownDescription | None:
    """Return the known description of an environment, or None, also if a wrapper has changed its observation."""
    path = _path_of_description(type(env.unwrapped))
    if path is None:
        return None
    description_class = _description_class(path)
    for wrapper_name in _observation_wrappers(env):
        if wrapper_name not in description_class.READABLE_WRAPPERS:
            return None
    description = description_class.of(env)
    if description is None or not description.reads(env.observation_space):
        return None
    same_actions = env.action_space == env.unwrapped.action_space and not _has_action_wrapper(env)
    if same_actions and _has_words(env.action_space, description):
        return description
    return dataclasses.replace(description, names_actions=False)


def restore_description(saved: Mapping[str, Json], observation_space: spaces.Space) -> Description:
    """Rebuild a description of `Description.saved`.

    Args:
        saved: the name and the arguments.
        observation_space: the space of the observations to be described.

    Raises:
        ValueError: if the name is unknown, the arguments are not those of the description, or it cannot read the space.
    """
    name = saved.get("name")
    arguments = saved.get("arguments")
    if name == "SpaceDescription":
        return SpaceDescription(observation_space)
    classes = {path.rpartition(":")[2]: path for path in KNOWN.values()}
    if not isinstance(name, str) or name not in classes:
        raise ValueError(
            f"a description {name!r:.100} was saved, expected SpaceDescription or one of {', '.join(classes)}"
        )
    if not isinstance(arguments, dict):
        raise ValueError(f"the description {name} was saved with arguments {arguments!r:.100}, expected a dictionary")
    try:
        description = _description_class(classes[name]).restored(arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the description {name} was saved with arguments {arguments!r:.100}: {error}") from error
    if not description.reads(observation_space):
        raise ValueError(f"the saved description {description!r:.200} does not read {observation_space!s:.200}")
    return description


def takes_environment(describe: Callable[..., object]) -> bool:
    """Return True if a function takes an observation and the environment, False if the observation alone.

    Raises:
        TypeError: if it can be called with neither.
    """
    if not callable(describe):
        raise TypeError(f"describe is {describe!r:.200}, expected a function from an observation to a text")
    try:
        signature = inspect.signature(describe)
    except ValueError:  # some built-in functions have none
        return False
    for arguments in ((None,), (None, None)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 2
    raise TypeError(
        f"describe is {name_of_function(describe)}{signature}, expected a function of the observation, or of the "
        "observation and the environment"
    )


def name_of_function(describe: Callable[..., object]) -> str:
    """Return the name of a function, or of an object's class."""
    return cast("str", getattr(describe, "__qualname__", type(describe).__qualname__))


def _path_of_description(env_class: type) -> str | None:
    """Return what `KNOWN` has for a class of environments or the next one that it inherits from, or None."""
    for cls in env_class.__mro__:
        package, _, _ = cls.__module__.partition(".")
        if package in KNOWN_PACKAGES and cls.__name__ in KNOWN:
            return KNOWN[cls.__name__]
    return None


def _description_class(path: str) -> type[KnownDescription]:
    """Import a class of `KNOWN`."""
    module_name, _, class_name = path.partition(":")
    return getattr(importlib.import_module(module_name), class_name)


def _observation_wrappers(env: gymnasium.Env) -> Iterator[str]:
    """Iterate over the names of the wrappers that change the observation."""
    while isinstance(env, gymnasium.Wrapper):
        is_changed = env.observation_space != env.env.observation_space
        if is_changed or isinstance(env, gymnasium.ObservationWrapper):
            yield type(env).__name__
        env = env.env


def _has_action_wrapper(env: gymnasium.Env) -> bool:
    """Return whether a wrapper changes actions, perhaps within the same space."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.ActionWrapper):
            return True
        env = env.env
    return False


def _has_words(action_space: spaces.Space, description: KnownDescription) -> bool:
    """Return whether a description's words are as many as the actions."""
    try:
        ActionWords(action_space, description.action_words)
    except ValueError:
        return False
    return True


def _count(space: spaces.Space) -> int:
    """Count the numbers of an observation; of a Sequence or Graph, those of one entry, because its length is open."""
    # Several parts
    if isinstance(space, spaces.Dict):
        return sum(_count(part) for part in space.values())
    if isinstance(space, spaces.Tuple):
        return sum(_count(part) for part in space)
    if isinstance(space, spaces.OneOf):
        return 1 + max(_count(part) for part in space.spaces)
    if isinstance(space, spaces.Sequence):
        return _count(space.feature_space)
    if isinstance(space, spaces.Graph):
        count = _count(space.node_space)
        if space.edge_space is not None:
            count += _count(space.edge_space)
        return count

    # Texts and numbers
    if isinstance(space, (spaces.Discrete, spaces.Text)):
        return 1
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return math.prod(space.shape)
    raise ValueError(
        f"an observation of {space!s:.200} cannot be put into words, expected a space of Gymnasium: give describe=, a "
        "function of the observation that returns a text"
    )


def _parts(space: spaces.Space, observation: Any, name: str) -> Iterator[tuple[str, str]]:
    """Iterate over the names of an observation's numbers and texts, and what they are in words."""
    # Several parts
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from _parts(part, observation[key], _named(name, str(key)))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space):
            yield from _parts(part, observation[index], _indexed(name, index))
    elif isinstance(space, spaces.OneOf):
        choice, value = observation
        yield _named(name, "choice"), str(int(choice))
        yield from _parts(space.spaces[int(choice)], value, _named(name, "value"))

    # Parts whose number is open
    elif isinstance(space, spaces.Sequence):
        entries = observation
        if space.stack:
            entries = iterate(space.stacked_feature_space, observation)
        yield from _entries(space.feature_space, entries, name)
    elif isinstance(space, spaces.Graph):
        yield from _entries(space.node_space, observation.nodes, _named(name, "node"))
        links = observation.edge_links
        if links is None:
            links = []
        for index, (start, end) in enumerate(links):
            edge_name = _indexed(_named(name, "edge"), index)
            yield edge_name, f"{start}-{end}"
            if space.edge_space is not None:
                yield from _parts(space.edge_space, observation.edges[index], _named(edge_name, "value"))

    # Texts and numbers
    elif isinstance(space, spaces.Text):
        yield name, _text_in_words(observation, is_alone=not name)
    elif np.shape(observation) == ():
        yield name, _scalar_in_words(observation)
    elif _is_map(space):
        yield name, _map_in_words(np.asarray(observation), space)
    else:
        for indices, value in np.ndenumerate(observation):
            number_name = name
            for index in indices:
                number_name = _indexed(number_name, index)
            yield number_name, _scalar_in_words(value)


def _entries(space: spaces.Space, entries: Iterable[Any], name: str) -> Iterator[tuple[str, str]]:
    """Iterate over the parts of entries whose number is open."""
    count = 0
    for entry in entries:
        yield from _parts(space, entry, _indexed(name, count))
        count += 1
    if count == 0:
        yield name, "none"


def _named(name: str, key: str) -> str:
    """Return the name of a part with a key."""
    return f"{name}_{key}" if name else key


def _indexed(name: str, index: int) -> str:
    """Return the name of a part with an index, which stands directly behind letters."""
    if not name:
        return f"x{index}"
    if name[-1].isdigit():
        return f"{name}_{index}"
    return f"{name}{index}"


def _text_in_words(text: str, *, is_alone: bool) -> str:
    """Return a text as it is if it is alone, else in quotes, and an empty one in quotes too."""
    if is_alone and text.strip() and not text.startswith('"'):
        return text
    return json.dumps(text, ensure_ascii=False)


def _scalar_in_words(value: Any) -> str:
    """Write one number; integers and bools have all their digits."""
    number = np.asarray(value)
    if number.dtype.kind in "iub":
        return str(int(number))
    return number_in_words(float(number))


def _is_map(space: spaces.Space) -> bool:
    """Return whether observations are integers in rows and columns."""
    assert space.shape is not None and space.dtype is not None
    return len(space.shape) == 2 and min(space.shape) > 1 and space.dtype.kind in "iub"


def _map_in_words(cells: np.ndarray, space: spaces.Space) -> str:
    """Draw a map of integers ``[rows, columns]``, and list the few cells that are not 0."""
    has_one_digit = isinstance(space, spaces.MultiBinary)
    if isinstance(space, spaces.Box):
        has_one_digit = bool(space.low.min() >= 0 and space.high.max() <= 9)
    elif isinstance(space, spaces.MultiDiscrete):
        has_one_digit = bool(space.start.min() >= 0 and int(space.start.max()) + int(space.nvec.max()) <= 10)
    separator = " "
    if has_one_digit:
        separator = ""
    lines = []
    for row in cells:
        lines.append(separator.join(str(int(cell)) for cell in row))

    positions = np.argwhere(cells)
    if 0 < len(positions) <= MAX_LISTED_CELLS:
        cells_with_positions = []
        for row_index, column_index in positions:
            cells_with_positions.append(f"{int(cells[row_index, column_index])} at ({row_index},{column_index})")
        lines.append(", ".join(cells_with_positions))
    return "\n".join(lines)
