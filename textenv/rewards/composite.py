"""`Rewards`: one or several reward functions with weights, called in order, in time, and with a choice on failure."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from textenv.rewards.calling import call_reward, reward_name
from textenv.rewards.workers import Workers, run_in_processes, run_in_threads
from textenv.scores import Earned, RewardError, Rows, Scores, StopTraining, add, read_scores, total

RewardFunction = Callable[..., Any]
"""``f(prompts, completions, completion_ids=..., **columns) -> list[float | None]``, as TRL's GRPO and RLOO take it."""

RECENT_ROWS = 1000
"""Failures are counted among about so many of the last answers."""
LEAST_ROWS = 100
"""Failures are counted against at least as many answers, so that one bad answer among the first few stops nothing."""


class Rewards:
    """Reward functions with weights; itself a reward function.

    A function is called with the keywords that it takes, out of ``prompts``, ``completions``, ``completion_ids``,
    ``terminated`` (whether the policy ended the answer itself) and the prompts' further columns. It may be ``async``.
    It returns one entry an answer: a number, None (does not apply), a list of numbers (one a token), or a mapping
    from component to number. An answer to which no function applies is left out of the update, and counted.

    Args:
        functions: a function, or name → function or (function, weight).
        on_error: ``"stop"`` raises what a function did wrong; ``"skip"`` leaves the answers on which it did out of the
            update and counts them.
        max_failed: with ``"skip"``, the share of answers that may fail before it raises all the same.
        timeout: seconds that a call may take; None waits for ever. A call in threads cannot be stopped and goes on
            unseen; one in processes is killed.
        workers: calls under way at a time, each with a part of the batch; 0 calls once, with the whole of it.
        processes: True calls in processes, for functions that compute in Python; they must be importable.

    Raises:
        ValueError: on no function, a weight that is not finite, or a share outside 0 to 1.
        RewardError: when called, as ``on_error`` says.

    Example:
        >>> def short(completions): return [-float(len(text)) for text in completions]
        >>> def polite(completions): return [float("please" in text) for text in completions]
        >>> rewards = Rewards({"polite": polite, "short": (short, 0.5)})
        >>> rewards(prompts=["?"], completions=["please"], completion_ids=[[7]]).earned
        [-2.0]
    """

    def __init__(
        self,
        functions: RewardFunction | Mapping[str, RewardFunction | tuple[RewardFunction, float]],
        *,
        on_error: Literal["stop", "skip"] = "stop",
        max_failed: float = 0.1,
        timeout: float | None = None,
        workers: int = 0,
        processes: bool = False,
    ) -> None:
        if isinstance(functions, (list, tuple)):
            raise ValueError("functions is a list, expected a mapping from names to functions or (function, weight)")
        self.several = isinstance(functions, Mapping)
        named = functions if isinstance(functions, Mapping) else {reward_name(functions): functions}
        self.functions = {name: _with_weight(name, entry) for name, entry in named.items()}
        if not self.functions:
            raise ValueError("functions is empty, expected at least one reward function")
        if on_error not in ("stop", "skip"):
            raise ValueError(f"on_error is {on_error!r}, expected 'stop' or 'skip'")
        if not 0 <= max_failed <= 1:
            raise ValueError(f"max_failed is {max_failed}, expected a share from 0 to 1")
        if not isinstance(workers, int) or workers < 0:
            raise ValueError(f"workers is {workers!r}, expected an integer of at least 0")
        alone = [name for name, (function, _) in self.functions.items() if getattr(function, "depends_on_batch", False)]
        if alone and (workers or processes or on_error == "skip"):
            raise ValueError(
                f"reward {alone[0]!r} looks at whole batches (Normalize, whiten), but is to be called with parts of "
                "them: put it outside, as in Normalize(Rewards(f, workers=8))"
            )
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout}, expected seconds above 0, or None")
        self.on_error, self.max_failed, self.timeout = on_error, max_failed, timeout
        self.workers, self._pool = workers, Workers(max(workers, 1)) if processes else None
        self.seen = self.failed = 0
        """Answers so far, and those on which a function failed."""
        self._recent: deque[tuple[int, int]] = deque()
        self._last_error: RewardError | None = None
        self.__name__ = "+".join(self.functions)

    def __call__(self, **columns: Any) -> Scores:
        """Score a batch; ``prompts`` and ``completions`` are needed, the others are those that the functions take."""
        columns.setdefault("completion_ids", [[0]] * len(columns["completions"]))
        rows = Rows(columns)
        self.seen += len(rows)
        found = {name: self._values(name, function, rows) for name, (function, _) in self.functions.items()}
        broken = {row for scores, bad in found.values() for row in (*bad, *scores.failed)}
        self.failed += len(broken)
        self._check_share(broken, rows)
        earned: list[Earned] = []
        for row in range(len(rows)):
            values = [_scaled(scores.earned[row], self.functions[name][1]) for name, (scores, _) in found.items()]
            earned.append(None if row in broken else add(values, rows.tokens(row)))
        return Scores(earned=earned, parts=self._parts(found, broken), failed=frozenset(broken))

    def _parts(self, found: Mapping[str, tuple[Scores, set[int]]], broken: set[int]) -> dict[str, list[float | None]]:
        """What each component added to each answer."""
        parts: dict[str, list[float | None]] = {}
        for name, (scores, _) in found.items():
            own = {f"{name}/{part}" if self.several else part: column for part, column in scores.parts.items()}
            for part, column in (own or {name: [total(value) for value in scores.earned]}).items():
                weighted = [_scaled(value, self.functions[name][1]) for value in column]
                parts[part] = [None if row in broken else total(value) for row, value in enumerate(weighted)]
        return parts

    def _values(self, name: str, function: RewardFunction, rows: Rows) -> tuple[Scores, set[int]]:
        """Scores by one function, and the rows on which it failed."""
        pieces = max(1, min(self.workers, len(rows)))
        cuts = [round(i * len(rows) / pieces) for i in range(pieces + 1)]
        parts = [rows.part(start, stop) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
        outcomes = self._run(name, function, parts)
        merged: list[Earned] = []
        inner: set[int] = set()
        columns: dict[str, list[float | None]] = {}
        broken: set[int] = set()
        for start, part, outcome in zip(cuts[:-1], parts, outcomes, strict=True):
            if isinstance(outcome, Exception):
                outcome, bad = self._one_by_one(name, function, part, outcome)
                broken |= {start + row for row in bad}
            merged += outcome.earned
            inner |= {start + row for row in outcome.failed}
            for key in outcome.parts:
                columns.setdefault(key, [None] * start)
            for key, column in columns.items():
                column += outcome.parts.get(key, [None] * len(part))
        return Scores(earned=merged, parts=columns, failed=frozenset(inner)), broken

    def _one_by_one(self, name: str, function: RewardFunction, rows: Rows, error: Exception) -> tuple[Scores, set[int]]:
        """Find the rows on which a function fails: stop at the first, or leave them out.

        Raises:
            RewardError: that names the row; with ``"skip"`` only if more than the share fail.
        """
        if self.on_error == "stop" and isinstance(error, RewardError):
            raise error
        earned: list[Earned] = []
        parts: dict[str, list[float | None]] = {}
        bad: set[int] = set()
        for row in range(len(rows)):
            (outcome,) = self._run(name, function, [rows.part(row, row + 1)]) if len(rows) > 1 else [error]
            if isinstance(outcome, Exception):
                bad.add(row)
                self._last_error = self._error(name, rows, row, outcome)
                if self.on_error == "stop":
                    raise self._last_error from outcome
                # A limit that this piece alone exceeds needs no more calls, which may take their time.
                self._check_limit(len(bad), max(len(rows), RECENT_ROWS))
                outcome = Scores(earned=[None])
            earned += outcome.earned
            for key, column in outcome.parts.items():
                parts.setdefault(key, [None] * len(rows))[row] = column[0]
        if not bad and self.on_error == "stop":
            raise RewardError(
                f"reward {name!r} failed on a batch of {len(rows)} answers ({error}), and on none of them alone: "
                "does it depend on the batch? textenv.check_reward tells"
            ) from error
        return Scores(earned=earned, parts=parts), bad

    def _error(self, name: str, rows: Rows, row: int, error: Exception) -> RewardError:
        if isinstance(error, RewardError):
            return error
        return RewardError(f"reward {name!r} raised {type(error).__name__}: {error} in {rows.describe(row)}")

    def _check_share(self, broken: set[int], rows: Rows) -> None:
        """Raise a RewardError if more than the share of the answers lately failed, this batch included."""
        self._recent.append((len(rows), len(broken)))
        while len(self._recent) > 1 and sum(n for n, _ in self._recent) - self._recent[0][0] >= RECENT_ROWS:
            self._recent.popleft()
        seen, failed = (sum(column) for column in zip(*self._recent, strict=True))
        self._check_limit(failed, seen)

    def _check_limit(self, failed: int, seen: int) -> None:
        if failed > self.max_failed * max(seen, LEAST_ROWS):
            raise RewardError(
                f"{failed} of the last {seen} answers failed, more than {self.max_failed:.0%}; "
                f"lately: {self._last_error}"
            ) from self._last_error

    def _run(self, name: str, function: RewardFunction, parts: Sequence[Rows]) -> list[Any]:
        """`Scores` or an exception for each part, in order."""
        calls = [functools.partial(call_reward, function, dict(part.columns)) for part in parts]
        if self._pool is not None:
            outcomes = run_in_processes(self._pool, calls, self.timeout)
        elif self.timeout is None and len(calls) == 1:
            outcomes = [_attempt(calls[0])]
        else:
            outcomes = run_in_threads(calls, self.timeout)
        for outcome in outcomes:
            if isinstance(outcome, StopTraining):
                raise outcome
        return [_read(outcome, part, name) for outcome, part in zip(outcomes, parts, strict=True)]


def _with_weight(name: str, entry: Any) -> tuple[RewardFunction, float]:
    if isinstance(entry, tuple) and len(entry) != 2:
        raise ValueError(f"reward {name!r} is {entry!r}, expected a function or (function, weight)")
    function, weight = entry if isinstance(entry, tuple) else (entry, 1.0)
    if not callable(function):
        raise TypeError(f"reward {name!r} is {function!r}, expected f(prompts, completions, **columns) or (f, weight)")
    if not math.isfinite(weight):
        raise ValueError(f"the weight of reward {name!r} is {weight}, expected a finite number")
    return function, float(weight)


def _attempt(call: Callable[[], Any]) -> Any:
    """What a call returned, or the exception."""
    try:
        return call()
    except Exception as error:  # a user's function may raise anything; `_one_by_one` says where
        return error


def _read(outcome: Any, rows: Rows, name: str) -> Any:
    if isinstance(outcome, Exception):
        return outcome
    try:
        return read_scores(outcome, rows, name=name)
    except RewardError as error:
        return error


def _scaled(value: Earned, weight: float) -> Earned:
    return None if value is None else value * weight
