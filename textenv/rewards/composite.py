"""`Rewards`: weighted sum of one or several reward functions, with a time limit and a choice of error handling."""

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

import numpy as np

from textenv.device import move
from textenv.names import check_names
from textenv.rewards.calling import Returned, call_logged, is_async, line_of_error, reward_name
from textenv.rewards.scores import (
    RewardError,
    Rows,
    Score,
    Scores,
    StopTraining,
    add,
    merge,
    read_scores,
    shown,
    total,
)
from textenv.rewards.training import NOW
from textenv.rewards.transforms import depends_on_batch
from textenv.rewards.workers import ChildError, Workers, attempt, run_in_processes, run_in_threads
from textenv.state import stateful_objects

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

RewardFunction = Callable[..., object]
"""``f(prompts, completions, completion_ids=..., **columns) -> list[float | None]``, as in TRL's GRPO and RLOO."""

WeightedFunction = RewardFunction | tuple[RewardFunction, float]
"""A reward function, or one with its weight."""

RECENT_ROWS = 1000
"""Approximate number of most recent completions over which the fraction of failures is computed."""
NUM_TESTED_ALONE = 4
"""Number of completions that are scored one by one to test whether every completion of a batch fails. The test is made
once this many parts have failed and none has passed."""
MIN_ROWS_OF_FRACTION = 100
"""Minimum denominator of the fraction of failures, so that one failure among the first few completions is tolerated."""

PartResult = tuple[Rows, Scores | Exception]
"""Part of a batch, and its scores or the exception of the call."""
ScoredPart = tuple[Rows, Scores]
FailedPart = tuple[Rows, Exception]


class _AllFail(Exception):  # noqa: N818  (caught where it is raised)
    """Failure of every completion of a batch."""


class Rewards:
    """Weighted sum of reward functions; itself a reward function.

    Each function is called with the keywords in its signature, out of ``prompts``, ``completions``,
    ``completion_ids``, ``terminated`` (True if the policy ended the completion itself) and the prompts' further
    columns. It may be ``async``. It returns one entry per completion: a number, None (does not apply), a list of
    numbers (one per token), or a mapping from component to number. A completion to which no function applies is left
    out of the update, and counted. A function of weight 0 is only logged; if all are, every completion gets 0.

    A function is called once per batch or, with ``workers``, once per part. If it fails on n completions, it is called
    again with halves to find the one that fails, with about 2 log2(n) calls. If all completions seem to fail (four
    tested alone all fail), ``"skip"`` waits and calls the function once more with the whole batch. If that call fails
    too, its error is raised.

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
        ValueError: if there is no function, a weight is no finite number, or another number is outside its range.
        RewardError: when called, depending on ``on_error``.

    Example:
        >>> def short(completions): return [-float(len(text)) for text in completions]
        >>> def polite(completions): return [float("please" in text) for text in completions]
        >>> rewards = Rewards({"polite": polite, "short": (short, 0.5)})
        >>> rewards(prompts=["?"], completions=["please"], completion_ids=[[7]]).score
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
        if isinstance(functions, Mapping):
            for name in functions:
                if not isinstance(name, str):
                    raise TypeError(f"functions has the name {name!r:.100}, expected texts")
            self.several = True
            """True if components and logged numbers are named ``function/component``, else ``component``."""
            self.functions = {name: _with_weight(name, entry) for name, entry in functions.items()}
        else:
            self.several = False
            name = reward_name(functions)
            self.functions = {name: _with_weight(name, functions)}

        # Options
        if not self.functions:
            raise ValueError("functions is empty, expected at least one reward function")
        if on_error not in ("stop", "skip"):
            raise ValueError(f"on_error is {on_error!r}, expected 'stop' or 'skip'")
        if not (isinstance(max_failed, SupportsFloat) and 0 <= max_failed <= 1):
            raise ValueError(f"max_failed is {max_failed!r}, expected a fraction from 0 to 1")
        if not isinstance(workers, (int, np.integer)) or workers < 0:
            raise ValueError(f"workers is {workers!r}, expected an integer of at least 0")
        if timeout is not None and not (isinstance(timeout, SupportsFloat) and timeout > 0):
            raise ValueError(f"timeout is {timeout!r}, expected seconds above 0, or None")
        if not (isinstance(pause, SupportsFloat) and pause >= 0):
            raise ValueError(f"pause is {pause!r}, expected seconds of at least 0")

        # Functions that cannot be called with parts, or in another process
        self.by_batch = any(depends_on_batch(function) for function, _ in self.functions.values())
        """True if the score of a row depends on other rows."""
        if workers or processes or on_error == "skip":
            self._refuse_by_batch()
        if processes:
            self._refuse_stateful()

        self.on_error = on_error
        self.max_failed = max_failed
        self.timeout = timeout
        self.pause = pause
        self.workers = int(workers)
        self._processes: Workers | None = None
        if processes:
            self._processes = Workers(max(self.workers, 1))
        self.seen = 0
        """Number of completions so far."""
        self.failed = 0
        """Number of completions so far on which a function failed."""
        self._recent_counts: deque[tuple[int, int]] = deque()
        """Number of completions, and of those that failed, in each recent batch."""
        self._warned: set[str] = set()
        """Functions of which the log says that they fail on a batch, but on neither half of it."""
        self._last_error: RewardError | None = None
        self.__name__ = "+".join(self.functions)

    def __call__(self, /, *, tokenizer: "PreTrainedTokenizerBase | None" = None, **columns: Sequence[object]) -> Scores:
        """Score a batch; ``prompts`` and ``completions`` are required, other columns only if a function needs them."""
        # Rows have `completion_ids`, which are missing if this is called with texts only
        columns.setdefault("completion_ids", [[0]] * len(columns["completions"]))
        rows = Rows(columns, tokenizer=tokenizer)
        self.seen += len(rows)
        scores_by_name = self._scores_by_name(rows)

        # Rows on which a function failed; functions of weight 0 are only logged
        weighted_names = [name for name, (_, weight) in self.functions.items() if weight]
        failed_rows: set[int] = set()
        for name in weighted_names:
            failed_rows |= scores_by_name[name].failed
        self.failed += len(failed_rows)
        self._check_failures(len(rows), len(failed_rows))

        # Weighted sums
        sums: list[Score] = []
        for row in range(len(rows)):
            if row in failed_rows:
                sums.append(None)
                continue
            if not weighted_names:
                sums.append(0.0)  # where all functions are only logged, such as beside a KL penalty
                continue
            weighted_scores = []
            for name in weighted_names:
                _, weight = self.functions[name]
                weighted_scores.append(_times(scores_by_name[name].score[row], weight))
            sums.append(add(weighted_scores, rows.tokens(row)))

        # Numbers that the functions logged
        logged = {}
        for name, scores in scores_by_name.items():
            for key, column in scores.logged.items():
                logged[self._column_name(name, key)] = _without(failed_rows, column)

        return Scores(
            score=sums,
            parts=self._components(scores_by_name, failed_rows, weighted=True),
            raw=self._components(scores_by_name, failed_rows, weighted=False),
            failed=frozenset(failed_rows),
            logged=logged,
        )

    def state_dict(self) -> dict[str, object]:
        """Return the counts of failures. The functions' states are not in it: `textenv.state` finds them."""
        return {"seen": self.seen, "failed": self.failed, "recent": list(self._recent_counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.seen = int(state["seen"])
        self.failed = int(state["failed"])
        self._recent_counts = deque((int(rows), int(failed)) for rows, failed in state["recent"])

    def to(self, device: "torch.device") -> None:
        """Move the reward models among the functions to a device."""
        for function, _ in self.functions.values():
            move(function, device)

    def _refuse_by_batch(self) -> None:
        """Raise a ValueError if a function needs whole batches."""
        for name, (function, _) in self.functions.items():
            if depends_on_batch(function):
                raise ValueError(
                    f"reward {name!r} needs whole batches (Normalize, whiten), but workers, processes and "
                    "on_error='skip' pass parts: put it outside, as in Normalize(Rewards(f, workers=8))"
                )

    def _refuse_stateful(self) -> None:
        """Raise a ValueError if a function has a state, of which each process would change a copy."""
        for name, (function, _) in self.functions.items():
            if stateful_objects(function):
                raise ValueError(
                    f"reward {name!r} has a state (state_dict), but with processes=True each call gets a copy, whose "
                    "state is lost: use threads (processes=False), or keep the state outside, as in "
                    "Normalize(Rewards(f, processes=True))"
                )

    def _column_name(self, function_name: str, key: str) -> str:
        """Return the name of a column of a function: a component, or what it logged."""
        if self.several:
            return f"{function_name}/{key}"
        return key

    def _components(
        self, scores_by_name: Mapping[str, Scores], failed_rows: set[int], *, weighted: bool
    ) -> dict[str, list[float | None]]:
        """Return a column for each component: its values, or its contributions if ``weighted``.

        A function without components is a component itself. Failed rows have None.
        """
        columns: dict[str, list[float | None]] = {}
        for name, scores in scores_by_name.items():
            weight = 1.0
            components = scores.raw or scores.parts
            if weighted:
                _, weight = self.functions[name]
                components = scores.parts
            named = {self._column_name(name, key): column for key, column in components.items()}
            if not named:
                named[name] = [total(score) for score in scores.score]
            for key, column in named.items():
                if key in columns:
                    raise ValueError(f"two components of the reward have the name {key!r}: rename one of the functions")
                contributions = [None if value is None else value * weight for value in column]
                columns[key] = _without(failed_rows, contributions)
        return columns

    def _scores_by_name(self, rows: Rows) -> dict[str, Scores]:
        """Score a batch by each function in turn; the ``async`` ones run together, with the first of them."""
        parts = rows.cut(self.workers)
        concurrent_names = []
        if self._processes is None:
            concurrent_names = [name for name, (function, _) in self.functions.items() if is_async(function)]

        results_by_name: dict[str, list[Scores | Exception]] = {}
        scores_by_name: dict[str, Scores] = {}
        for name in self.functions:
            if name not in results_by_name:
                names = [name]
                if name in concurrent_names:
                    names = concurrent_names
                results_by_name |= self._run(names, parts)
            results = list(zip(parts, results_by_name[name], strict=True))
            scores_by_name[name] = self._merge_parts(name, rows, results)
        return scores_by_name

    def _merge_parts(self, name: str, rows: Rows, results: list[PartResult]) -> Scores:
        """Return a function's scores of the batch, after further calls if it failed on a part.

        Raises:
            RewardError: if it failed and ``on_error`` is ``"stop"``; or, with ``"skip"``, if all rows or too many rows
                fail.
        """
        try:
            scored, failed_rows = self._isolate_failures(name, rows, results)
            return _merged(rows, scored, failed_rows)
        except _AllFail as error:
            # Perhaps a service is down for a moment: wait, and call the whole batch once more
            log = logging.getLogger(__name__)
            log.warning("%s; all %d completions seem to fail: next call in %g s", error, len(rows), self.pause)
            time.sleep(self.pause)
            (result,) = self._run([name], [rows])[name]
            if isinstance(result, Exception):
                raise self._error(name, rows.part(0, 1), result) from result
            return _merged(rows, [(rows, result)])

    def _isolate_failures(self, name: str, rows: Rows, results: list[PartResult]) -> tuple[list[ScoredPart], set[int]]:
        """Halve the parts on which a function fails until each failing row is alone.

        If a part fails and neither half does, as with a service that fails at random, the scores of the halves count.

        Args:
            name: name of the function.
            rows: the batch.
            results: the function's result for each part of the batch.

        Returns:
            The parts that were scored, and the indices of the failed rows.

        Raises:
            _AllFail: if every row seems to fail, judged by calling a few of them alone.
            RewardError: if more than the allowed fraction fails, or as many parts of the batch; with
                ``on_error="stop"``, for the first failing row.
        """
        scored, failing = _separate(results)
        failed_rows: set[int] = set()
        was_tested = False
        while failing:
            first_part, first_error = failing[0]
            self._last_error = self._error(name, first_part, first_error)
            if self.on_error == "stop":
                # Halve only the first failing part, unless the error names the row already
                if len(first_part) <= 1 or isinstance(first_error, RewardError):
                    raise self._last_error from first_error
                failing = failing[:1]
            else:
                # If nothing passes, test whether every row fails
                if len(failing) >= NUM_TESTED_ALONE and not scored and not was_tested:
                    if self._fails_on_rows_alone(name, rows):
                        raise _AllFail(str(self._last_error))
                    was_tested = True

                # Stop early if this batch alone seems to exceed the limit: further calls may be slow
                num_failing = len(failed_rows) + len(failing)
                description = f"{num_failing} parts of this batch of {len(rows)} completions failed"
                self._check_limit(num_failing, max(len(rows), RECENT_ROWS), description)

            # A part of one row is a row that fails. Call the function with both halves of each longer part
            failed_rows |= {part.first for part, _ in failing if len(part) == 1}
            longer_parts = [(part, error) for part, error in failing if len(part) > 1]
            halves = [half for part, _ in longer_parts for half in part.cut(2)]
            half_results = list(zip(halves, self._run_each(name, halves), strict=True))

            # If neither half fails, the part failed because of the rows together, or by chance
            failing = []
            for number, (part, error) in enumerate(longer_parts):
                results_of_part = half_results[2 * number : 2 * number + 2]
                scored_halves, failing_halves = _separate(results_of_part)
                scored += scored_halves
                failing += failing_halves
                if not failing_halves:
                    description = (
                        f"{self._error(name, part, error)}, but on neither half of these {len(part)} completions: does "
                        "it depend on the batch, or fail at random? Use textenv.check_reward to find out"
                    )
                    if self.on_error == "stop":
                        raise RewardError(description) from error
                    if name not in self._warned:
                        logging.getLogger(__name__).warning("%s. The scores of the halves count", description)
                        self._warned.add(name)
        return scored, failed_rows

    def _fails_on_rows_alone(self, name: str, rows: Rows) -> bool:
        """Call a function with a few evenly spaced rows, each alone; True if it fails on all of them."""
        last_row = len(rows) - 1
        tested_rows = [i * last_row // (NUM_TESTED_ALONE - 1) for i in range(NUM_TESTED_ALONE)]
        results = self._run_each(name, [rows.part(row, row + 1) for row in tested_rows])
        return all(isinstance(result, Exception) for result in results)

    def _error(self, name: str, rows: Rows, error: Exception) -> RewardError:
        """Return the error to raise for a function's exception on these rows; it names the row if there is only one."""
        if isinstance(error, RewardError):
            return error
        if len(rows) == 1:
            where = rows.describe(0)
        else:
            where = f"one of the rows {rows.first} to {rows.first + len(rows) - 1}"
        kind = f"{type(error).__name__}: "
        if isinstance(error, ChildError):  # its text names the kind already
            kind = ""
        message = f"reward {name!r} raised {kind}{shown(error)} in {where}"
        line = line_of_error(error)
        if line:
            message += f" ({line})"
        return RewardError(message)

    def _check_failures(self, num_rows: int, num_failed: int) -> None:
        """Count a batch; raise a RewardError if too large a fraction of recent completions failed."""
        self._recent_counts.append((num_rows, num_failed))

        # Forget the oldest batches as long as the others are enough
        recent_rows = sum(rows for rows, _ in self._recent_counts)
        while len(self._recent_counts) > 1:
            oldest_rows, _ = self._recent_counts[0]
            if recent_rows - oldest_rows < RECENT_ROWS:
                break
            self._recent_counts.popleft()
            recent_rows -= oldest_rows

        recent_failed = sum(failed for _, failed in self._recent_counts)
        self._check_limit(recent_failed, recent_rows, f"{recent_failed} of the last {recent_rows} completions failed")

    def _check_limit(self, num_failed: int, num_rows: int, description: str) -> None:
        """Raise a RewardError, which begins with this description, if more than `max_failed` of the rows failed."""
        counted_rows = max(num_rows, MIN_ROWS_OF_FRACTION)
        if num_failed > self.max_failed * counted_rows:
            raise RewardError(
                f"{description}, more than {self.max_failed:.0%} of {counted_rows}; last error: {self._last_error}"
            ) from self._last_error

    def _run_each(self, name: str, parts: Sequence[Rows]) -> list[Scores | Exception]:
        """Like `_run`, but with processes one part at a time: a process that dies also ends concurrent calls."""
        if self._processes is None:
            return self._run([name], parts)[name]
        results: list[Scores | Exception] = []
        for part in parts:
            results += self._run([name], [part])[name]
        return results

    def _run(self, names: Sequence[str], parts: Sequence[Rows]) -> dict[str, list[Scores | Exception]]:
        """Call these functions with each part; return by name the scores or the exception for each part, in order.

        Raises:
            StopTraining: if a function raises it.
        """
        calls = []
        for name in names:
            function, _ = self.functions[name]
            for part in parts:
                arguments = (function, dict(part.columns), part.tokenizer, NOW.get())
                calls.append(functools.partial(call_logged, *arguments))

        # Threads only where calls are concurrent, or where a time limit must interrupt the wait for one
        concurrent = len(names) > 1 or (len(parts) > 1 and self.workers > 0)
        if self._processes is not None:
            outcomes = run_in_processes(self._processes, calls, self.timeout)
        elif concurrent or self.timeout is not None:
            outcomes = run_in_threads(calls, self.timeout)
        else:
            outcomes = [attempt(call) for call in calls]

        for outcome in outcomes:
            if isinstance(outcome, StopTraining):
                raise outcome

        # The calls were made function by function
        results_by_name: dict[str, list[Scores | Exception]] = {}
        remaining = iter(outcomes)
        for name in names:
            results_by_name[name] = [_read_outcome(next(remaining), part, name) for part in parts]
        return results_by_name


def _by_own_names(entries: Sequence[WeightedFunction]) -> dict[str, WeightedFunction]:
    """Return functions, or (function, weight), by the functions' names; later ones of a name are name_2, name_3, …"""
    if len(entries) == 2 and callable(entries[0]) and isinstance(entries[1], (int, float)):
        raise ValueError(f"functions is {entries!r:.200}, expected a list: give [(function, weight)]")
    named: dict[str, WeightedFunction] = {}
    for entry in entries:
        function = entry
        if isinstance(entry, tuple) and entry:
            function = entry[0]
        name = reward_name(function)
        number = 1
        unique_name = name
        while unique_name in named:
            number += 1
            unique_name = f"{name}_{number}"
        named[unique_name] = entry
    return named


def _with_weight(name: str, entry: Any) -> tuple[RewardFunction, float]:
    """Return a function and its weight, which is 1 if the entry is only a function."""
    function = entry
    weight = 1.0
    if isinstance(entry, tuple):
        if len(entry) != 2:
            raise ValueError(f"reward {name!r} is {entry!r}, expected a function or (function, weight)")
        function, weight = entry
    if not callable(function):
        raise TypeError(f"reward {name!r} is {function!r}, expected f(prompts, completions, **columns) or (f, weight)")
    if not (isinstance(weight, SupportsFloat) and math.isfinite(weight)):
        raise ValueError(f"the weight of reward {name!r} is {weight!r}, expected a finite number")
    return function, float(weight)


def _read_outcome(outcome: Returned | Exception, rows: Rows, name: str) -> Scores | Exception:
    """Read what a call of `call_logged` returned or raised: scores, or the exception of a failure."""
    if isinstance(outcome, Exception):
        return outcome
    returned, logged = outcome
    try:
        scores = read_scores(returned, rows, name=name)
    except RewardError as error:
        return error
    return replace(scores, logged={**scores.logged, **logged})


def _separate(results: Iterable[PartResult]) -> tuple[list[ScoredPart], list[FailedPart]]:
    """Separate the parts that were scored from those on which a function failed."""
    scored: list[ScoredPart] = []
    failing: list[FailedPart] = []
    for part, result in results:
        if isinstance(result, Exception):
            failing.append((part, result))
        else:
            scored.append((part, result))
    return scored, failing


def _merged(rows: Rows, scored: Iterable[ScoredPart], failed_rows: Iterable[int] = ()) -> Scores:
    """Merge the scores of parts of a batch."""
    pieces = [(range(part.first, part.first + len(part)), scores) for part, scores in scored]
    return merge(len(rows), pieces, failed_rows)


def _times(score: Score, weight: float) -> Score:
    """Return a score, a number or an array, times a weight; None stays None."""
    if score is None:
        return None
    return score * weight


def _without(failed_rows: set[int], column: Sequence[float | None]) -> list[float | None]:
    """Return a column with None in the failed rows."""
    return [None if row in failed_rows else value for row, value in enumerate(column)]
