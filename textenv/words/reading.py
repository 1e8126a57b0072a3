"""Reads the words of an action in a text that a model wrote freely."""

from __future__ import annotations

import re
from collections.abc import Sequence


class WordReader:
    """Finds actions in free text: the last one counts, because a model reasons first and decides then.

    Capital letters do not matter. A word stands alone: ``up`` is not read in ``upper``, nor ``1`` in ``-1``, ``10`` or
    ``1.5``. Where one word contains another, the longer one is read: ``turn left`` before ``left``. The words of
    several choices follow each other, with white space, commas or semicolons between them.

    Args:
        choices: the words of each choice, as in `ActionWords.choices`.

    Raises:
        ValueError: if two words of a choice differ in nothing but capital letters.

    Example:
        >>> reader = WordReader([["left", "right"]])
        >>> reader.indices("Not left: I go RIGHT!"), reader.indices("hm")
        ([1], None)
    """

    def __init__(self, choices: Sequence[Sequence[str]]) -> None:
        self._index_of_word: list[dict[str, int]] = []
        groups = []
        for words in choices:
            index_of_word = {_plain(word): index for index, word in enumerate(words)}
            if len(index_of_word) != len(words):
                raise ValueError(
                    f"actions are the words {list(words)!r:.200}, of which two differ in nothing but capital letters "
                    "or spaces: in free text they cannot be told apart"
                )
            self._index_of_word.append(index_of_word)
            longest_first = sorted(words, key=len, reverse=True)
            alternatives = "|".join(map(_pattern, longest_first))
            groups.append(f"({alternatives})")
        self._pattern = re.compile(r"[\s,;]+".join(groups), re.IGNORECASE)

    def indices(self, text: str) -> list[int] | None:
        """Return the index of the word of each choice, by the last action in a text; None if there is none."""
        last = None
        for match in self._pattern.finditer(text):
            last = match
        if last is None:
            return None
        return [
            index_of_word[_plain(word)] for index_of_word, word in zip(self._index_of_word, last.groups(), strict=True)
        ]


def _plain(word: str) -> str:
    """Return a word in small letters, with single spaces."""
    return " ".join(word.lower().split())


def _pattern(word: str) -> str:
    """Return a pattern of a word that stands alone."""
    spelled = r"\s+".join(re.escape(part) for part in word.split())
    start = ""
    if word.strip()[0].isalnum():
        start = r"(?<!\w)"
    if word.strip()[0].isdigit():
        start = r"(?<![\w-])(?<!\d\.)"
    end = ""
    if word.strip()[-1].isalnum():
        end = r"(?!\w)"
    if word.strip()[-1].isdigit():
        end = r"(?!\w|\.\d)"
    return f"{start}{spelled}{end}"
