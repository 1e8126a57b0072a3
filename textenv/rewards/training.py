"""Arguments with which a reward function sees the training: ``step``, ``progress``, ``evaluating`` and ``log``.

Functions of TRL's trainers see it by ``trainer_state``, ``log_metric`` and ``log_extra``, which are made of these.
"""

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from textenv.rewards.scores import as_number, order_problem

_warn_once = functools.cache(logging.getLogger(__name__).warning)


class RewardLog:
    """The argument ``log`` of a reward function, in a call with this many completions.

    ``log(name, value)`` reports numbers that do not count as reward: one for the batch, or a list with a number or None
    for each completion. Values that are logged several times under a name are averaged.

    Example:
        >>> log = RewardLog(2)
        >>> log("words", [3, 5]), log("words", [4, None]), log("limit", 8)
        (None, None, None)
        >>> log.columns()
        {'words': [3.5, 5.0], 'limit': [8.0, 8.0]}
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._logged: dict[str, list[np.ndarray]] = {}  # float64 [rows]; NaN for None

    def __call__(self, name: str, value: object) -> None:
        """Report a number or a list; ValueError unless it is finite, and has an entry for each completion."""
        # An entry for each completion
        if as_number(value) is None and isinstance(value, Iterable):
            entries = list(value)
        else:
            entries = [value] * self.rows
        column = np.array([as_number(entry) for entry in entries], float)

        # Each is a finite number or None
        num_finite = int(np.isfinite(column).sum())
        num_none = sum(entry is None for entry in entries)
        are_valid = len(entries) == self.rows and num_finite + num_none == len(entries)
        is_single_none = value is None
        if not isinstance(name, str) or not are_valid or is_single_none or order_problem(value):
            raise ValueError(
                f"log({name!r:.80}, ...) was given {value!r:.200} for {self.rows} completions, expected a name, and a "
                "finite number, or a list with a finite number or None for each completion"
            )
        self._logged.setdefault(name, []).append(column)

    def columns(self) -> dict[str, list[float | None]]:
        """Return the mean value for each completion, by name."""
        return {name: np.ma.masked_invalid(columns).mean(axis=0).tolist() for name, columns in self._logged.items()}


class Training(NamedTuple):
    """Point in a training."""

    step: int = 0
    """Steps (tokens) trained so far."""
    progress: float = 0.0
    """Fraction of the training, from 0 to 1."""
    evaluating: bool = False
    """True in an evaluation, which leaves the state of rewards as it was."""
    log: RewardLog | None = None
    """Log of the present call."""


NOW: ContextVar[Training] = ContextVar("training", default=Training())  # noqa: B039  (immutable)
"""Point in the training that a reward function sees when it is called now."""


@dataclass(frozen=True)
class TrainerState:
    """The point in the training for reward functions of TRL: its argument ``trainer_state``.

    Of the fields of ``transformers.TrainerState`` it has these two; others raise an AttributeError.
    """

    global_step: int
    """`Training.step`: steps (tokens) trained so far, where TRL counts optimizer steps."""
    max_steps: int
    """Steps of the whole training, so that ``global_step / max_steps`` is `Training.progress`; 1 before the first."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"trainer_state has no {name!r} here, but global_step (tokens trained so far) and max_steps: a "
                "schedule can be a function of global_step / max_steps, or of the argument progress"
            )


TRL_ARGUMENTS = ("trainer_state", "log_metric", "log_extra")
"""Arguments that TRL's GRPO and RLOO trainers give a reward function besides columns."""
TRAINING_ARGUMENTS = frozenset((*Training._fields, *TRL_ARGUMENTS))
"""All arguments besides columns and the tokenizer."""


def training_arguments(rows: int) -> dict[str, object]:
    """Return the present values of `TRAINING_ARGUMENTS`, for a call with this many completions."""
    now = NOW.get()
    log = now.log
    if log is None:  # outside `Rewards`, what is logged is only checked
        log = RewardLog(rows)
    max_steps = 1
    if now.progress > 0:
        max_steps = max(1, round(now.step / now.progress))
    return now._asdict() | {
        "log": log,
        "trainer_state": TrainerState(now.step, max_steps),
        "log_metric": functools.partial(_log_metric, log),
        "log_extra": functools.partial(_log_extra, log),
    }


def _log_metric(log: RewardLog, name: str, value: object) -> None:
    """Log a number of the batch, as TRL's ``log_metric``: NaN and infinity are left out of the mean."""
    number = as_number(value)
    if number is None:
        raise ValueError(f"log_metric({name!r:.80}, ...) was given {value!r:.200}, expected a name and a number")
    if math.isfinite(number):
        log(name, number)


def _log_extra(log: RewardLog, column: str, values: object) -> None:
    """Log a number for each completion, as TRL's ``log_extra``; other values are only counted, and not kept."""
    # The entries of a list, an array or a tensor
    entries = None
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping)) and not order_problem(values):
        entries = list(values)
    if entries is None or len(entries) != log.rows:
        raise ValueError(
            f"log_extra({column!r:.80}, ...) was given {values!r:.200} for {log.rows} completions, expected a name and "
            "a list with one value for each completion"
        )

    # Their numbers
    numbers = []
    for value in entries:
        number = as_number(value)
        if number is None and value is not None:
            _warn_once(
                "log_extra(%r, ...) logs values such as %.80r: samples.jsonl keeps numbers only, so they are not "
                "logged (the completions are)", column, repr(value),
            )  # fmt: skip
            return
        if number is not None and not math.isfinite(number):
            number = None
        numbers.append(number)
    log(column, numbers)


@contextmanager
def training(step: int, progress: float, log: RewardLog | None = None, *, evaluating: bool = False) -> Iterator[None]:
    """Context in which reward functions see this point in the training; `learn` sets it for each iteration."""
    token = NOW.set(Training(step, progress, evaluating, log))
    try:
        yield
    finally:
        NOW.reset(token)


@contextmanager
def evaluation() -> Iterator[None]:
    """Context in which reward functions see that an evaluation calls them, at the present point in the training."""
    now = NOW.get()
    with training(now.step, now.progress, now.log, evaluating=True):
        yield


def log_again(columns: Mapping[str, Sequence[float | None]]) -> None:
    """Log what an inner reward function logged in the log of the outer function's call; without one, do nothing."""
    log = NOW.get().log
    if log is None:
        return
    for name, column in columns.items():
        log(name, column)
