"""Arguments with which a reward function sees the training: ``step``, ``progress``, ``evaluating`` and ``log``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np

from textenv.rewards.scores import as_number, order_problem


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
