"""Games of programs by name, for ``gymnasium.make_vec("textenv/TicTacToe-v0", num_envs=64)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from textenv.programs import kuhn_poker, tic_tac_toe
from textenv.programs.opponents import SELF, Opponent
from textenv.programs.vector_env import ProgramVectorEnv

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Game(NamedTuple):
    """A game of two agents."""

    play: Callable[..., object]
    words: Sequence[str]
    """All words of a move."""
    opponents: dict[str, Opponent]
    """Players that may be named as opponents."""
    limits: dict[str, int]


PROGRAMS = {
    "KuhnPoker": _Game(
        kuhn_poker.kuhn_poker,
        kuhn_poker.ACTIONS,
        {SELF: None},
        {"max_turns": 3, "max_length": 64},
    ),
    "TicTacToe": _Game(
        tic_tac_toe.tic_tac_toe,
        tic_tac_toe.SQUARES,
        {SELF: None, "perfect": tic_tac_toe.perfect_player, "random": tic_tac_toe.random_player},
        {"max_turns": 9, "max_length": 64},
    ),
}


def make_program_env(
    name: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    opponents: Sequence[str | Opponent] | None = None,
    **arguments: Any,
) -> ProgramVectorEnv:
    """Make a game by its name in `PROGRAMS`.

    Args:
        name: name of the game.
        tokenizer: the policy's tokenizer.
        opponents: as in `ProgramVectorEnv`; also by name: ``"self"``, in tic-tac-toe ``"perfect"`` and ``"random"``.
        arguments: other arguments of `ProgramVectorEnv`.

    Raises:
        ValueError: if there is no opponent of such a name.
    """
    game = PROGRAMS[name]
    pool: dict[str, Opponent] | Sequence[Opponent] | None = None
    if opponents is not None:
        pool = {}
        for number, opponent in enumerate(opponents):
            if not isinstance(opponent, str):
                pool[getattr(opponent, "__name__", f"opponent {number}")] = opponent
            elif opponent in game.opponents:
                pool[opponent] = game.opponents[opponent]
            else:
                raise ValueError(
                    f"opponents has {opponent!r}, expected functions or names among {sorted(game.opponents)}"
                )
    options: dict[str, Any] = {"agents": 2, "allowed": game.words} | game.limits | arguments
    return ProgramVectorEnv(game.play, tokenizer=tokenizer, opponents=pool, **options)
