"""What every reward function reads: the text of an answer, and the column that it is compared with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any


def answer_text(completion: Any) -> str:
    """The text of an answer: itself, or the contents of the messages of a chat.

    >>> answer_text("four"), answer_text([{"role": "assistant", "content": "four"}])
    ('four', 'four')
    """
    if isinstance(completion, str):
        return completion
    return "".join(_content(message["content"]) for message in completion)


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
