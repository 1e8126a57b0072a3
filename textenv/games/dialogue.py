"""`Game`, base class of the games: order of calls, options, turn limit, and maximum length of a policy's text."""

import string
from collections.abc import Mapping
from typing import Generic, TypeVar

import gymnasium
from gymnasium import spaces

MAX_ACTION = 4000
"""Maximum number of characters of a policy's text; a game does not read longer ones."""

SecretT = TypeVar("SecretT")
_CHARSET = string.digits + string.ascii_letters + string.punctuation + " \n"


def text_space(max_length: int) -> spaces.Text:
    """Return the space of texts of 0 to ``max_length`` characters, in printable ASCII and newline."""
    return spaces.Text(max_length=max_length, min_length=0, charset=_CHARSET)


class Game(gymnasium.Env[str, str], Generic[SecretT]):
    """Game about a secret; the episode terminates when `_play` gives a score, or after the last turn.

    Args:
        turns: number of turns before the episode ends.
        max_observation: maximum number of characters of an observation.
    """

    metadata = {"render_modes": []}
    OPTION = "secret"
    """Option of `reset` that sets the secret."""
    TURN = "turn"
    """Word for a turn in the reply to the last turn."""

    def __init__(self, *, turns: int, max_observation: int) -> None:
        self.observation_space = text_space(max_observation)
        self.action_space = text_space(MAX_ACTION)
        self._max_turns = turns
        self._secret: SecretT
        self._secret_in_words = ""
        self._turns = 0
        self._started = False
        self._ended = False

    def _draw(self) -> object:
        """Draw a secret, or the expression that gives it, with `np_random`."""
        raise NotImplementedError

    def _begin(self, secret: object) -> str:
        """Set ``_secret`` and ``_secret_in_words``; return the rules. Raise a ValueError if there is no such secret."""
        raise NotImplementedError

    def _play(self, action: str) -> tuple[str, float | None]:
        """Return the reply to a text, and a score if the episode is over."""
        raise NotImplementedError

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[str, dict[str, object]]:
        """Draw a secret, or use ``options[OPTION]``, and return the rules.

        Raises:
            ValueError: on another option, or a secret that the game does not know.
        """
        super().reset(seed=seed)
        options = options or {}
        unknown = sorted(set(options) - {self.OPTION})
        if unknown:
            raise ValueError(f"reset was given the options {unknown}, expected none or {self.OPTION!r}")
        secret = options.get(self.OPTION)
        if secret is None:
            secret = self._draw()
        rules = self._begin(secret)
        self._turns = 0
        self._started = True
        self._ended = False
        return rules, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Play one turn: return the reply, the score, and whether the episode has ended.

        Raises:
            RuntimeError: before the first reset, or after the end of the episode.
            TypeError: if the action is not a string.
        """
        # Calls in the wrong order
        name = type(self).__name__
        if not self._started:
            raise RuntimeError(f"{name}.step was called before reset: call reset() first")
        if self._ended:
            raise RuntimeError(f"this episode of {name} has ended: call reset() before the next step")
        if not isinstance(action, str):
            raise TypeError(f"{name} was given the action {action!r} of type {type(action).__name__}, expected a str")

        # The turn, which a text that is too long uses up
        self._turns += 1
        if len(action) <= MAX_ACTION:
            reply, score = self._play(action)
        else:
            reply = f"I read at most {MAX_ACTION} characters; write less."
            score = None

        # The end: a score, or no turns left
        self._ended = score is not None or self._turns == self._max_turns
        if self._ended and score is None:
            reply += f"\nThat was your last {self.TURN}; it is {self._secret_in_words}."
        return reply, score or 0.0, self._ended, False, {}
