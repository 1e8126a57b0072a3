"""Helpers of the reward functions: text of a completion, lookup of a column, pattern for words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def answer_text(completion: Any) -> str:
    """Return the text of a completion: the string itself, or the contents of its chat messages.

    >>> answer_text("four"), answer_text([{"role": "assistant", "content": "four"}])
    ('four', 'four')

    Raises:
        TypeError: if the completion is neither a string nor a list of messages.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, Sequence) or not all(_is_message(message) for message in completion):
        raise TypeError(
            f"completion is {completion!r:.200}, expected text, or messages as {{'role': ..., 'content': ...}}"
        )
    return "".join(_content(message["content"]) for message in completion)


def _is_message(message: Any) -> bool:
    """Return True if the content is a string, None, or a list of parts whose ``text`` fields are strings."""
    content = message.get("content", 0) if isinstance(message, Mapping) else 0
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text", ""), str) for part in content
    )


def _content(content: Any) -> str:
    """Return the text of a message content: a string, a list of parts, or None (in a tool call)."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text", "") for part in content)


def column_of(columns: dict[str, Any], name: str, reward: str) -> Sequence[Any]:
    """Return a column that a reward function needs.

    Raises:
        ValueError: if the prompts have no such column.
    """
    if name not in columns:
        raise ValueError(
            f"reward {reward!r} needs the column {name!r}, but was given {sorted(columns)}: give prompts as mappings "
            f"with a {name!r} beside the 'prompt', or name another column"
        )
    found: Sequence[Any] = columns[name]
    return found


def any_of(words: Iterable[str]) -> str:
    """Return a regular expression that matches any of these words or phrases as a whole, in linear time.

    Raises:
        ValueError: if there are no words, or one is empty.
    """
    wanted = [words] if isinstance(words, str) else list(words)
    if not wanted or not all(word.strip() for word in wanted):
        raise ValueError(f"words is {wanted}, expected at least one, and none of them empty")
    longest_first = sorted(wanted, key=len, reverse=True)
    return rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
