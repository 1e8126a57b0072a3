"""`TextArena`: games of the package textarena, for one player or several, as programs that ask the model."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from textenv.optional import package
from textenv.prompts.messages import Message

if TYPE_CHECKING:
    import numpy as np

_LOCK = threading.Lock()
"""Held while a game draws random numbers, which textarena takes from Python's generator for all games."""


class _Ask(Protocol):
    """What a program asks (`textenv.programs.run.Ask`)."""

    def __call__(self, content: object) -> str:
        """Return the model's answer."""


class TextArena:
    """A game of textarena as a program: ``ProgramVectorEnv(TextArena("TicTacToe-v0"), agents=2, tokenizer=tok)``.

    Each agent reads what the game tells it and what the others say, and in a chat its own answers; its answer is the
    action. The reward of an agent is that of the game: 1 for a win, −1 for a loss, 0 for a draw. A game that is not
    over when the environment's limits are reached is left out.

    Args:
        name: textarena's name of the game, such as ``"TicTacToe-v0"``; its wrappers are left out.
        chat: messages, which need a chat template; else lines of text.
        action: function from an answer to the action, such as ``lambda answer: f"[{answer.strip()}]"``, because most
            games read actions in brackets; None takes the answer as it is.
        rules: text that replaces the game's rules, which are long for a small model.
        settings: arguments of ``textarena.make``.

    Raises:
        ImportError: without the extra ``textarena``.
        ValueError: if there is no such game, or its number of players is not the environment's ``agents``.

    Example:
        >>> game = TextArena("KuhnPoker-v0", chat=False)  # doctest: +SKIP
        >>> env = ProgramVectorEnv(game, agents=2, tokenizer=tok)  # doctest: +SKIP
    """

    def __init__(
        self,
        name: str,
        *,
        chat: bool = True,
        action: Callable[[str], str] | None = None,
        rules: str | None = None,
        **settings: Any,
    ) -> None:
        self._textarena: Any = package("textarena", "textarena")
        self.__name__ = name
        self._chat = chat
        self._action = action
        self._rules = rules
        self._settings = settings
        self._make()  # an unknown game is an error at once

    def __call__(self, *asks: _Ask, rng: np.random.Generator) -> list[float] | float:
        """Play a game."""
        game = _Repeatable(self._make(), seed=int(rng.integers(2**31)))
        try:
            game.call("reset", num_players=len(asks), seed=game.seed)
        except AssertionError as error:  # how textarena refuses a number of players
            raise ValueError(f"{self.__name__} cannot be played by agents={len(asks)}: {error}") from error

        # Play, until the game is over
        transcripts = [_Transcript(chat=self._chat) for _ in asks]
        is_over = False
        while not is_over:
            player, observations = game.call("get_observation")
            transcript = transcripts[player]
            transcript.add(self._texts(observations, reader=player, names=game.names))
            answer = asks[player](transcript.content)
            transcript.add_answer(answer)
            action = answer if self._action is None else self._action(answer)
            is_over, _ = game.call("step", action=action)

        rewards, _ = game.call("close")
        rewards = rewards or {}  # None after some draws
        scores = [float(rewards.get(player, 0)) for player in range(len(asks))]
        return scores if len(asks) > 1 else scores[0]

    def _make(self) -> Any:
        """Make the game, without the package's wrappers, which join all messages to one text."""
        return self._textarena.make(f"{self.__name__}-raw", **self._settings)

    def _texts(
        self, observations: list[tuple[int, str, object]], *, reader: int, names: Mapping[int, str]
    ) -> list[str]:
        """Return what the game tells a player, without repetitions, and what the others said, after their names.

        Args:
            observations: sender, text and kind of each message.
            reader: number of the player, whose own actions are left out.
            names: names of the players, as far as they have other ones than "Player 1".
        """
        kinds = self._textarena.ObservationType
        texts: list[str] = []
        for sender, text, kind in observations:
            if kind is kinds.PLAYER_ACTION:
                if sender != reader:
                    texts.append(f"[{names.get(sender, f'Player {sender}')}] {text}")
                continue
            if kind is kinds.PROMPT and self._rules is not None:
                text = self._rules
            if text not in texts:
                texts.append(text)
        return texts


class _Repeatable:
    """A game whose random numbers depend on its seed only, also beside other games in other threads."""

    def __init__(self, game: Any, *, seed: int) -> None:
        self._game = game
        self.seed = seed
        self._state = random.Random(seed).getstate()

    @property
    def names(self) -> Mapping[int, str]:
        """Names of players by number, in games that have roles."""
        names: Mapping[int, str] = self._game.state.role_mapping
        return names

    def call(self, method: str, **arguments: object) -> Any:
        """Call a method of the game."""
        with self._random_numbers():
            return getattr(self._game, method)(**arguments)

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Give Python's generator this game's state, and afterwards its former one."""
        with _LOCK:
            former_state = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(former_state)


class _Transcript:
    """What a player has read and written."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._messages: list[Message] = []
        self._text = ""

    @property
    def content(self) -> object:
        """What the player reads: messages or a text."""
        return list(self._messages) if self._chat else self._text

    def add(self, texts: list[str]) -> None:
        """Add what the game tells."""
        if self._chat:
            self._messages.append({"role": "user", "content": "\n".join(texts)})
        else:
            self._text += "".join(f"{text}\n" for text in texts)

    def add_answer(self, answer: str) -> None:
        """Add the player's answer."""
        if self._chat:
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._text += f"{answer}\n"
