"""Shared parts of the games: text space, check of the call order, and length limit of a policy's text."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymnasium import spaces

MAX_TEXT = 4000
"""Maximum characters of a policy's text that a game reads."""
Player = Callable[[Sequence[str]], str]
"""Function from the conversation so far (rules, own text, reply, own text, ..., reply) to the next text."""

_CHARSET = string.digits + string.ascii_letters + string.punctuation + " \n"


def text_space(max_length: int) -> spaces.Text:
    """Text space of printable ASCII and newline, with 0 to ``max_length`` characters."""
    return spaces.Text(max_length=max_length, min_length=0, charset=_CHARSET)


def check_turn(game: object, action: object, *, started: bool, ended: bool) -> None:
    """Check that an episode is running and that the action is text.

    Raises:
        RuntimeError: on a step before the first reset or after the end of the episode.
        TypeError: if the action is not a string.
    """
    name = type(game).__name__
    if not started:
        raise RuntimeError(f"{name}.step came before any reset: call reset() first")
    if ended:
        raise RuntimeError(f"this episode of {name} has ended: call reset() before the next step")
    if not isinstance(action, str):
        raise TypeError(f"{name} was given the action {action!r} of type {type(action).__name__}, expected a str")


def option(options: Mapping[str, Any] | None, name: str) -> Any:
    """Return the one option that a game's reset accepts, or None.

    Raises:
        ValueError: on any other option.
    """
    unknown = sorted(set(options or {}) - {name})
    if unknown:
        raise ValueError(f"reset was given the options {unknown}, expected none or {name!r}")
    return (options or {}).get(name)


def too_long(text: str) -> str | None:
    """Return a reply if the text is longer than a game reads, else None."""
    return f"I read at most {MAX_TEXT} characters; write less." if len(text) > MAX_TEXT else None
