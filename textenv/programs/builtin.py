"""Programs that have a name, for ``gymnasium.make_vec("textenv/TicTacToe-v0", num_envs=64)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from textenv.importing import load_function
from textenv.programs import kuhn_poker, tic_tac_toe
from textenv.programs.opponents import SELF, Opponent, with_names
from textenv.programs.task import checked_tasks
from textenv.programs.vector_env import ProgramVectorEnv
from textenv.prompts.files import load_prompts
from textenv.prompts.prompts import SPLITS, Subset, split_prompts

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
    split: str = "train",
    opponents: Sequence[str | Opponent] | Mapping[str, str | Opponent] | None = None,
    **arguments: Any,
) -> ProgramVectorEnv:
    """Make a game by its name in `PROGRAMS`, or with ``"Program"`` a program of one's own.

    Args:
        name: name of the game, or ``"Program"``.
        tokenizer: the policy's tokenizer.
        split: ``"train"``: about three quarters of a program's tasks, chosen by a hash of their content; ``"test"``:
            the others.
        opponents: as in `ProgramVectorEnv`; also ``"self"`` and ``"file.py:function"``, and in tic-tac-toe
            ``"perfect"`` and ``"random"``.
        arguments: other arguments of `ProgramVectorEnv`. Of a program ``play`` may be ``"file.py:function"``, and
            ``tasks`` a file as in `textenv.load_prompts`.

    Raises:
        ValueError: if a program has no ``play``, or there is no such file, function or opponent.
    """
    options = dict(arguments)
    known_opponents: dict[str, Opponent] = {SELF: None}
    if name in PROGRAMS:
        game = PROGRAMS[name]
        play = game.play
        known_opponents = game.opponents
        options = {"agents": 2, "allowed": game.words} | game.limits | options
    else:
        play = _read_play(options.pop("play", None))
        options["tasks"] = tasks_of_split(options.pop("tasks", None), split)
    pool = None
    if opponents is not None:
        pool = _read_opponents(opponents, known_opponents)
    return ProgramVectorEnv(play, tokenizer=tokenizer, opponents=pool, **options)


def _read_play(play: object) -> Callable[..., object]:
    """Return a program that is given by itself or by name; raise a ValueError if there is none."""
    if play is None:
        raise ValueError(
            "textenv/Program-v0 has no play: give play='my_agent.py:play', on the command line "
            "--env-kwargs '{\"play\": \"my_agent.py:play\"}'; or command='python my_agent.py', which asks over HTTP"
        )
    if isinstance(play, str):
        return load_function(play)
    return cast("Callable[..., object]", play)


def tasks_of_split(tasks: object, split: str) -> object:
    """Return the tasks of a split, from a file or a list; None if there are none.

    A task's split depends on its content alone. If one of the splits would be empty, both have all tasks.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {sorted(SPLITS)}")
    if tasks is None:
        return None
    if isinstance(tasks, (str, Path)):
        tasks = load_prompts(tasks, prompt_column=None)
    tasks = checked_tasks(cast("Sequence[object]", tasks))
    texts = split_prompts([repr(task) for task in tasks], split, all_if_few=True)
    indices = [texts.row(index) for index in range(len(texts))]
    return Subset(tasks, np.array(indices))


def _read_opponents(
    opponents: Sequence[str | Opponent] | Mapping[str, str | Opponent], known_opponents: Mapping[str, Opponent]
) -> dict[str, Opponent]:
    """Return opponents by name, where names of players and functions are replaced by these."""
    if isinstance(opponents, Mapping):
        named = dict(opponents)
    else:
        named = with_names(opponents)
    pool: dict[str, Opponent] = {}
    for name, opponent in named.items():
        if not isinstance(opponent, str):
            pool[name] = opponent
        elif opponent in known_opponents:
            pool[name] = known_opponents[opponent]
        elif ":" in opponent:
            pool[name] = cast("Callable[..., str]", load_function(opponent))
        else:
            raise ValueError(
                f"opponents has {opponent!r}, expected functions, 'file.py:function', or names among "
                f"{sorted(known_opponents)}"
            )
    return pool
