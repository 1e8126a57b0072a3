"""What several samples of each prompt say: pass@k, maj@k and greedy pass rates, with limits over the prompts."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from algos.statistics.intervals import Estimate, estimate
from algos.statistics.pass_at_k import majority_at_k, pass_at_k
from textenv.rendering import printable

ROUNDING = 1e-6
"""An episode passes if its return is at most this below ``success``: weighted rewards are sums of 32-bit numbers."""

PASS_RATE = re.compile(r"(?:.*/)?(?:greedy|(?:pass|maj)@\d+)")
"""Names of `PassRates.numbers`, such as ``pass@8`` and ``level=2/maj@8``."""

Answer = Callable[[str], Hashable | None]
"""Function from a completion to the answer that is voted on; None abstains."""


@dataclass(frozen=True)
class Sampling:
    """How `algos.evaluate` samples each prompt several times; see its arguments, which have the same names."""

    k: tuple[int, ...]
    """Ascending."""
    num_samples: int
    num_prompts: int | None = None
    by: str | None = None
    success: float = 1.0
    answer: Answer | None = None

    @property
    def settings(self) -> dict[str, object]:
        """What tells two evaluations apart, as plain data; the function ``answer`` by its name alone."""
        return {
            "k": list(self.k),
            "num_samples": self.num_samples,
            "num_prompts": self.num_prompts,
            "by": self.by,
            "success": self.success,
            "answer": getattr(self.answer, "__name__", None),
        }


def read_sampling(
    k: int | Sequence[int] | None,
    *,
    num_samples: int | None = None,
    num_prompts: int | None = None,
    by: str | None = None,
    success: float = 1.0,
    answer: Answer | None = None,
) -> Sampling | None:
    """Return the checked arguments of `algos.evaluate`; None if ``k`` is None.

    Raises:
        TypeError: if ``by`` is no text, or ``answer`` no function.
        ValueError: if a number is out of its range, or another argument is given without ``k``.
    """
    # Without k
    if k is None:
        optional = {"num_samples": num_samples, "num_prompts": num_prompts, "by": by, "answer": answer}
        for name, value in optional.items():
            if value is not None:
                raise ValueError(
                    f"{name} is {value!r:.100}, but k is None: several samples of each prompt are played only with k, "
                    "such as k=(1, 8)"
                )
        if success != 1:
            raise ValueError(
                f"success is {success!r:.100}, but k is None: it says which of several samples pass, which are played "
                "only with k, such as k=(1, 8)"
            )
        return None

    # Numbers of samples
    ks = _read_ks(k)
    largest = max(ks)
    if num_samples is None:
        num_samples = largest
    _check_count("num_samples", num_samples)
    if num_samples < largest:
        raise ValueError(
            f"k is {largest}, but num_samples is {num_samples}: pass@{largest} needs at least {largest} of each prompt"
        )
    if num_prompts is not None:
        _check_count("num_prompts", num_prompts)

    # What counts, and by what it is broken down
    is_number = isinstance(success, numbers.Real) and not isinstance(success, bool)
    if not is_number or not np.isfinite(success):
        raise ValueError(f"success is {success!r:.100}, expected the return from which on an episode passes, such as 1")
    if by is not None and not isinstance(by, str):
        raise TypeError(f"by is {by!r:.100}, expected the name of a column of the prompts")
    if answer is not None and not callable(answer):
        raise TypeError(f"answer is {answer!r:.100}, expected a function from a completion to its answer")
    return Sampling(ks, int(num_samples), num_prompts, by, float(success), answer)


def _read_ks(k: Any) -> tuple[int, ...]:
    """Return the numbers of samples, ascending; raise a ValueError unless they are distinct and at least 1."""
    ks = [k]
    if isinstance(k, Iterable) and not isinstance(k, (str, bytes, Mapping)):
        ks = list(k)
    are_counts = all(isinstance(x, numbers.Integral) and not isinstance(x, bool) and int(x) >= 1 for x in ks)
    if not ks or not are_counts or len(set(ks)) < len(ks):
        raise ValueError(f"k is {k!r:.100}, expected distinct integers of at least 1, such as 8 or (1, 8, 64)")
    return tuple(sorted(int(x) for x in ks))


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < 1:
        raise ValueError(f"{name} is {value!r:.100}, expected an integer of at least 1")


@dataclass(frozen=True)
class PromptSamples:
    """The samples of one prompt."""

    returns: np.ndarray
    """float64 ``[n]``, return of each sample; NaN without a score, which has not passed."""
    greedy_return: float
    """Return of the most probable answer."""
    answers: Sequence[Hashable | None] | None
    """Answer of each sample, ``[n]``; None if they are not voted on."""
    group: Hashable = None
    """Value of the column by which the results are broken down."""


@dataclass(frozen=True)
class PassRates:
    """Pass rates of prompts that were each sampled several times; limits are over the prompts.

    Printed, it is a table. A sample passes if its return is at least ``success`` (`Sampling`).
    """

    num_prompts: int
    num_samples: int
    """Samples of each prompt."""
    greedy: Estimate
    """Fraction of prompts whose most probable answer passes."""
    pass_at: dict[int, Estimate]
    """By k: probability that at least one of k samples passes (`algos.statistics.pass_at_k.pass_at_k`)."""
    majority_at: dict[int, Estimate]
    """By k above 1: probability that the most frequent answer of k samples passes
    (`algos.statistics.pass_at_k.majority_at_k`). Empty if there is nothing to vote on."""
    column: str | None = None
    """Column by which ``by`` breaks them down."""
    by: dict[Hashable, PassRates] = field(default_factory=dict)
    """The same for the prompts of each value of the column, sorted by the value."""

    def estimates(self) -> dict[str, Estimate]:
        """Return all estimates by their names: ``greedy``, ``pass@1``, …, ``maj@8``, …."""
        named = {"greedy": self.greedy}
        for k, pass_rate in self.pass_at.items():
            named[f"pass@{k}"] = pass_rate
        for k, pass_rate in self.majority_at.items():
            named[f"maj@{k}"] = pass_rate
        return named

    def numbers(self) -> dict[str, float]:
        """Return the means by name, for a log; those of a value of the column as ``level=2/pass@8``."""
        means = {name: figure.mean for name, figure in self.estimates().items()}
        for value, rates in self.by.items():
            for name, figure in rates.estimates().items():
                means[f"{self.column}={value}/{name}"] = figure.mean
        return means

    def to_dict(self) -> dict[str, object]:
        """Return everything but the prompts' own values as plain data, for JSON."""
        data: dict[str, object] = {"num_prompts": self.num_prompts, "num_samples": self.num_samples}
        for name, figure in self.estimates().items():
            data[name] = {"mean": figure.mean, "low": figure.low, "high": figure.high}
        if self.column is not None:
            data["column"] = self.column
            data["by"] = {str(value): rates.to_dict() for value, rates in self.by.items()}
        return data

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of a table: all prompts, and below them those of each value of the column."""
        header = [self.column or "", "prompts", *self.estimates()]
        rows = [self._row("all")]
        for value, rates in self.by.items():
            rows.append(rates._row(str(value)))
        return header, rows

    def _row(self, name: str) -> list[str]:
        cells = [name, str(self.num_prompts)]
        for figure in self.estimates().values():
            cell = f"{figure.mean:.3f}"
            if figure.low is not None:
                cell += f" [{figure.low:.3f}, {figure.high:.3f}]"
            cells.append(cell)
        return cells

    def __str__(self) -> str:
        header, rows = self.table()
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = []
        for row in (header, *rows):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def pass_rates(prompts: Sequence[PromptSamples], sampling: Sampling) -> PassRates:
    """Return the pass rates of prompts, and if ``sampling.by`` is set, those of each value of this column."""
    rates = _rates(prompts, sampling, column=sampling.by)
    if sampling.by is None:
        return rates

    # Values of the same text have the same name in logs and tables, so they are one: 1 and "1", or all NaN
    groups: dict[Hashable, list[PromptSamples]] = {}
    value_by_text: dict[str, Hashable] = {}
    for prompt in prompts:
        value = prompt.group
        text = printable(str(value))
        if text != str(value):  # control characters do not belong into names of a log and cells of a table
            value = text
        value = value_by_text.setdefault(text, value)
        groups.setdefault(value, []).append(prompt)
    for value in sorted(groups, key=_sort_key):
        rates.by[value] = _rates(groups[value], sampling, column=None)
    return rates


def _sort_key(value: Hashable) -> tuple[bool, float, str]:
    """Sort numbers, and texts that are numbers, by value, and before other texts and NaN."""
    number = math.nan
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)  # type: ignore[arg-type]
    if math.isnan(number):
        return True, 0.0, str(value)
    return False, number, ""


def _rates(prompts: Sequence[PromptSamples], sampling: Sampling, *, column: str | None) -> PassRates:
    """Return the pass rates of these prompts together."""
    # Which samples pass
    needed = sampling.success - ROUNDING
    passes = [prompt.returns >= needed for prompt in prompts]
    greedy = [prompt.greedy_return >= needed for prompt in prompts]

    # Per prompt, and over the prompts
    pass_at = {}
    majority_at = {}
    for k in sampling.k:
        pass_at[k] = estimate([pass_at_k(of_prompt, k) for of_prompt in passes])
        votes = []
        for prompt, of_prompt in zip(prompts, passes, strict=True):
            if prompt.answers is not None:
                votes.append(majority_at_k(prompt.answers, of_prompt, k))
        if k > 1 and len(votes) == len(prompts):
            majority_at[k] = estimate(votes)
    return PassRates(len(prompts), sampling.num_samples, estimate(greedy), pass_at, majority_at, column)
