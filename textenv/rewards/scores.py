"""Scores of a batch of completions: parsed from a reward function's return value, and checked."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np

from textenv.names import NamedFields, no_attribute
from textenv.prompts.prompts import by_position
from textenv.rendering import printable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

MAX_REWARD = float(np.finfo(np.float32).max)
"""Largest absolute value of a reward: the largest float32."""
MAX_SHOWN_CHARACTERS = 1_000
"""Maximum number of characters shown of an exception's text."""
Score = float | np.ndarray | None
"""Reward of a completion: one number, float32 ``[tokens]``, or None if no function applies."""


class RewardError(ValueError):
    """Violation of a reward function's contract; names the function, the row, the prompt and the value."""

    answers: Sequence[Mapping[str, object]] = ()
    """Completions of the failing batch, each with all columns that a reward function receives."""


def shown(error: BaseException) -> str:
    """Return an exception's text for a terminal or log: escaped, and truncated to 1,000 characters."""
    text = str(error)
    beginning = printable(text[:MAX_SHOWN_CHARACTERS])
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return beginning
    return f"{beginning}... ({len(text):,} characters)"


class StopTraining(Exception):  # noqa: N818  (a request, not an error)
    """Raised by a reward function to end training; it does not count as a failure, so it is never skipped."""


@dataclass(frozen=True, kw_only=True)
class Scores(NamedFields):
    """Scores of n completions, and of their components."""

    score: list[Score]
    """Total score: a number, float32 ``[tokens]``, or None for a completion that is left out of the update."""
    parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """By component name: its contribution to each completion, weight included; None where it does not apply."""
    raw: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """The same before the weight."""
    failed: frozenset[int] = frozenset()
    """Rows on which a function failed; they are left out of the update."""
    logged: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """By name: numbers that a function logged by its argument ``log``, one per completion or None. They are no part of
    the reward."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise no_attribute(self, name)


def reward_parts(scores: Scores, rows: Sequence[int], *, episodes: int) -> np.ndarray:
    """Sum each of K rewards, unweighted, over the turns of each episode.

    Args:
        scores: scores of all turns; their components are the K rewards.
        rows: index of the episode of each turn.
        episodes: number of episodes.

    Returns:
        float32 ``[episodes, K, 2]``: the sum, and the weight. Both are 0 where a reward does not apply.
    """
    sums_and_weights = np.zeros((episodes, len(scores.parts), 2), dtype=np.float32)
    raw_columns = scores.raw or scores.parts
    for k, (name, contributions) in enumerate(scores.parts.items()):
        turns = []
        for episode, raw_score, contribution in zip(rows, raw_columns[name], contributions, strict=True):
            if raw_score is not None and contribution is not None:
                turns.append((episode, raw_score, contribution))

        # The weight is the same in all turns, up to rounding: take that of the largest score
        scores_with_weight = [(abs(raw), contribution / raw) for _, raw, contribution in turns if raw]
        _, weight = max(scores_with_weight, default=(0.0, 0.0))  # 0 if all scores are 0

        for episode, raw_score, _ in turns:
            sums_and_weights[episode, k, 0] += raw_score
            sums_and_weights[episode, k, 1] = weight
    return sums_and_weights


def merge(count: int, pieces: Iterable[tuple[Sequence[int], Scores]], failed: Iterable[int] = ()) -> Scores:
    """Merge the scores of pieces of a batch.

    Args:
        count: number of rows of the batch.
        pieces: the rows that each piece covers, and their scores.
        failed: further rows on which a function failed.

    Returns:
        The scores of the batch, with None in rows that no piece covers.
    """
    scores_of_rows: list[Score] = [None] * count
    parts: dict[str, list[float | None]] = {}
    raw: dict[str, list[float | None]] = {}
    logged: dict[str, list[float | None]] = {}
    failed_rows = set(failed)
    for rows, scores in pieces:
        failed_rows |= {rows[row] for row in scores.failed}
        _write_rows(scores_of_rows, rows, scores.score)
        for merged, columns in ((parts, scores.parts), (raw, scores.raw), (logged, scores.logged)):
            for name, column in columns.items():
                merged_column = merged.setdefault(name, [None] * count)
                _write_rows(merged_column, rows, column)
    return Scores(score=scores_of_rows, parts=parts, raw=raw, failed=frozenset(failed_rows), logged=logged)


def _write_rows(merged: list[T], rows: Sequence[int], column: Sequence[T]) -> None:
    """Write the entries of a piece into these rows of a column of the batch."""
    for row, value in zip(rows, column, strict=True):
        merged[row] = value


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

    # Scores, as by `Rewards`
    if isinstance(returned, Scores):
        for column in (returned.score, *returned.parts.values(), *returned.raw.values(), *returned.logged.values()):
            check(column)
        return replace(
            returned,
            score=[_read_entry(entry, rows, row, name, finite) for row, entry in enumerate(returned.score)],
            parts=_read_columns(returned.parts, name),
            raw=_read_columns(returned.raw, name),
            logged=_read_columns(returned.logged, name),
        )

    # A column for each component becomes a mapping for each completion
    if isinstance(returned, Mapping):
        for column in returned.values():
            check(column)
        rows_of_columns = zip(*returned.values(), strict=True)
        returned = [dict(zip(returned, entries, strict=True)) for entries in rows_of_columns]

    # An entry for each completion
    check(returned)
    scores_of_rows: list[Score] = []
    parts: dict[str, list[float | None]] = {}
    for row, entry in enumerate(returned):
        if not isinstance(entry, Mapping):
            scores_of_rows.append(_read_entry(entry, rows, row, name, finite))
            continue
        components: dict[str, Score] = {}
        for key, value in entry.items():
            if str(key) in components:
                raise RewardError(f"reward {name!r} returned two components of the name {str(key)!r}: rename one")
            components[str(key)] = _read_entry(value, rows, row, f"{name}/{key}", finite)
        for component, value in components.items():
            column = parts.setdefault(component, [None] * len(rows))
            column[row] = total(value)
        scores_of_rows.append(add(list(components.values()), rows.tokens(row)))
    return Scores(score=scores_of_rows, parts=parts)


def add(values: Sequence[Score], tokens: int) -> Score:
    """Add the values of several functions for one completion.

    Args:
        values: numbers, float32 ``[tokens]``, and None for functions that do not apply.
        tokens: number of tokens of the completion.

    Returns:
        A number; float32 ``[tokens]`` if a value is per token, where single numbers go to the last token; None if no
        function applies.
    """
    applied = [value for value in values if value is not None]
    if not applied:
        return None
    if not tokens or not any(isinstance(value, np.ndarray) for value in applied):
        return float(sum(total(value) or 0.0 for value in applied))
    sums = np.zeros(tokens, dtype=np.float32)
    for value in applied:
        if isinstance(value, np.ndarray):
            sums += value
        else:
            sums[-1] += value
    return sums


def total(value: Score) -> float | None:
    """Return the sum over a completion's tokens; a single number, or None, as it is."""
    if isinstance(value, np.ndarray):
        return float(value.sum())
    return value


class Rows:
    """A batch of completions as a reward function receives it: columns by name, one entry per completion.

    Args:
        columns: ``prompts``, ``completions``, ``prompt_ids``, ``completion_ids``, ``terminated``, and the prompts' own.
        first: index of the first row, if this is part of a larger batch.
        tokenizer: tokenizer of the ids, if known.
    """

    def __init__(
        self, columns: Mapping[str, Sequence[Any]], *, first: int = 0, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.columns = {name: by_position(column) for name, column in columns.items()}
        self.first = first
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return count_rows(self.columns)

    def tokens(self, row: int) -> int:
        """Return the number of tokens of a completion."""
        return len(self.columns["completion_ids"][row])

    def part(self, start: int, stop: int) -> Rows:
        """Return rows ``start`` to ``stop``."""
        columns = {name: column[start:stop] for name, column in self.columns.items()}
        return Rows(columns, first=self.first + start, tokenizer=self.tokenizer)

    def cut(self, pieces: int) -> list[Rows]:
        """Return this number of parts of about the same length; if there are fewer rows, a part for each row."""
        pieces = max(1, min(pieces, len(self)))
        boundaries = [i * len(self) // pieces for i in range(pieces + 1)]
        return [self.part(start, stop) for start, stop in itertools.pairwise(boundaries)]

    def describe(self, row: int) -> str:
        """Return a description of a row for an error."""
        entries = []
        for name in ("prompt", "completion"):
            column = self.columns.get(f"{name}s")
            if column is not None:
                entries.append(f"{name} {column[row]!r:.300}")
        return f"row {self.first + row} ({', '.join(entries)})"


def count_rows(columns: Mapping[str, Any]) -> int:
    """Return the number of completions of a batch, or without them the number of entries of its first column."""
    if "completions" in columns:
        return len(columns["completions"])
    return len(next(iter(columns.values())))


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


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor, without importing torch: if torch is not imported, there are none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def check_count(returned: Any, expected: int, *, name: str, item: str, error: type[ValueError] = ValueError) -> None:
    """Raise unless there is one item for each completion, in their order.

    Args:
        returned: return value of a user's function.
        expected: number of completions.
        name: what returned it, for the message, such as ``reward 'score'``.
        item: what is expected for each completion, for the message, such as ``number``.
        error: type of the error.
    """
    advice = f"return a list with one {item} for each"
    try:
        count = len(returned)
    except TypeError:  # a number, an iterator, an array without dimensions
        count = None
    if isinstance(returned, (str, bytes, bytearray)):  # no list, though it has a length
        count = None
    if count is None:
        raise error(f"{name} returned {returned!r:.200} for {expected} completions: {advice}")
    if count != expected:
        raise error(f"{name} returned {count} values for {expected} completions: {advice}")
    problem = order_problem(returned)
    if problem:
        raise error(f"{name} returned {problem}: {advice}, in their order")


def order_problem(values: object) -> str:
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


def _read_entry(entry: object, rows: Rows, row: int, name: str, finite: bool) -> Score:
    """Return one entry as a number, float32 ``[tokens]``, or None."""
    if entry is None:
        return None
    if is_tensor(entry) and not entry.is_complex():
        with suppress(RuntimeError, TypeError):  # on the meta device, sparse
            entry = entry.detach().float().cpu().numpy()

    # A single number
    token_values = _values_per_token(entry)
    if token_values is None:
        number = as_number(entry)
        if number is not None and (not finite or abs(number) <= MAX_REWARD):
            return number
        raise _not_a_number(entry, rows, row, name)

    # A number per token
    if len(token_values) != rows.tokens(row):
        advice = "return one per token, or one for the whole completion"
        if len(token_values) == 1:
            advice += " (scores of shape [B, 1]: .squeeze(-1))"
        raise RewardError(
            f"reward {name!r} returned {len(token_values)} numbers for {rows.describe(row)}, which has "
            f"{rows.tokens(row)} tokens: {advice}"
        )
    if token_values.dtype.kind == "O":  # of Decimal, Fraction, tensors of one element
        numbers = [as_number(value) for value in token_values]
        if None not in numbers:
            token_values = np.array(numbers, dtype=np.float64)
    is_real = token_values.dtype.kind in "biuf" and not np.ma.is_masked(entry)
    if not is_real or (finite and not (np.abs(token_values) <= MAX_REWARD).all()):
        raise _not_a_number(entry, rows, row, name)
    with np.errstate(over="ignore"):  # overflow to infinity, which the caller reports
        return token_values.astype(np.float32)


def _not_a_number(entry: object, rows: Rows, row: int, name: str) -> RewardError:
    """Return the error for an entry that is no number, or not a finite one."""
    expected = "expected a finite number, or None where the reward does not apply"
    return RewardError(f"reward {name!r} returned {entry!r:.200} for {rows.describe(row)}: {expected}")


def _values_per_token(entry: object) -> np.ndarray | None:
    """Return the values of a list, an array or a Series; None for an entry that cannot have one number per token."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(entry, pandas.Series):
        entry = entry.to_numpy()
    if isinstance(entry, np.ndarray):
        if entry.ndim != 1:
            return None
        return entry
    if not isinstance(entry, Sequence) or isinstance(entry, (str, bytes, bytearray)):
        return None
    if any(isinstance(value, Sized) and as_number(value) is None for value in entry):  # a list of lists
        return None
    if any(is_tensor(value) for value in entry):  # NumPy does not read bfloat16
        return np.array([as_number(value) for value in entry], dtype=object)
    return np.asarray(entry)


def _read_columns(columns: Mapping[str, Sequence[object]], name: str) -> dict[str, list[float | None]]:
    """Return columns of `Scores` as numbers, which JSON can hold, and None."""
    return {part: _read_numbers(column, name=f"{name}/{part}") for part, column in columns.items()}


def _read_numbers(column: Iterable[object], *, name: str) -> list[float | None]:
    """Return a column of `Scores` as numbers, which JSON can hold, and None."""
    numbers = [as_number(entry) for entry in column]
    for row, (entry, number) in enumerate(zip(column, numbers, strict=True)):
        if number is None and entry is not None:
            raise RewardError(f"reward {name!r} has {entry!r:.200} for row {row}: expected a number or None")
    return numbers
