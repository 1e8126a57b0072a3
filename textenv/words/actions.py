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
        """Return the index of the word of each choice; in a Box, of the nearest value.

        Raises:
            ValueError: if another space than a Box does not contain the action.
        """
        numbers = np.asarray(action, dtype=np.float64).ravel()
        indices = []
        for values, number in zip(self.values, numbers, strict=True):
            distances = np.abs(values - number)
            if distances.min() > 0 and not self.is_binned:
                raise ValueError(f"the action is {action!r:.200}, expected one of {self.space}")
            indices.append(int(distances.argmin()))
        return indices

    def _words(self, words: object) -> tuple[tuple[str, ...], ...]:
        """Check the words, or make them of the numbers."""
        if words is None:
            return tuple(map(_numbers, self.values))
        expected = "a list of words in the order of the actions"
        if len(self.values) > 1:
            expected = f"a list of {len(self.values)} lists of words, one for each number"
        if not isinstance(words, (list, tuple)):  # a set or a dictionary has an order of its own
            raise ValueError(f"actions is {words!r:.200}, expected {expected} of {self.space}")

        # One list of words for each choice
        lists = words
        if len(self.values) == 1 and not any(isinstance(entry, (list, tuple)) for entry in words):
            lists = [words]
        if len(lists) != len(self.values) or not all(isinstance(entry, (list, tuple)) for entry in lists):
            raise ValueError(f"actions is {words!r:.200}, expected {expected} of {self.space}")

        # Each choice has one word for each of its actions
        choices = []
        for choice_words, values in zip(lists, self.values, strict=True):
            if not all(isinstance(word, str) and word.strip() for word in choice_words):
                raise ValueError(f"actions is {words!r:.200}, expected texts that are not empty")
            if len(choice_words) != len(values) or len({*choice_words}) != len(choice_words):
                raise ValueError(
                    f"actions is {words!r:.200}, expected {len(values)} different words, in the order of the actions "
                    f"of {self.space}"
                )
            choices.append(tuple(choice_words))
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


def _numbers(values: np.ndarray) -> tuple[str, ...]:
    """Write the numbers of a choice as words: whole numbers in full, others with as few decimals as tell them apart."""
    for decimals in range(3, 17):
        words = tuple(np.format_float_positional(round(float(value), decimals), trim="-") for value in values)
        if len({*words}) == len(words):
            return words
    raise ValueError(f"the actions are among {values.tolist()}, which are too close to each other to have words")
