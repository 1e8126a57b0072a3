"""Scores of a batch of completions: parsed from a reward function's return value, and checked."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from textenv.prompts.prompts import by_position
from textenv.rendering import printable

MAX_REWARD = float(np.finfo(np.float32).max)
"""Largest absolute value of a reward: the largest float32."""
MOST = 1_000
"""Maximum number of characters shown of an exception's text."""
Earned = float | np.ndarray | None
"""Reward of a completion: one number, float32 ``[tokens]``, or None if no function applies."""


class RewardError(ValueError):
    """Violation of a reward function's contract; names the function, the row, the prompt and the value."""

    answers: Sequence[Mapping[str, Any]] = ()
    """Completions of the failing batch, each with all columns that a reward function receives."""


def shown(error: BaseException) -> str:
    """Return an exception's text for a terminal or log: escaped, and truncated to 1,000 characters."""
    text = str(error)
    return printable(text[:MOST]) + (f"... ({len(text):,} characters)" if len(text) > MOST else "")


class StopTraining(Exception):  # noqa: N818  (a request, not an error)
    """Raised by a reward function to end training; it does not count as a failure, so it is never skipped."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of n completions, and of their components."""

    earned: list[Earned]
    """Total score: a number, float32 ``[tokens]``, or None for a completion that is left out of the update."""
    parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """By component name: its contribution to each completion, weight included; None where it does not apply."""
    raw: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """The same before the weight."""
    failed: frozenset[int] = frozenset()
    """Rows on which a function failed; they are left out of the update."""
    logged: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """By name: numbers that a function gave to its argument ``log``, which are not paid; one per completion or None."""


def reward_parts(scores: Scores, rows: Sequence[int], *, episodes: int) -> np.ndarray:
    """Each reward before its weight, summed over an episode's turns, and its weight: float32 ``[episodes, K, 2]``.

    Both are 0 where a reward does not apply; ``rows`` has the episode of each turn.
    """
    found = np.zeros((episodes, len(scores.parts), 2), dtype=np.float32)
    for k, (name, paid) in enumerate(scores.parts.items()):
        columns = zip(rows, (scores.raw or scores.parts)[name], paid, strict=True)
        given = [(row, x, y) for row, x, y in columns if x is not None and y is not None]
        weight = max(((abs(x), y / x) for _, x, y in given if x), default=(0.0, 0.0))[1]  # 0 for rewards that are all 0
        for row, x, _ in given:
            found[row, k] = found[row, k, 0] + x, weight
    return found


def merge(count: int, pieces: Iterable[tuple[Sequence[int], Scores]], failed: Iterable[int] = ()) -> Scores:
    """Merge the scores of pieces of a batch, given with the rows that each covers; None for rows that none covers."""
    earned: list[Earned] = [None] * count
    parts: dict[str, list[Any]] = {}
    raw: dict[str, list[Any]] = {}
    logged: dict[str, list[Any]] = {}
    failed = set(failed)
    for rows, scores in pieces:
        failed |= {rows[row] for row in scores.failed}
        wholes = ({"": earned}, {"": scores.earned}), (parts, scores.parts), (raw, scores.raw), (logged, scores.logged)
        for whole, columns in wholes:
            for key, column in columns.items():
                merged = whole.setdefault(key, [None] * count)
                for row, value in zip(rows, column, strict=True):
                    merged[row] = value
    return Scores(earned=earned, parts=parts, raw=raw, failed=frozenset(failed), logged=logged)


def read_scores(returned: Any, rows: Rows, *, name: str, finite: bool = True) -> Scores:
    """Parse a reward function's return value for a batch.

    Args:
        returned: one entry per completion, in order: a number, None, a list of numbers (one per token), or a
            mapping from component to one of these; or one mapping from component to a list of these entries.
        rows: the batch.
        name: name of the function.
        finite: False accepts NaN, infinities and values beyond float32, so that the caller can report them.

    Raises:
        RewardError: on a wrong count, an entry of another type, or one that is not finite.
    """
    check = partial(check_count, expected=len(rows), name=f"reward {name!r}", item="number", error=RewardError)
    if isinstance(returned, Scores):
        for column in (returned.earned, *returned.parts.values(), *returned.raw.values(), *returned.logged.values()):
            check(column)
        entries = [_read_entry(entry, rows, row, name, finite) for row, entry in enumerate(returned.earned)]
        columns: dict[str, Any] = {}
        for kind in ("parts", "raw", "logged"):
            given: Mapping[str, Sequence[Any]] = getattr(returned, kind)
            columns[kind] = {part: _read_numbers(column, name=f"{name}/{part}") for part, column in given.items()}
        return replace(returned, earned=entries, **columns)
    if isinstance(returned, Mapping):
        for column in returned.values():
            check(column)
        returned = [dict(zip(returned, entries, strict=True)) for entries in zip(*returned.values(), strict=True)]
    check(returned)
    earned: list[Earned] = []
    parts: dict[str, list[float | None]] = {}
    for row, entry in enumerate(returned):
        if not isinstance(entry, Mapping):
            earned.append(_read_entry(entry, rows, row, name, finite))
            continue
        named = {str(part): _read_entry(value, rows, row, f"{name}/{part}", finite) for part, value in entry.items()}
        for part, value in named.items():
            parts.setdefault(part, [None] * len(rows))[row] = total(value)
        earned.append(add(list(named.values()), rows.tokens(row)))
    return Scores(earned=earned, parts=parts)


def add(values: Sequence[Earned], tokens: int) -> Earned:
    """Add the values of several functions; if one is per token, single numbers go to the last of the ``tokens``."""
    given = [value for value in values if value is not None]
    if not given:
        return None
    if not tokens or not any(isinstance(value, np.ndarray) for value in given):
        return float(sum(total(value) or 0.0 for value in given))
    dense = np.zeros(tokens, dtype=np.float32)
    for value in given:
        if isinstance(value, np.ndarray):
            dense += value
        else:
            dense[-1] += value
    return dense


def total(value: Earned) -> float | None:
    """Return the sum over a completion's tokens."""
    return float(value.sum()) if isinstance(value, np.ndarray) else value


class Rows:
    """A batch of completions as a reward function receives it: columns by name, one entry per completion.

    Args:
        columns: ``prompts``, ``completions``, ``prompt_ids``, ``completion_ids``, ``terminated``, and the prompts' own.
        first: index of the first row, if this is part of a larger batch.
        tokenizer: tokenizer of the ids, if known.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]], *, first: int = 0, tokenizer: Any = None) -> None:
        self.columns = {name: by_position(column) for name, column in columns.items()}
        self.first = first
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.columns["completions"] if "completions" in self.columns else next(iter(self.columns.values())))

    def tokens(self, row: int) -> int:
        """Return the number of tokens of a completion."""
        return len(self.columns["completion_ids"][row])

    def part(self, start: int, stop: int) -> Rows:
        """Return rows ``start`` to ``stop``."""
        columns = {name: column[start:stop] for name, column in self.columns.items()}
        return Rows(columns, first=self.first + start, tokenizer=self.tokenizer)

    def cut(self, pieces: int) -> list[Rows]:
        """Return this number of parts of about the same length; if there are fewer rows, one part for each."""
        pieces = max(1, min(pieces, len(self)))
        cuts = [i * len(self) // pieces for i in range(pieces + 1)]
        return [self.part(start, stop) for start, stop in itertools.pairwise(cuts)]

    def describe(self, row: int) -> str:
        """Return a description of a row for an error."""
        told = {"prompt": self.columns.get("prompts"), "completion": self.columns.get("completions")}
        given = [f"{name} {column[row]!r:.300}" for name, column in told.items() if column is not None]
        return f"row {self.first + row} ({', '.join(given)})"


def as_number(entry: Any) -> float | None:
    """Return an entry as a number (finite or not; also a tensor of one element); None if it is not a number."""
    # Reject what Python would convert: text of digits, complex numbers (to their real part), masked entries (to NaN).
    is_complex = isinstance(entry, (np.generic, np.ndarray)) and entry.dtype.kind == "c"
    if isinstance(entry, (str, bytes, bytearray)) or is_complex or np.ma.is_masked(entry):
        return None
    try:
        return float(entry)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a list, an object, an integer too large for a float
        return None


def is_tensor(value: Any) -> bool:
    """Return True for a tensor, without importing torch: if torch is not imported, there are none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def check_count(returned: Any, expected: int, *, name: str, item: str, error: type[ValueError] = ValueError) -> None:
    """Raise unless there is one item for each completion, in their order."""
    advice = f"return a list with one {item} for each"
    try:
        count = None if isinstance(returned, (str, bytes, bytearray)) else len(returned)
    except TypeError:  # a number, an iterator, an array without dimensions
        count = None
    if count != expected:
        given = f"{returned!r:.200}" if count is None else f"{count} values"
        raise error(f"{name} returned {given} for {expected} completions: {advice}")
    if problem := order_problem(returned):
        raise error(f"{name} returned {problem}: {advice}, in their order")


def order_problem(values: Any) -> str:
    """Say why the order of a container is not that of the completions; return an empty text if it may be."""
    if isinstance(values, Set):
        return f"a {type(values).__name__}, which has no order"
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return ""
    if isinstance(values, pandas.DataFrame):
        return "a DataFrame, whose entries are names of columns"
    if isinstance(values, pandas.Series):
        labels = values.index.tolist()
        if not pandas.api.types.is_integer_dtype(values.index) or labels != sorted(labels):
            return (
                f"a Series with the index {labels!r:.80}, which does not show its order (if it is right, return "
                ".tolist(); after a sort, undo it by .sort_index())"
            )
    return ""


def _read_entry(entry: Any, rows: Rows, row: int, name: str, finite: bool) -> Earned:
    """Return one entry as a number, float32 ``[tokens]``, or None."""
    if entry is None:
        return None
    if is_tensor(entry) and not entry.is_complex():
        with suppress(RuntimeError, TypeError):  # on the meta device, sparse
            entry = entry.detach().float().cpu().numpy()
    dense = _values_per_token(entry)
    if dense is not None:
        if len(dense) != rows.tokens(row):
            raise RewardError(
                f"reward {name!r} returned {len(dense)} numbers for {rows.describe(row)}, which has {rows.tokens(row)} "
                "tokens: return one per token, or one for the whole completion"
                + (" (scores of shape [B, 1]: .squeeze(-1))" if len(dense) == 1 else "")
            )
        if dense.dtype.kind == "O":  # of Decimal, Fraction, tensors of one element
            numbers = [as_number(x) for x in dense]
            dense = dense if None in numbers else np.array(numbers, dtype=np.float64)
        is_real = dense.dtype.kind in "biuf" and not np.ma.is_masked(entry)
        if is_real and (not finite or (np.abs(dense) <= MAX_REWARD).all()):
            with np.errstate(over="ignore"):  # overflow to infinity, which the caller reports
                return dense.astype(np.float32)
    else:
        number = as_number(entry)
        if number is not None and (not finite or abs(number) <= MAX_REWARD):
            return number
    expected = "expected a finite number, or None where the reward does not apply"
    raise RewardError(f"reward {name!r} returned {entry!r:.200} for {rows.describe(row)}: {expected}")


def _values_per_token(entry: Any) -> np.ndarray | None:
    """Return the values of a list, an array or a Series; None for an entry that cannot have one number per token."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(entry, pandas.Series):
        entry = entry.to_numpy()
    if isinstance(entry, np.ndarray):
        return entry if entry.ndim == 1 else None
    if not isinstance(entry, Sequence) or isinstance(entry, (str, bytes, bytearray)):
        return None
    if any(isinstance(x, Sized) and as_number(x) is None for x in entry):  # a list of lists
        return None
    if any(is_tensor(x) for x in entry):  # NumPy does not read bfloat16
        return np.array([as_number(x) for x in entry], dtype=object)
    return np.asarray(entry)


def _read_numbers(column: Iterable[Any], *, name: str) -> list[float | None]:
    """Return a column of `Scores` as numbers, which JSON can hold, and None."""
    numbers = [as_number(entry) for entry in column]
    for row, (entry, number) in enumerate(zip(column, numbers, strict=True)):
        if number is None and entry is not None:
            raise RewardError(f"reward {name!r} has {entry!r:.200} for row {row}: expected a number or None")
    return numbers
