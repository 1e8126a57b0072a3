"""Helpers of the ready-made reward functions: a completion's text, scores by text or by a reference, word patterns."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

TextReward = Callable[..., list[float]]
"""Reward function that applies to every row."""
ColumnReward = Callable[..., list[float | None]]
"""Reward function that applies to the rows with a reference."""


def by_text(name: str, score: Callable[[str], float]) -> TextReward:
    """Return a reward function of this name that scores the text of each completion."""

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [score(answer_text(completion)) for completion in completions]

    reward.__name__ = name
    return reward


def by_reference(name: str, column: str, score: Callable[[str, Any], Any]) -> ColumnReward:
    """Return a reward function of this name that scores the text of each completion given a column's entry.

    A row whose entry is None gets None. The function raises a ValueError if the prompts have no such column.
    """

    def reward(completions: list[Any], **columns: Any) -> list[float | None]:
        if column not in columns:
            raise ValueError(
                f"reward {name!r} needs the column {column!r}, but got {sorted(columns)}: give prompts as "
                f"mappings with 'prompt' and {column!r}, or name another column"
            )
        rows = zip(completions, columns[column], strict=True)
        return [None if right is None else score(answer_text(completion), right) for completion, right in rows]

    reward.__name__ = name
    return reward


def answer_text(completion: Any) -> str:
    """Return the text of a completion: the string itself, or the contents of its chat messages.

    >>> answer_text("four"), answer_text([{"role": "assistant", "content": "four"}])
    ('four', 'four')

    Raises:
        TypeError: if the completion is neither a string nor a list of messages.
    """
    if isinstance(completion, str):
        return completion
    messages = completion if isinstance(completion, Sequence) else [None]
    texts = [text for message in messages for text in _texts(message)]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(
            f"completion is {completion!r:.200}, expected text, or messages as {{'role': ..., 'content': ...}}"
        )
    return "".join(texts)


def _texts(message: Any) -> list[Any]:
    """Return the texts of a message, or a value that is not a string if the argument is not a message.

    A message's content is a string, a list of parts that may have a ``text``, or None (in a tool call).
    """
    content = message.get("content", 0) if isinstance(message, Mapping) else 0
    if isinstance(content, list):
        return [part.get("text", "") if isinstance(part, Mapping) else None for part in content]
    return [] if content is None else [content]


def any_of(words: Iterable[str]) -> str:
    """Return a regular expression that matches, in linear time, any of these words or phrases as a whole.

    Raises:
        ValueError: if there are no words, or one is empty.
    """
    wanted = [words] if isinstance(words, str) else list(words)
    if not wanted or not all(word.strip() for word in wanted):
        raise ValueError(f"words is {wanted}, expected at least one word, and no empty ones")
    longest_first = sorted(wanted, key=len, reverse=True)
    return rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
