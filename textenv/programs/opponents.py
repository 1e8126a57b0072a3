"""Opponents: who plays the other agents of a game, if not the policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from textenv.programs.run import ProgramRun, Question
from textenv.prompts.messages import Message

SELF = "self"
"""Name of the policy itself in the log, as an opponent."""


@runtime_checkable
class BatchOpponent(Protocol):
    """Opponent that answers the questions of many games in one call, such as an earlier policy."""

    def answer(self, questions: Sequence[Question]) -> Sequence[str]:
        """Return an answer to each question; `Question.seed` is its source of random numbers."""


Opponent = Callable[..., str] | BatchOpponent | None
"""A function from what an agent reads to its answer, a `BatchOpponent`, or None, the policy itself."""


class Opponents:
    """Pool of opponents, one of which is drawn for each game, and for it the agent that the policy plays.

    Args:
        opponents: list, or by name, see `textenv.ProgramVectorEnv`.
        agents: number of agents of a game.

    Raises:
        TypeError: if one of them is no opponent.
        ValueError: if there are none, or ``agents`` is 1.
    """

    def __init__(self, opponents: Sequence[Opponent] | Mapping[str, Opponent], *, agents: int) -> None:
        if agents < 2:
            raise ValueError("opponents need a program of several agents: give agents=2")
        if isinstance(opponents, Mapping):
            named = dict(opponents)
        else:
            named = with_names(opponents)
        if not named:
            raise ValueError("opponents is empty, expected at least one: a function, a policy's opponent, or None")
        self.agents = agents
        self.by_name: dict[str, Opponent] = {}
        """The opponents, in the order in which they were added."""
        for name, opponent in named.items():
            self.add(name, opponent)

    def add(self, name: str, opponent: Opponent) -> None:
        """Add an opponent, or replace the one with this name; raise a TypeError if it is none."""
        if opponent is not None and not isinstance(opponent, BatchOpponent) and not callable(opponent):
            raise TypeError(
                f"opponent {name!r} is {opponent!r:.200}, expected a function from what it reads to its answer, an "
                "object with a method answer(questions), or None for the policy itself"
            )
        self.by_name[name] = opponent

    def remove(self, name: str) -> None:
        """Remove an opponent; games that are running go on with it."""
        del self.by_name[name]

    def draw(self, run: ProgramRun, *, seed: int, number: int) -> None:
        """Draw the opponent of a game, and the agent that the policy plays; both depend on seed and number only."""
        rng = np.random.default_rng([seed, number, 1])
        names = list(self.by_name)
        name = names[int(rng.integers(len(names)))]
        learner = int(rng.integers(self.agents))
        run.opponent_name = name
        run.opponent = self.by_name[name]
        if run.opponent is not None:
            run.learners = frozenset({learner})
        run.opponent_rng = rng


def answer_for_opponents(runs: Sequence[ProgramRun], words: Mapping[str, str]) -> None:
    """Answer the questions of these runs, which are put to their opponents; an error is raised in the program.

    Args:
        runs: programs, each with a `ProgramRun.question`.
        words: the environment's words, by their text without spaces around it; none if it has no list of them.
    """
    runs_of: dict[int, list[ProgramRun]] = {}
    for run in runs:
        runs_of.setdefault(id(run.opponent), []).append(run)
    for runs_of_opponent in runs_of.values():
        opponent = runs_of_opponent[0].opponent
        if isinstance(opponent, BatchOpponent):
            _answer_together(opponent, runs_of_opponent, words)
        else:
            for run in runs_of_opponent:
                _answer_alone(run, words)


def _answer_together(opponent: BatchOpponent, runs: Sequence[ProgramRun], words: Mapping[str, str]) -> None:
    questions = []
    for run in runs:
        assert run.question is not None
        run.question.seed = int(run.opponent_rng.integers(2**62))
        questions.append(run.question)
    answers: Any = opponent.answer(questions)
    if isinstance(answers, Iterable) and not isinstance(answers, str):
        answers = list(answers)
    if not isinstance(answers, list) or len(answers) != len(questions):
        raise TypeError(
            f"the opponent {runs[0].opponent_name!r} returned {answers!r:.200} for {len(questions)} questions, "
            "expected a list with an answer to each"
        )
    for run, text in zip(runs, answers, strict=True):
        try:
            _check_answer(run, text, words)
        except (TypeError, ValueError) as error:
            run.refuse_question(error)
        else:
            run.give_text(words.get(text.strip(), text))


def _answer_alone(run: ProgramRun, words: Mapping[str, str]) -> None:
    question = run.question
    opponent = run.opponent
    assert question is not None and callable(opponent)
    content: str | list[Message] = question.content if isinstance(question.content, str) else list(question.content)
    names = inspect.signature(opponent).parameters
    options: dict[str, object] = {}
    if "allowed" in names:
        options["allowed"] = _allowed(run, words)
    if "rng" in names:
        options["rng"] = run.opponent_rng

    # Ask it; whatever is wrong with its answer is raised in the program
    try:
        text = opponent(content, **options)
        _check_answer(run, text, words)
    except Exception as error:  # a user's function may raise anything
        run.refuse_question(error)
        return
    run.give_text(words.get(text.strip(), text))


def _allowed(run: ProgramRun, words: Mapping[str, str]) -> Sequence[str] | None:
    """Return the answers that a question allows, by default the environment's words; None if it allows all."""
    assert run.question is not None
    if run.question.allowed is None and words:
        return tuple(words.values())
    return run.question.allowed


def _check_answer(run: ProgramRun, text: object, words: Mapping[str, str]) -> None:
    """Raise a TypeError if an opponent's answer is no text, and a ValueError if the question does not allow it."""
    if not isinstance(text, str):
        raise TypeError(f"the opponent {run.opponent_name!r} returned {text!r:.200}, expected a text")
    allowed = _allowed(run, words)
    if allowed is not None and words.get(text.strip(), text) not in allowed:
        raise ValueError(f"the opponent {run.opponent_name!r} answered {text!r:.200}, expected one of {list(allowed)}")


def opponent_metrics(runs: Sequence[ProgramRun]) -> dict[str, float]:
    """Compute, for each opponent, what the policy has achieved against it.

    Returns:
        For each NAME ``opponents/NAME/games``; and of the games that have not failed ``…/return``, the policy's mean
        return, ``…/won``, the fraction in which it is higher than all others', and ``…/drawn``, equal to the highest.
    """
    runs_of: dict[str, list[ProgramRun]] = {}
    for run in runs:
        if run.opponent is not None:
            runs_of.setdefault(run.opponent_name, []).append(run)

    # By opponent: the policy's reward, beside the highest of the others
    metrics: dict[str, float] = {}
    for name, runs_of_opponent in runs_of.items():
        metrics[f"opponents/{name}/games"] = len(runs_of_opponent)
        returns = []
        won = []
        drawn = []
        for run in runs_of_opponent:
            rewards = run.rewards
            if rewards is None:
                continue
            [learner] = run.learners
            best_of_others = max(reward for agent, reward in enumerate(rewards) if agent != learner)
            returns.append(rewards[learner])
            won.append(rewards[learner] > best_of_others)
            drawn.append(rewards[learner] == best_of_others)
        if returns:
            metrics[f"opponents/{name}/return"] = float(np.mean(returns))
            metrics[f"opponents/{name}/won"] = float(np.mean(won))
            metrics[f"opponents/{name}/drawn"] = float(np.mean(drawn))
    return metrics


def with_names(opponents: object) -> dict[str, Any]:
    """Return the opponents of a list by name; a name that is there already gets a number.

    Raises:
        TypeError: if it is no list.
    """
    if isinstance(opponents, str) or not isinstance(opponents, Sequence):
        raise TypeError(f"opponents is {opponents!r:.200}, expected a list of opponents, or a mapping with their names")
    named: dict[str, Any] = {}
    for opponent in opponents:
        if opponent is None:
            name = SELF
        elif isinstance(opponent, str):
            name = opponent
        else:
            name = str(getattr(opponent, "__name__", type(opponent).__name__))
        unique_name = name
        while unique_name in named:
            unique_name = f"{name} {len(named) + 1}"
        named[unique_name] = opponent
    return named
