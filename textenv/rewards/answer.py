"""What every reward function reads: the text of an answer, and the column that it is compared with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def answer_text(completion: Any) -> str:
    """The text of an answer: itself, or the contents of the messages of a chat.

    >>> answer_text("four"), answer_text([{"role": "assistant", "content": "four"}])
    ('four', 'four')

    Raises:
        TypeError: if it is neither.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, Sequence) or not all(_is_message(message) for message in completion):
        raise TypeError(
            f"completion is {completion!r:.200}, expected text, or messages as {{'role': ..., 'content': ...}}"
        )
    return "".join(_content(message["content"]) for message in completion)


def _is_message(message: Any) -> bool:
    """Whether its content is text, None or a list of parts, of which those that are text say so."""
    content = message.get("content", 0) if isinstance(message, Mapping) else 0
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text", ""), str) for part in content
    )


def _content(content: Any) -> str:
    """The text of a message, whose content may be a list of parts or (in a tool call) None."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text", "") for part in content)


def column_of(columns: dict[str, Any], name: str, reward: str) -> Sequence[Any]:
    """A column that a reward function needs.

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
    """A regular expression for any of these as a whole word (or several), linear in the text.

    Raises:
        ValueError: if there are none, or one is empty.
    """
    wanted = [words] if isinstance(words, str) else list(words)
    if not wanted or not all(word.strip() for word in wanted):
        raise ValueError(f"words is {wanted}, expected at least one, and none of them empty")
    longest_first = sorted(wanted, key=len, reverse=True)
    return rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
