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
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from textenv.embedded.phrases import FURTHER, NEUTRAL, OPENINGS, POLAR, PREDICATES, SENTENCES

if TYPE_CHECKING:
    import numpy as np

CLASSES: Final = ("negative", "positive")
"""Names of the labels 0 and 1."""

OptionT = TypeVar("OptionT")
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
    texts: list[str] = []
    for pattern in OPENINGS:
        texts += expansions(pattern, label=0)  # their slots are the same for both labels
    return tuple(texts)


def sample_review(rng: np.random.Generator) -> Review:
    """Sample a review: label, opening, number of sentences, patterns and phrases are each uniform."""
    label = int(rng.integers(2))
    opening = _choose(openings(), rng)
    predicate = _fill(_choose(PREDICATES, rng), label, rng)
    sentences = [f"{opening} {predicate}."]
    for _ in range(_choose(FURTHER, rng)):
        sentence = _fill(_choose(SENTENCES, rng), label, rng)
        sentences.append(f"{sentence}.")
    return Review(" ".join(sentences), label, opening)


def accepts(text: str) -> bool:
    """Return True if the text is one complete review of the grammar, and nothing more."""
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
    text_before = pattern[: slot.start()]
    text_after = pattern[slot.end() :]
    for phrase in _phrases(slot[1], label):
        yield from expansions(f"{text_before}{phrase}{text_after}", label)


def _phrases(slot: str, label: int) -> tuple[str, ...]:
    """Return the phrases of a slot for a label."""
    if slot in NEUTRAL:
        return NEUTRAL[slot]
    return POLAR[slot][label]


def _choose(options: tuple[OptionT, ...], rng: np.random.Generator) -> OptionT:
    """Draw one of the options."""
    return options[int(rng.integers(len(options)))]


def _fill(pattern: str, label: int, rng: np.random.Generator) -> str:
    """Replace each slot of a pattern by a phrase that is drawn, and the slots of that phrase too."""

    def draw_phrase(slot: re.Match[str]) -> str:
        phrase = _choose(_phrases(slot[1], label), rng)
        return _fill(phrase, label, rng)

    return _SLOT.sub(draw_phrase, pattern)


def _expression(patterns: tuple[str, ...], label: int) -> str:
    """Return a regular expression for all texts of the patterns."""

    def any_phrase(slot: re.Match[str]) -> str:
        return _expression(_phrases(slot[1], label), label)

    alternatives = [_SLOT.sub(any_phrase, pattern) for pattern in patterns]
    return f"(?:{'|'.join(alternatives)})"


@cache
def _recogniser(label: int) -> re.Pattern[str]:
    """Return the regular expression for all reviews with this label."""
    first = f"{_expression(OPENINGS, label)} {_expression(PREDICATES, label)}"
    further = _expression(SENTENCES, label)
    return re.compile(rf"{first}\.(?: {further}\.){{{min(FURTHER)},{max(FURTHER)}}}")
