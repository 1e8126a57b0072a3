"""`Rewards`: weighted sum of one or several reward functions, with a time limit and a choice of error handling."""

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from textenv.device import move
from textenv.names import check_names
from textenv.rewards.calling import call_logged, is_async, reward_name
from textenv.rewards.scores import RewardError, Rows, Scores, StopTraining, add, merge, read_scores, shown, total
from textenv.rewards.training import NOW
from textenv.rewards.transforms import depends_on_batch
from textenv.rewards.workers import ChildError, Workers, attempt, run_in_processes, run_in_threads
from textenv.state import stateful_objects

RewardFunction = Callable[..., Any]
"""``f(prompts, completions, completion_ids=..., **columns) -> list[float | None]``, as in TRL's GRPO and RLOO."""

WeightedFunction = RewardFunction | tuple[RewardFunction, float]
"""A reward function, or one with its weight."""

RECENT_ROWS = 1000
"""Approximate number of most recent completions over which the fraction of failures is computed."""
SAMPLE = 4
"""If this many parts fail and none passes, this many completions are scored alone, to test if the whole batch fails."""
LEAST_ROWS = 100
"""Minimum denominator of the fraction of failures, so that one failure among the first few completions is tolerated."""


class _AllFail(Exception):  # noqa: N818  (caught where it is raised)
    """Failure of every completion of a batch."""


class Rewards:
    """Weighted sum of reward functions; itself a reward function.

    Each function is called with the keywords in its signature, out of ``prompts``, ``completions``,
    ``completion_ids``, ``terminated`` (True if the policy ended the completion itself) and the prompts' further
    columns. It may be ``async``. It returns one entry per completion: a number, None (does not apply), a list of
    numbers (one per token), or a mapping from component to number. A completion to which no function applies is left
    out of the update, and counted. A function of weight 0 is only logged.

    A function is called once per batch or, with ``workers``, once per part. If it fails on n completions, it is called
    again with halves to find the one that fails: about 2 log2(n) calls for one completion. If all seem to fail (four
    tested alone all fail), ``"skip"`` waits, calls the whole batch once more, and stops if that call fails too.

    Args:
        functions: a function; a mapping from name to function or to (function, weight); or a list of functions and
            (function, weight), which get their own names.
        on_error: ``"stop"`` raises the function's error; ``"skip"`` leaves the completions that fail out of the
            update and counts them.
        max_failed: with ``"skip"``, the maximum fraction of failing completions; above it, the error is raised.
        timeout: time limit of a call in seconds; None for no limit. A late call in a thread cannot be stopped and
            continues in the background; in a process it is killed.
        workers: number of concurrent calls, each with a part of the batch; 0 makes one call with the whole batch.
        pause: with ``"skip"``, seconds to wait before repeating a call in which every completion failed.
        processes: True runs calls in processes, for CPU-bound Python functions; they must be importable.

    Raises:
        ValueError: if there is no function, a weight is not finite, or a fraction is outside 0 to 1.
        RewardError: when called, depending on ``on_error``.

    Example:
        >>> def short(completions): return [-float(len(text)) for text in completions]
        >>> def polite(completions): return [float("please" in text) for text in completions]
        >>> rewards = Rewards({"polite": polite, "short": (short, 0.5)})
        >>> rewards(prompts=["?"], completions=["please"], completion_ids=[[7]]).earned
        [-2.0]
    """

    @check_names
    def __init__(
        self,
        functions: RewardFunction | Mapping[str, WeightedFunction] | Sequence[WeightedFunction],
        *,
        on_error: Literal["stop", "skip"] = "stop",
        max_failed: float = 0.1,
        timeout: float | None = None,
        workers: int = 0,
        processes: bool = False,
        pause: float = 10.0,
    ) -> None:
        if isinstance(functions, (list, tuple)):
            functions = _by_own_names(functions)
        self.several = isinstance(functions, Mapping)
        named = functions if isinstance(functions, Mapping) else {reward_name(functions): functions}
        self.functions = {name: _with_weight(name, entry) for name, entry in named.items()}
        if not self.functions:
            raise ValueError("functions is empty, expected at least one reward function")
        if on_error not in ("stop", "skip"):
            raise ValueError(f"on_error is {on_error!r}, expected 'stop' or 'skip'")
        if not 0 <= max_failed <= 1:
            raise ValueError(f"max_failed is {max_failed}, expected a fraction from 0 to 1")
        if not isinstance(workers, (int, np.integer)) or workers < 0:
            raise ValueError(f"workers is {workers!r}, expected an integer of at least 0")
        alone = [name for name, (function, _) in self.functions.items() if depends_on_batch(function)]
        if alone and (workers or processes or on_error == "skip"):
            raise ValueError(
                f"reward {alone[0]!r} needs whole batches (Normalize, whiten), but workers, processes and "
                "on_error='skip' pass parts: put it outside, as in Normalize(Rewards(f, workers=8))"
            )
        kept = {name: stateful_objects(function) for name, (function, _) in self.functions.items()}
        if processes and any(kept.values()):
            name = next(name for name, objects in kept.items() if objects)
            raise ValueError(
                f"reward {name!r} has a state (state_dict), but with processes=True each call gets a copy, whose state "
                "is lost: use threads (processes=False), or keep the state outside, as in Normalize(Rewards(f, "
                "processes=True))"
            )
        self.by_batch = bool(alone)
        """True if the score of a row depends on other rows."""
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout}, expected seconds above 0, or None")
        if not pause >= 0:
            raise ValueError(f"pause is {pause}, expected seconds of at least 0")
        self.on_error, self.max_failed, self.timeout, self.pause = on_error, max_failed, timeout, pause
        self.workers, self._pool = int(workers), Workers(max(int(workers), 1)) if processes else None
        self.seen = self.failed = 0
        """Completions so far, and those on which a function failed."""
        self._recent: deque[tuple[int, int]] = deque()
        self._last_error: RewardError | None = None
        self.__name__ = "+".join(self.functions)

    def __call__(self, /, *, tokenizer: Any = None, **columns: Any) -> Scores:
        """Score a batch; ``prompts`` and ``completions`` are required, other columns only if a function needs them."""
        columns.setdefault("completion_ids", [[0]] * len(columns["completions"]))
        rows = Rows(columns, tokenizer=tokenizer)
        self.seen += len(rows)
        parts, found, outcomes = rows.cut(self.workers), dict[str, Scores](), dict[str, list[Any]]()
        at_once = [name for name, (function, _) in self.functions.items() if is_async(function) and not self._pool]
        for name in self.functions:
            if name not in outcomes:
                outcomes |= self._run(at_once if name in at_once else [name], parts)
            found[name] = self._values(name, rows, list(zip(parts, outcomes[name], strict=True)))
        counted = [name for name, (_, weight) in self.functions.items() if weight]  # the others are only logged
        broken = {row for name in counted for row in found[name].failed}
        self.failed += len(broken)
        self._check_share(broken, rows)
        earned = []
        for row in range(len(rows)):
            values = [_scaled(found[name].earned[row], self.functions[name][1]) for name in counted]
            earned.append(None if row in broken else add(values, rows.tokens(row)))
        named, raw = (self._columns(found, broken, weighted=weighted) for weighted in (True, False))
        logged = {
            f"{name}/{key}" if self.several else key: [None if row in broken else x for row, x in enumerate(column)]
            for name, scores in found.items()
            for key, column in scores.logged.items()
        }
        return Scores(earned=earned, parts=named, raw=raw, failed=frozenset(broken), logged=logged)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of failures; the states of the functions are their own (`textenv.state`)."""
        return {"seen": self.seen, "failed": self.failed, "recent": list(self._recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.seen = int(state["seen"])
        self.failed = int(state["failed"])
        self._recent = deque((int(rows), int(failed)) for rows, failed in state["recent"])

    def to(self, device: Any) -> None:
        """Move the reward models among the functions to a device."""
        for function, _ in self.functions.values():
            move(function, device)

    def _columns(self, found: Mapping[str, Scores], broken: set[int], *, weighted: bool) -> dict[str, list[Any]]:
        """Return each component's contribution to each completion, or its value before the weight; None if broken."""
        columns: dict[str, list[Any]] = {}
        for name, scores in found.items():
            inner = scores.parts if weighted else scores.raw or scores.parts
            own = {f"{name}/{part}" if self.several else part: column for part, column in inner.items()}
            weight = self.functions[name][1] if weighted else 1.0
            for part, column in (own or {name: [total(value) for value in scores.earned]}).items():
                scaled = (total(_scaled(value, weight)) for value in column)
                columns[part] = [None if row in broken else value for row, value in enumerate(scaled)]
        return columns

    def _values(self, name: str, rows: Rows, outcomes: list[tuple[Rows, Any]]) -> Scores:
        """Return the scores by one function, given its result or exception for each part."""
        first = next((entry for entry in outcomes if isinstance(entry[1], Exception)), None)
        if first is None:
            return _merged(rows, outcomes)
        if self.on_error == "stop":
            raise self._find_first(name, *first) from first[1]
        try:
            return _merged(rows, *self._divide(name, rows, outcomes))
        except _AllFail as error:
            log = logging.getLogger(__name__)
            log.warning("%s; all %d completions seem to fail: next call in %g s", error, len(rows), self.pause)
            time.sleep(self.pause)
            (again,) = self._run([name], [rows])[name]
            if isinstance(again, Exception):
                raise self._error(name, rows.part(0, 1), again) from again
            return _merged(rows, [(rows, again)])

    def _find_first(self, name: str, part: Rows, error: Exception) -> RewardError:
        """Return the error that names the first failing row, found by halving the part on which the function failed."""
        while len(part) > 1 and not isinstance(error, RewardError):
            for half in part.cut(2):
                (outcome,) = self._run([name], [half])[name]
                if isinstance(outcome, Exception):
                    part, error = half, outcome
                    break
            else:
                return RewardError(
                    f"reward {name!r} failed on {len(part)} completions ({error}), but on neither half: does it "
                    "depend on the batch, or fail at random? Use textenv.check_reward to find out"
                )
        return self._error(name, part, error)

    def _divide(
        self, name: str, rows: Rows, outcomes: list[tuple[Rows, Any]]
    ) -> tuple[list[tuple[Rows, Any]], set[int]]:
        """Halve the parts on which a function fails until each failing row is alone; return scored parts and bad rows.

        If a part fails and neither half does, all of its rows count as failed, since the row at fault is unknown.

        Raises:
            _AllFail: if every row seems to fail, judged by calling a few of them alone.
            RewardError: if more than the allowed fraction fails.
        """
        scored: list[tuple[Rows, Any]] = []
        bad: set[int] = set()
        some_pass = False
        while failing := [entry for entry in outcomes if isinstance(entry[1], Exception)]:
            scored += [entry for entry in outcomes if not isinstance(entry[1], Exception)]
            self._last_error = self._error(name, *failing[0])
            if len(failing) >= SAMPLE and not (scored or some_pass):
                spread = [row * (len(rows) - 1) // (SAMPLE - 1) for row in range(SAMPLE)]
                alone = self._run_each(name, [rows.part(row, row + 1) for row in spread])
                if all(isinstance(outcome, Exception) for outcome in alone):
                    raise _AllFail(str(self._last_error))
                some_pass = True
            # Stop early if this batch alone exceeds the limit: further calls may be slow.
            self._check_limit(len(bad) + len(failing), max(len(rows), RECENT_ROWS))
            bad |= {part.first for part, _ in failing if len(part) == 1}
            several = [part for part, _ in failing if len(part) > 1]
            halves = [half for part in several for half in part.cut(2)]
            found = list(zip(halves, self._run_each(name, halves), strict=True))
            outcomes = []
            for part, *both in zip(several, found[::2], found[1::2], strict=True):
                if any(isinstance(outcome, Exception) for _, outcome in both):
                    outcomes += both
                else:
                    bad |= {part.first + row for row in range(len(part))}
        return scored + outcomes, bad

    def _run_each(self, name: str, parts: Sequence[Rows]) -> list[Any]:
        """Like `_run`, but with processes one part at a time: a process that dies also ends concurrent calls."""
        if self._pool is None:
            return self._run([name], parts)[name]
        return [outcome for part in parts for outcome in self._run([name], [part])[name]]

    def _error(self, name: str, rows: Rows, error: Exception) -> RewardError:
        if isinstance(error, RewardError):
            return error
        where = rows.describe(0) if len(rows) == 1 else f"one of the rows {rows.first} to {rows.first + len(rows) - 1}"
        kind = "" if isinstance(error, ChildError) else f"{type(error).__name__}: "
        return RewardError(f"reward {name!r} raised {kind}{shown(error)} in {where}")

    def _check_share(self, broken: set[int], rows: Rows) -> None:
        """Raise a RewardError if too large a fraction of recent completions failed, this batch included."""
        self._recent.append((len(rows), len(broken)))
        while len(self._recent) > 1 and sum(n for n, _ in self._recent) - self._recent[0][0] >= RECENT_ROWS:
            self._recent.popleft()
        seen, failed = (sum(column) for column in zip(*self._recent, strict=True))
        self._check_limit(failed, seen)

    def _check_limit(self, failed: int, seen: int) -> None:
        if failed > self.max_failed * max(seen, LEAST_ROWS):
            raise RewardError(
                f"{failed} of the last {seen} completions failed, more than {self.max_failed:.0%}; "
                f"last error: {self._last_error}"
            ) from self._last_error

    def _run(self, names: Sequence[str], parts: Sequence[Rows]) -> dict[str, list[Any]]:
        """Call these functions, several at once; return by name `Scores` or an exception for each part, in order."""
        calls = [
            functools.partial(call_logged, self.functions[name][0], dict(part.columns), part.tokenizer, NOW.get())
            for name in names
            for part in parts
        ]
        if self._pool is not None:
            outcomes = run_in_processes(self._pool, calls, self.timeout)
        elif self.timeout is None and len(names) == 1 and (len(parts) == 1 or not self.workers):
            outcomes = [attempt(call) for call in calls]
        else:
            outcomes = run_in_threads(calls, self.timeout)
        for outcome in outcomes:
            if isinstance(outcome, StopTraining):
                raise outcome
        in_order = iter(outcomes)
        return {name: [_checked(next(in_order), part, name) for part in parts] for name in names}


def _by_own_names(entries: Sequence[WeightedFunction]) -> dict[str, WeightedFunction]:
    """Return functions, or (function, weight), by the functions' names; later ones of a name are name_2, name_3, …"""
    if len(entries) == 2 and callable(entries[0]) and isinstance(entries[1], (int, float)):
        raise ValueError(f"functions is {entries!r:.200}, expected a list: give [(function, weight)]")
    named: dict[str, WeightedFunction] = {}
    for entry in entries:
        function = entry[0] if isinstance(entry, tuple) and entry else entry
        name = reward_name(function)
        number = 1
        unique = name
        while unique in named:
            number += 1
            unique = f"{name}_{number}"
        named[unique] = entry
    return named


def _with_weight(name: str, entry: Any) -> tuple[RewardFunction, float]:
    if isinstance(entry, tuple) and len(entry) != 2:
        raise ValueError(f"reward {name!r} is {entry!r}, expected a function or (function, weight)")
    function, weight = entry if isinstance(entry, tuple) else (entry, 1.0)
    if not callable(function):
        raise TypeError(f"reward {name!r} is {function!r}, expected f(prompts, completions, **columns) or (f, weight)")
    if not math.isfinite(weight):
        raise ValueError(f"the weight of reward {name!r} is {weight}, expected a finite number")
    return function, float(weight)


def _checked(outcome: Any, rows: Rows, name: str) -> Scores | Exception:
    if isinstance(outcome, Exception):
        return outcome
    returned, logged = outcome
    try:
        scores = read_scores(returned, rows, name=name)
        return replace(scores, logged={**scores.logged, **logged})
    except RewardError as error:
        return error


def _merged(rows: Rows, outcomes: Iterable[tuple[Rows, Scores]], failed: Iterable[int] = ()) -> Scores:
    pieces = ((range(part.first, part.first + len(part)), scores) for part, scores in outcomes)
    return merge(len(rows), pieces, failed)


def _scaled(value: Any, weight: float) -> Any:
    return None if value is None else value * weight
