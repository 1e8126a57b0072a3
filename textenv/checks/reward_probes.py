"""Cheating completions, and the scores that a reward function gives them: known before training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from textenv.checks.trial import Row, Trial
from textenv.rewards.answer import answer_text

REPEATS = 64
"""Repetitions of the token in the completion that repeats one token."""
MAX_TOKENS = 256
"""Assumed maximum length of a completion."""
VERY_LONG = 2_000
"""Words of a completion far above it."""
PUNCTUATION = ". , ! ? ; : ... !!! --"


class Probe(NamedTuple):
    """Scores of one kind of completion, given to every prompt."""

    name: str
    answer: str
    """Completion of the first row."""
    mean: float | None
    """Over the rows to which the function applies; None if it applies to none, or raised."""
    highest: float | None
    note: str
    """Warning: the scores exceed those of ordinary completions, or the function raised; empty otherwise."""


def run_probes(trial: Trial, ordinary: Sequence[float], *, margin: float) -> list[Probe]:
    """Score each kind of completion on every prompt.

    Args:
        trial: function and rows.
        ordinary: finite scores of the unchanged rows.
        margin: tolerance for rounding.
    """
    return [_probe(trial, name, make(trial), ordinary, margin) for name, make in PROBES.items()]


def _probe(trial: Trial, name: str, rows: list[Row], ordinary: Sequence[float], margin: float) -> Probe:
    answer = rows[0].answer
    try:
        scores = [score for score in trial.scores(rows) if score is not None and math.isfinite(score)]
    except Exception as error:  # a user's function may raise anything; report it
        return Probe(name, answer, None, None, f"raised {type(error).__name__}: {error}")
    note = ""
    if scores and ordinary and fmean(scores) > fmean(ordinary) + margin:
        note = "earns more than ordinary answers on average"
    if scores and ordinary and max(scores) > max(ordinary) + margin:
        note = "earns more than the best ordinary answer"
    return Probe(name, answer, mean_of(scores), max(scores, default=None), note)


def mean_of(scores: Sequence[float]) -> float | None:
    """Return the mean, or None if there are no scores."""
    return fmean(scores) if scores else None


def long_answer(trial: Trial, words: int) -> str:
    """Concatenate ordinary completions, repeatedly, up to a number of words."""
    said = [word for row in trial.rows for word in row.answer.split()] or ["word"]
    return " ".join(itertools.islice(itertools.cycle(said), words))


def _longest_allowed(trial: Trial) -> str:
    text = long_answer(trial, MAX_TOKENS)
    if trial.tokenizer is None:
        return text
    return str(trial.tokenizer.decode(trial.ids(text)[:MAX_TOKENS]))


def _one_token(trial: Trial, row: Row) -> str:
    if trial.tokenizer is not None and (ids := trial.ids(row.answer)):
        return str(trial.tokenizer.decode(ids[:1] * REPEATS))
    return " ".join(row.answer.split()[:1] * REPEATS)


PROBES: dict[str, Callable[[Trial], list[Row]]] = {
    "empty": lambda trial: [row.saying("") for row in trial.rows],
    "only punctuation": lambda trial: [row.saying(PUNCTUATION) for row in trial.rows],
    "the prompt repeated": lambda trial: [
        row.saying(row.prompt if isinstance(row.prompt, str) else answer_text(row.prompt[-1:])) for row in trial.rows
    ],
    "another row's answer": lambda trial: [
        row.saying(other.answer, ended=other.ended)
        for row, other in zip(trial.rows, [*trial.rows[1:], trial.rows[0]], strict=True)
    ],
    "one token repeated": lambda trial: [row.saying(_one_token(trial, row), ended=False) for row in trial.rows],
    "the longest allowed": lambda trial: [row.saying(_longest_allowed(trial), ended=False) for row in trial.rows],
    "very long": lambda trial: [row.saying(long_answer(trial, VERY_LONG), ended=False) for row in trial.rows],
}
"""Kinds of completion by the name in the report."""
