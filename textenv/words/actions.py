"""`ActionWords`: the words that stand for the actions of an environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

MAX_WORDS = 1000
"""Maximum number of words of one choice."""
MAX_LISTED = 20
"""A choice with more words is not listed in `ActionWords.request`."""
BINS = 5
"""Number of values to choose from in each dimension of a Box."""


class ActionWords:
    """Words for the actions of a Discrete, MultiDiscrete, MultiBinary or bounded Box.

    An action consists of one or several independent choices, and each choice has its own words. A Discrete is one
    choice. MultiDiscrete, MultiBinary and Box have one for each number. A dimension of a Box is divided into bins: one
    may choose `BINS` values at equal distances, the lowest and the highest among them.

    Args:
        space: the action space of one environment.
        words: for one choice its words, in the order of the actions; for several choices a list of words for each.
            None: the numbers.

    Raises:
        ValueError: if the space is another one, a Box has no bounds, there are too many actions, or the words are not
            as many as the actions or not distinct.

    Example:
        >>> words = ActionWords(spaces.Discrete(2), ["left", "right"])
        >>> words.choices, words.action([1]), words.indices(np.int64(0))
        ((('left', 'right'),), np.int64(1), [0])
    """

    def __init__(self, space: spaces.Space, words: Sequence[str] | Sequence[Sequence[str]] | None = None) -> None:
        self.space = space
        self.values = _values(space)
        """The numbers that each choice is among."""
        self.choices = self._words(words)
        """The words of each choice."""

    @property
    def is_binned(self) -> bool:
        """True if the space is a Box, of which only some actions have words."""
        return isinstance(self.space, spaces.Box)

    @property
    def options(self) -> str:
        """What may be written, for a sentence: ``one of left, right``."""
        if len(self.choices) > 1 and len({*self.choices}) == 1:
            return f"{len(self.choices)} words with spaces between them, each one of {', '.join(self.choices[0])}"
        parts = [f"one of {', '.join(words)}" for words in self.choices]
        return ", then a space and ".join(parts)

    @property
    def request(self) -> str:
        """Sentence that asks for an action, ``Write one of left, right.``; empty if the words are too many to list."""
        if max(map(len, self.choices)) > MAX_LISTED:
            return ""
        return f"Write {self.options}."

    def action(self, indices: Sequence[int]) -> Any:
        """Return the action of the space, given the index of the word in each choice."""
        numbers = [values[index] for values, index in zip(self.values, indices, strict=True)]
        if isinstance(self.space, spaces.Discrete):
            return self.space.dtype.type(numbers[0])
        return np.array(numbers, dtype=self.space.dtype).reshape(self.space.shape)

    def indices(self, action: Any) -> list[int]:
        """Return the index of the word of each choice; in a Box, of the nearest value."""
        numbers = np.asarray(action, dtype=np.float64).ravel()
        return [int(np.abs(values - number).argmin()) for values, number in zip(self.values, numbers, strict=True)]

    def _words(self, words: Sequence[str] | Sequence[Sequence[str]] | None) -> tuple[tuple[str, ...], ...]:
        """Check the words, or make them of the numbers."""
        if words is None:
            return tuple(tuple(_number(value) for value in values) for values in self.values)
        several = not all(isinstance(word, str) for word in words)
        if isinstance(words, str) or (not several and len(self.values) > 1):
            raise ValueError(
                f"actions is {words!r:.200}, expected a list of {len(self.values)} lists of words, one for each number "
                f"of {self.space}"
            )

        # One list of words for each choice, which has a word for each of its values
        lists: Any = words if several else [words]
        if len(lists) != len(self.values):
            raise ValueError(
                f"actions has {len(lists)} lists of words, but {self.space} has {len(self.values)} numbers"
            )

        # Each choice has one word for each of its actions
        choices = []
        for choice_words, values in zip(lists, self.values, strict=True):
            choice = tuple(choice_words)
            if len(choice) != len(values) or len({*choice}) != len(choice):
                raise ValueError(
                    f"actions is {words!r:.200}, expected {len(values)} different words, in the order of the actions "
                    f"of {self.space}"
                )
            if not all(isinstance(word, str) and word.strip() for word in choice):
                raise ValueError(f"actions is {words!r:.200}, expected words that are not empty")
            choices.append(choice)
        return tuple(choices)


def _values(space: spaces.Space) -> list[np.ndarray]:
    """Return the numbers of each independent choice of an action space, float64 ``[n]``."""
    # A Box in bins
    if isinstance(space, spaces.Box):
        if not space.is_bounded() or not np.issubdtype(space.dtype, np.floating):
            raise ValueError(
                f"the actions are {space}, which have no words: a Box needs float numbers and bounds on both sides "
                "(gymnasium.wrappers.ClipAction or RescaleAction give bounds)"
            )
        return [np.linspace(low, high, BINS) for low, high in zip(space.low.ravel(), space.high.ravel(), strict=True)]

    # Integers from a start on
    if isinstance(space, spaces.Discrete):
        counts = [int(space.n)]
        starts = [int(space.start)]
    elif isinstance(space, spaces.MultiDiscrete):
        counts = space.nvec.ravel().tolist()
        starts = space.start.ravel().tolist()
    elif isinstance(space, spaces.MultiBinary):
        counts = [2] * int(np.prod(space.shape))
        starts = [0] * len(counts)
    else:
        raise ValueError(
            f"the actions are {space}, which have no words: expected Discrete, MultiDiscrete, MultiBinary or a bounded "
            "Box"
        )
    if max(counts) > MAX_WORDS:
        raise ValueError(f"the actions are {space}, with {max(counts)} to choose from, expected at most {MAX_WORDS}")
    return [np.arange(start, start + count, dtype=np.float64) for start, count in zip(starts, counts, strict=True)]


def _number(value: float) -> str:
    """Write a number of an action space as a word: at most three decimals."""
    return f"{round(float(value), 3):g}"
