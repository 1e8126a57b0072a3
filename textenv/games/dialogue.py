"""`Game`, base class of the games: order of calls, options, turn limit, and maximum length of a policy's text."""

import string
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium import spaces

MAX_ACTION = 4000
"""Maximum characters of a policy's text that a game reads."""

_CHARSET = string.digits + string.ascii_letters + string.punctuation + " \n"


def text_space(max_length: int) -> spaces.Text:
    """Text space of printable ASCII and newline, with 0 to ``max_length`` characters."""
    return spaces.Text(max_length=max_length, min_length=0, charset=_CHARSET)


class Game(gymnasium.Env[str, str]):
    """Game about a secret; the episode terminates when `_play` gives a score, or after the last turn.

    Args:
        turns: number of turns before the episode ends.
        max_observation: maximum characters of an observation.
    """

    metadata = {"render_modes": []}
    OPTION = "secret"
    """Option of `reset` that sets the secret."""
    TURN = "turn"
    """Word for a turn in the reply to the last turn."""

    def __init__(self, *, turns: int, max_observation: int) -> None:
        self.observation_space, self.action_space = text_space(max_observation), text_space(MAX_ACTION)
        self._limit = turns
        self._secret: Any = None
        self._shown = ""
        self._turns = 0
        self._ended = False

    def _draw(self) -> Any:
        """Draw a secret, or the expression that gives it, with `np_random`."""
        raise NotImplementedError

    def _begin(self, secret: Any) -> str:
        """Set ``_secret`` and ``_shown`` (the secret in words); return the rules. ValueError on a wrong secret."""
        raise NotImplementedError

    def _play(self, action: str) -> tuple[str, float | None]:
        """Return the reply to a text, and a score if the episode is over."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draw a secret, or use ``options[OPTION]``, and return the rules.

        Raises:
            ValueError: on another option, or a secret that the game does not know.
        """
        super().reset(seed=seed)
        unknown = sorted(set(options or {}) - {self.OPTION})
        if unknown:
            raise ValueError(f"reset was given the options {unknown}, expected none or {self.OPTION!r}")
        given = (options or {}).get(self.OPTION)
        rules = self._begin(self._draw() if given is None else given)
        self._turns, self._ended = 0, False
        return rules, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn.

        Raises:
            RuntimeError: before the first reset, or after the end of the episode.
            TypeError: if the action is not a string.
        """
        name = type(self).__name__
        if self._secret is None:
            raise RuntimeError(f"{name}.step was called before reset: call reset() first")
        if self._ended:
            raise RuntimeError(f"this episode of {name} has ended: call reset() before the next step")
        if not isinstance(action, str):
            raise TypeError(f"{name} was given the action {action!r} of type {type(action).__name__}, expected a str")
        self._turns += 1
        reply, score = f"I read at most {MAX_ACTION} characters; write less.", None
        if len(action) <= MAX_ACTION:
            reply, score = self._play(action)
        self._ended = score is not None or self._turns == self._limit
        if self._ended and score is None:
            reply += f"\nThat was your last {self.TURN}; it is {self._shown}."
        return reply, score or 0.0, self._ended, False, {}
