"""How far a reward model can be trusted: calibration and rank correlation. Pure functions of float ``[n]``."""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 10
"""Of the probabilities from 0 to 1, of equal width."""


def expected_calibration_error(*, probability: Tensor, outcome: Tensor) -> float:
    """Mean distance of what was predicted from what happened, over `BINS` of the prediction (Guo et al. 2017, eq. 3).

    Args:
        probability: predicted, ``[n]``, from 0 to 1.
        outcome: what happened, 1 or 0 (bool), ``[n]``.

    Raises:
        ValueError: if shapes differ, there is nothing, or a probability is none.

    Example:
        >>> said, came = torch.tensor([0.9, 0.9, 0.1]), torch.tensor([1.0, 0.0, 0.0])
        >>> round(expected_calibration_error(probability=said, outcome=came), 3)
        0.3
    """
    _check(probability=probability, outcome=outcome)
    if not ((probability >= 0) & (probability <= 1)).all():
        raise ValueError(f"probability holds {probability.min():.3g} to {probability.max():.3g}, expected 0 to 1")
    inside = (probability * BINS).long().clamp(max=BINS - 1)
    gap = (probability - outcome.to(probability.dtype)).double()
    # Bin by bin |sum of gaps| is the bin's size times the distance of its two means.
    return (torch.zeros(BINS, dtype=torch.float64).index_add(0, inside, gap).abs().sum() / len(gap)).item()


def spearman(*, predicted: Tensor, actual: Tensor) -> float:
    """Correlation of the ranks, equal numbers sharing theirs (Spearman 1904); 0 where one side does not vary.

    Raises:
        ValueError: if shapes differ or there is nothing.

    Example:
        >>> spearman(predicted=torch.tensor([0.1, 0.5, 0.2]), actual=torch.tensor([1.0, 3.0, 2.0]))
        1.0
    """
    _check(predicted=predicted, actual=actual)
    one, two = (ranks - ranks.mean() for ranks in (_ranks(predicted), _ranks(actual)))
    scale = (one.square().sum() * two.square().sum()).sqrt()
    return ((one * two).sum() / scale).item() if scale > 0 else 0.0


def _ranks(x: Tensor) -> Tensor:
    """Ranks from 1, the mean one where several are equal: float64 ``[n]``."""
    _, place, count = x.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[place]


def _check(**columns: Tensor) -> None:
    (one, x), (two, y) = columns.items()
    if x.shape != y.shape or x.dim() != 1 or not len(x):
        raise ValueError(f"{one} has shape {tuple(x.shape)} and {two} {tuple(y.shape)}, expected [n] of both, n > 0")
