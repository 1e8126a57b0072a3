"""Means over seeds or prompts, and their 95 % bootstrap limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2_000
"""Number of bootstrap resamples; 95 % limits then vary by about a percent of their width."""
MIN_SEEDS = 5
"""Minimum number of values for limits; with fewer, they would be about the smallest and the largest value."""


class Estimate(NamedTuple):
    """Estimate of a quantity over seeds or prompts: mean (or another statistic), its limits, and the values."""

    mean: float
    low: float | None
    """95 % bootstrap limits of the mean; None with fewer than `MIN_SEEDS` values."""
    high: float | None
    values: tuple[float, ...]
    """Value of each seed, or of each prompt."""


def estimate(values: Sequence[float] | np.ndarray, statistic: Callable[..., np.ndarray] = np.mean) -> Estimate:
    """Return a statistic of the values of all seeds or prompts, with its limits."""
    column = np.asarray(values, dtype=np.float64)
    mean = float(statistic(column, axis=0))
    interval = limits(column, statistic)
    if interval is None:
        return Estimate(mean, None, None, tuple(column.tolist()))
    low, high = interval
    return Estimate(mean, float(low), float(high), tuple(column.tolist()))


def interquartile_mean(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean of the middle half along an axis, without the lowest and the highest quarter (rounded down); NaN of NaN.

    >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 3.0, 100.0])))
    2.0
    """
    cut = x.shape[axis] // 4
    middle = np.arange(cut, x.shape[axis] - cut)
    mean = np.sort(x, axis=axis).take(middle, axis=axis).mean(axis=axis)
    return np.where(np.isnan(x).any(axis=axis), np.nan, mean)  # sorted, NaN would be in the highest quarter


def bootstrap_interval(
    x: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """95 % limits of a statistic over seeds, by the percentile bootstrap (Efron 1979); with few seeds they mean little.

    Args:
        x: values ``[seeds, *]``, or of prompts.
        statistic: function of an array and ``axis``, such as `numpy.mean`.
        seed: seed of the resampling.

    Returns:
        Low and high limits, ``[*]`` each.
    """
    chosen = np.random.default_rng(seed).integers(len(x), size=(RESAMPLES, len(x)))
    low, high = np.quantile(statistic(x[chosen], axis=1), [0.025, 0.975], axis=0)
    return low, high


def limits(x: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean) -> tuple[np.ndarray, np.ndarray] | None:
    """`bootstrap_interval`; None with fewer than `MIN_SEEDS` seeds or prompts."""
    if len(x) < MIN_SEEDS:
        return None
    return bootstrap_interval(x, statistic)
