"""Exploration that is held for several steps: the matrices of state-dependent noise (gSDE), one a slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HeldMatrices:
    """What each slot's noise is made by until it is drawn anew. Nothing here is written into: a change is a new one.

    The matrices are standard normal and are multiplied by σ when they are used, so that a step's action has the
    density it is scored by even where σ was learnt since the matrix was drawn.

    Example:
        >>> held = HeldMatrices(sample_freq=4)
        >>> held = held.next(3, lambda count: torch.randn(count, 64, 2))
        >>> held.matrices.shape, held.steps_left.tolist()
        (torch.Size([3, 64, 2]), [3, 3, 3])
    """

    sample_freq: int
    """Steps after which a slot's matrix is drawn anew (the name is Stable-Baselines3's)."""
    matrices: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float32 ``[N, features, dimensions]``, standard normal."""
    steps_left: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 ``[N]``: steps for which each slot's matrix still serves."""

    def __post_init__(self) -> None:
        if not isinstance(self.sample_freq, int) or self.sample_freq < 1:
            raise ValueError(f"sde_sample_freq is {self.sample_freq!r}, expected an integer of at least 1, or None")

    def next(self, slots: int, draw: Callable[[int], Tensor]) -> HeldMatrices:
        """The matrices of the next step: those that have served, or all if the slots are others, are drawn anew.

        Args:
            slots: how many act.
            draw: makes that many matrices.
        """
        if len(self.steps_left) != slots:
            fresh = torch.full((slots,), self.sample_freq - 1)
            return replace(self, matrices=draw(slots), steps_left=fresh)
        served = self.steps_left == 0
        matrices = self.matrices
        if served.any():
            matrices = matrices.clone()
            matrices[served] = draw(int(served.sum()))
        return replace(self, matrices=matrices, steps_left=torch.where(served, self.sample_freq, self.steps_left) - 1)

    def forget(self, rows: np.ndarray | None = None) -> HeldMatrices:
        """Have the matrices of these slots (bool ``[N]``), or of all, drawn anew at the next step."""
        if rows is None or not len(self.steps_left):
            return HeldMatrices(sample_freq=self.sample_freq)
        return replace(self, steps_left=torch.where(torch.from_numpy(rows), 0, self.steps_left))
