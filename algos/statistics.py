"""Statistics over seeds, as Agarwal et al. 2021 ("Deep RL at the edge of the statistical precipice") ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2_000
"""Of a bootstrap; 95 % limits then move by about a percent of their distance."""


FEWEST = 5
"""Seeds from which on limits are given: those of fewer are no more than the least and the greatest value."""


def interquartile_mean(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean of the middle half along an axis: the lowest and the highest quarter (rounded down) are left out.

    >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 3.0, 100.0])))
    2.0
    """
    cut = x.shape[axis] // 4
    kept = np.sort(x, axis=axis).take(np.arange(cut, x.shape[axis] - cut), axis=axis)
    return kept.mean(axis=axis)


def bootstrap_interval(
    x: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """95 % limits of a statistic over seeds, by the percentile bootstrap (Efron 1979).

    Args:
        x: ``[seeds, *]``, one row a seed.
        statistic: called with ``axis``.
        seed: of the resampling.

    Returns:
        Low and high, ``[*]`` each; of one seed both are its value, and of fewer than `FEWEST` they mean little.
    """
    chosen = np.random.default_rng(seed).integers(len(x), size=(RESAMPLES, len(x)))
    found = statistic(x[chosen], axis=1)
    low, high = np.quantile(found, [0.025, 0.975], axis=0)
    return low, high


def on_grid(curves: Sequence[Sequence[tuple[float, float]]], grid: np.ndarray) -> np.ndarray:
    """Curves of (x, y) points with x rising, read at a grid's points by lines between them: ``[curves, points]``.

    Before its first point a curve has that point's value, after its last one that one's.
    """
    return np.array([np.interp(grid, *np.array(curve, dtype=float).T) for curve in curves])
