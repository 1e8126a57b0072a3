"""Grammar of short movie reviews: sampler, recognizer and label, all from the tables in `phrases.py`.

A review is one to three sentences of one sentiment, in lower case, each ending with a full stop. It begins
with a neutral opening, which is the prompt.

>>> import numpy as np
>>> review = sample_review(np.random.default_rng(0))
>>> review.text.startswith(review.opening), accepts(review.text), label_of(review.text) == review.label
(True, True, True)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from textenv.embedded.phrases import FURTHER, NEUTRAL, OPENINGS, POLAR, PREDICATES, SENTENCES

if TYPE_CHECKING:
    import numpy as np

CLASSES: Final = ("negative", "positive")
"""Names of the labels 0 and 1."""

_SLOT = re.compile(r"\{(\w+)\}")


class Review(NamedTuple):
    """A complete review."""

    text: str
    label: int
    """0 negative, 1 positive."""
    opening: str
    """Neutral first words of `text`."""


@cache
def openings() -> tuple[str, ...]:
    """Return all neutral openings, in a fixed order; all are equally likely, in both sentiments."""
    return tuple(text for pattern in OPENINGS for text in expansions(pattern, 0))


def sample_review(rng: np.random.Generator) -> Review:
    """Sample a review: label, opening, number of sentences, patterns and phrases are each uniform."""
    label = int(rng.integers(2))
    opening = _choose(openings(), rng)
    sentences = [f"{opening} {_fill(_choose(PREDICATES, rng), label, rng)}."]
    sentences += [f"{_fill(_choose(SENTENCES, rng), label, rng)}." for _ in range(_choose(FURTHER, rng))]
    return Review(" ".join(sentences), label, opening)


def accepts(text: str) -> bool:
    """Return True if the text is exactly one complete review of the grammar."""
    return label_of(text) is not None


def label_of(text: str) -> int | None:
    """Return the label of a complete review, 0 or 1; None for any other text."""
    for label in range(len(CLASSES)):
        if _recogniser(label).fullmatch(text):
            return label
    return None


def expansions(pattern: str, label: int) -> Iterator[str]:
    """Iterate over all texts of a pattern for a label."""
    slot = _SLOT.search(pattern)
    if slot is None:
        yield pattern
        return
    for phrase in _phrases(slot[1], label):
        yield from expansions(f"{pattern[: slot.start()]}{phrase}{pattern[slot.end() :]}", label)


def _phrases(slot: str, label: int) -> tuple[str, ...]:
    return NEUTRAL[slot] if slot in NEUTRAL else POLAR[slot][label]


def _choose(options: tuple[Any, ...], rng: np.random.Generator) -> Any:
    return options[int(rng.integers(len(options)))]


def _fill(pattern: str, label: int, rng: np.random.Generator) -> str:
    return _SLOT.sub(lambda slot: _fill(_choose(_phrases(slot[1], label), rng), label, rng), pattern)


def _expression(patterns: tuple[str, ...], label: int) -> str:
    """Return a regular expression for all texts of the patterns."""
    filled = (_SLOT.sub(lambda slot: _expression(_phrases(slot[1], label), label), each) for each in patterns)
    return f"(?:{'|'.join(filled)})"


@cache
def _recogniser(label: int) -> re.Pattern[str]:
    """Return the regular expression for all reviews with this label."""
    first = f"{_expression(OPENINGS, label)} {_expression(PREDICATES, label)}"
    return re.compile(rf"{first}\.(?: {_expression(SENTENCES, label)}\.){{{min(FURTHER)},{max(FURTHER)}}}")
