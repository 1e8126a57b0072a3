"""Spaces of texts: any texts up to a length, and the texts of a list."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from gymnasium import spaces

_PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n"


class AnyText(spaces.Text):
    """Texts of any characters, up to ``max_length``; samples are printable ASCII.

    Example:
        >>> space = AnyText(5)
        >>> space.contains("é→"), space.contains("longer")
        (True, False)
    """

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length, min_length=0, charset=_PRINTABLE)

    def contains(self, x: Any) -> bool:
        """Return True for a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length


class ListedText(spaces.Text):
    """The texts of a list.

    Args:
        texts: at least one, none of them empty.

    Example:
        >>> space = ListedText(["left", "right"])
        >>> space.contains("left"), space.contains("ft"), space.sample() in space.texts
        (True, False, True)
    """

    def __init__(self, texts: Sequence[str]) -> None:
        lengths = [len(text) for text in texts]
        super().__init__(max(lengths), min_length=min(lengths), charset=frozenset("".join(texts)))
        self.texts = tuple(texts)

    def contains(self, x: Any) -> bool:
        """Return True for a text of the list."""
        return isinstance(x, str) and x in self.texts

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Draw one of the texts; masks of characters are refused.

        Raises:
            ValueError: if there is a mask.
        """
        if mask is not None or probability is not None:
            raise ValueError("ListedText draws whole texts: leave out mask and probability, which are for characters")
        return self.texts[int(self.np_random.integers(len(self.texts)))]

    def __eq__(self, other: object) -> bool:
        """Return True for a space of the same texts in the same order."""
        return isinstance(other, ListedText) and self.texts == other.texts

    def __repr__(self) -> str:
        """Show the texts."""
        return f"ListedText({list(self.texts)!r:.200})"
