"""Helpers of the ready-made reward functions: text of a completion, scores by text or by a reference, word patterns."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

ScoreT = TypeVar("ScoreT")

TextReward = Callable[..., list[float]]
"""Reward function that applies to every row."""
ColumnReward = Callable[..., list[float | None]]
"""Reward function that applies to the rows with a reference."""


def by_text(name: str, score: Callable[[str], float]) -> TextReward:
    """Return a reward function of this name that scores the text of each completion."""

    def reward(completions: Sequence[object], **columns: object) -> list[float]:
        return [score(answer_text(completion)) for completion in completions]

    reward.__name__ = name
    return reward


def by_reference(name: str, column: str, score: Callable[[str, Any], ScoreT]) -> Callable[..., list[ScoreT | None]]:
    """Return a reward function of this name that scores the text of each completion given a column's entry.

    A row whose entry `is_empty` gets None. The function raises a ValueError if the prompts have no such column.
    """

    def reward(completions: Sequence[object], **columns: Sequence[object]) -> list[ScoreT | None]:
        if column not in columns:
            raise ValueError(
                f"reward {name!r} needs the column {column!r}, but got {sorted(columns)}: give prompts as "
                f"mappings with 'prompt' and {column!r}, or name another column"
            )
        scores: list[ScoreT | None] = []
        for completion, reference in zip(completions, columns[column], strict=True):
            if is_empty(reference):
                scores.append(None)
            else:
                scores.append(score(answer_text(completion), reference))
        return scores

    reward.__name__ = name
    return reward


def by_any_reference(name: str, column: str, score: Callable[[str, object], float | None]) -> ColumnReward:
    """Return a reward function of this name that scores texts by a column, any of whose references in a row is right.

    A row gets the largest score, as in SQuAD's evaluation (Rajpurkar et al. 2016, §6.1); None if its entry `is_empty`,
    or no reference has a score. What an entry may be, and the errors, are those of `references_of`.
    """

    def largest_score(text: str, entry: object) -> float | None:
        scores = [score(text, reference) for reference in references_of(entry, column)]
        return max((value for value in scores if value is not None), default=None)

    return by_reference(name, column, largest_score)


def is_empty(entry: object) -> bool:
    """Return True if a column's entry is no reference: None, a text of white space, or NaN, NA or NaT.

    With the last three, pandas fills the cells of a table that have no value.
    """
    if isinstance(entry, str):
        return not entry.strip()
    if isinstance(entry, (float, np.floating)):
        return math.isnan(entry)
    return entry is None or type(entry).__name__ in ("NAType", "NaTType")


def references_of(entry: object, column: str) -> list[object]:
    """Return the references of a column's entry: the entry itself, or what a list, tuple, set or array has.

    The answers of SQuAD, ``{"text": [...], "answer_start": [...]}``, are their texts. Empty references are left out.

    >>> references_of("Lima", "answer"), references_of(["Lima", "lima", None], "answer")
    (['Lima'], ['Lima', 'lima'])
    >>> references_of({"text": ["the park"], "answer_start": [12]}, "answers")
    ['the park']

    Raises:
        TypeError: if the entry or a reference is another mapping, or bytes, or a reference is a list.
        ValueError: if the entry has no reference, as an empty list.
    """
    # References in the entry: one, or several
    entry = _without_positions(entry)
    candidates: list[object] = [entry]
    if isinstance(entry, (list, tuple, set, frozenset)):
        candidates = [_without_positions(item) for item in entry]
    elif hasattr(entry, "__array__") and not isinstance(entry, np.generic):  # an array, a tensor, a column of pandas
        candidates = list(np.atleast_1d(np.asarray(entry)))

    # What has no text of its own would be compared by its Python spelling
    for candidate in candidates:
        if isinstance(candidate, (Mapping, bytes, list, tuple, set, frozenset, np.ndarray)):
            inside = ""
            if candidate is not entry:
                inside = f" inside {entry!r:.200}"
            raise TypeError(
                f"column {column!r} has the {type(candidate).__name__} {candidate!r:.200}{inside}, expected a text, a "
                "number, one list of these, any of which is right, or SQuAD's {'text': [...], 'answer_start': [...]}: "
                f"write what is right, and nothing else, as {column!r}"
            )
    references = [candidate for candidate in candidates if not is_empty(candidate)]
    if not references:
        raise ValueError(
            f"column {column!r} has the {type(entry).__name__} {entry!r:.200} with no reference, expected one or more: "
            "give None in a row that has none, or leave the row out"
        )
    return references


def _without_positions(entry: object) -> object:
    """Return the texts of SQuAD's answers, ``{"text": ..., "answer_start": ...}``; other entries as they are."""
    if isinstance(entry, Mapping) and "text" in entry and entry.keys() <= {"text", "answer_start"}:
        return entry["text"]
    return entry


def refuse_truth_value(reference: object, column: str) -> None:
    """Raise a TypeError if a reference of a reward that reads numbers or formulas is True or False."""
    if isinstance(reference, (bool, np.bool_)):
        raise TypeError(
            f"column {column!r} has the {type(reference).__name__} {reference}, expected a number or its text: give "
            "one, or take exact_answer, which compares with 'true' and 'false'"
        )


def reference_texts(reference: object) -> list[str]:
    """Return the texts for which a column's entry stands; a whole float, such as 4.0, stands for 4 and for 4.0.

    pandas makes floats of whole numbers if a cell of their column is empty.

    >>> reference_texts(4.0), reference_texts("4.0"), reference_texts(4)
    (['4', '4.0'], ['4.0'], ['4'])
    """
    texts = [str(reference)]
    if isinstance(reference, (float, np.floating)) and float(reference).is_integer():
        texts.insert(0, str(int(reference)))
    return texts


def answer_text(completion: object) -> str:
    """Return the text of a completion: the string itself, or the contents of its chat messages.

    >>> answer_text("four"), answer_text([{"role": "assistant", "content": "four"}])
    ('four', 'four')

    Raises:
        TypeError: if the completion is neither a string nor a list of messages.
    """
    if isinstance(completion, str):
        return completion
    expected = "expected text, or messages as {'role': ..., 'content': ...}"
    if not isinstance(completion, Sequence):
        raise TypeError(f"completion is {completion!r:.200}, {expected}")
    whole_text = ""
    for message in completion:
        for text in _texts(message):
            if not isinstance(text, str):
                raise TypeError(f"completion is {completion!r:.200}, {expected}")
            whole_text += text
    return whole_text


def _texts(message: object) -> list[object]:
    """Return the texts of a message; None stands for what is not a message, or not a part of one.

    A message's content is a string, a list of parts that may have a ``text``, or None (in a tool call).
    """
    if not isinstance(message, Mapping) or "content" not in message:
        return [None]
    content = message["content"]
    if content is None:
        return []
    if not isinstance(content, list):
        return [content]
    texts = []
    for part in content:
        if isinstance(part, Mapping):
            texts.append(part.get("text", ""))
        else:
            texts.append(None)
    return texts


def any_of(words: Iterable[str]) -> str:
    """Return a regular expression that matches, in linear time, any of these words or phrases as a whole.

    Raises:
        ValueError: if there are no words, or one is empty.
    """
    if isinstance(words, str):
        words = [words]
    words = list(words)
    if not words or not all(word.strip() for word in words):
        raise ValueError(f"words is {words}, expected at least one word, and no empty ones")
    longest_first = sorted(words, key=len, reverse=True)
    return rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
