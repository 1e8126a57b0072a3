"""Random numbers per slot: noise matrices held for several steps (gSDE), and one uniform stream per episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HeldMatrices:
    """Noise matrix of each slot, held until it is resampled. Immutable: a change returns a new object.

    The matrices are standard normal and are multiplied by σ when they are used, so an action has the density that it
    is scored with, even if σ was updated after the matrix was drawn.

    Example:
        >>> held = HeldMatrices(sample_freq=4)
        >>> held = held.next(3, lambda count: torch.randn(count, 64, 2))
        >>> held.matrices.shape, held.steps_left.tolist()
        (torch.Size([3, 64, 2]), [3, 3, 3])
    """

    sample_freq: int
    """Steps after which a slot's matrix is resampled (Stable-Baselines3's name)."""
    matrices: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float32 ``[N, features, dimensions]``, standard normal."""
    steps_left: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 ``[N]``: steps left until each slot's matrix is resampled."""

    def __post_init__(self) -> None:
        if not isinstance(self.sample_freq, int) or self.sample_freq < 1:
            raise ValueError(f"sde_sample_freq is {self.sample_freq!r}, expected an integer of at least 1, or None")

    def next(self, slots: int, draw: Callable[[int], Tensor]) -> HeldMatrices:
        """Matrices for the next step: expired ones are resampled, or all if the number of slots changed.

        Args:
            slots: number of slots.
            draw: function that samples a given number of matrices.
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
        """Mark the matrices of these slots (bool ``[N]``), or of all, for resampling at the next step."""
        if rows is None or not len(self.steps_left):
            return HeldMatrices(sample_freq=self.sample_freq)
        return replace(self, steps_left=torch.where(torch.from_numpy(rows), 0, self.steps_left))


NUMBERS_AT_ONCE = 64
"""Uniform numbers that a stream generates at a time."""


class UniformStreams:
    """One independent uniform stream per slot, so samples do not depend on the rest of the batch.

    Args:
        seeds: seed of each stream, int64 ``[N]``, not negative.

    Example:
        >>> streams = UniformStreams(np.array([1, 2]))
        >>> first = streams.next()
        >>> streams.begin(np.array([False, True]), np.array([0, 1]))
        >>> bool(streams.next()[1] == first[0])
        True
    """

    def __init__(self, seeds: np.ndarray) -> None:
        self._generators = [np.random.default_rng(int(seed)) for seed in seeds]
        self._numbers = np.zeros((len(seeds), NUMBERS_AT_ONCE), dtype=np.float32)
        self._used = np.full(len(seeds), NUMBERS_AT_ONCE)
        self._slots = np.arange(len(seeds))

    def begin(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Start new streams in these slots (bool ``[N]``) from their seeds (int64 ``[N]``)."""
        for slot in np.flatnonzero(rows):
            self._generators[slot] = np.random.default_rng(int(seeds[slot]))
        self._used[rows] = NUMBERS_AT_ONCE

    def next(self) -> Tensor:
        """Next number of every slot, float32 ``[N]``, in [0, 1)."""
        for slot in np.flatnonzero(self._used == NUMBERS_AT_ONCE):
            self._numbers[slot] = self._generators[slot].random(NUMBERS_AT_ONCE, dtype=np.float32)
            self._used[slot] = 0
        numbers = self._numbers[self._slots, self._used]
        self._used += 1
        return torch.from_numpy(numbers)


def episode_seeds(count: int, generator: torch.Generator) -> np.ndarray:
    """Draw int64 seeds for that many episodes from a policy's generator."""
    drawn = torch.randint(2**62, (1,), generator=generator, device=generator.device)
    return np.random.SeedSequence(int(drawn.item())).generate_state(count, np.uint64).astype(np.int64) & (2**63 - 1)


def refuse_seeds(seeds: np.ndarray | None, policy: object) -> None:
    """Raise a ValueError if seeds are passed to a policy that has one generator for all slots."""
    if seeds is not None:
        raise ValueError(
            f"a {type(policy).__name__} draws the actions of all slots from policy.generator: leave seeds out, for "
            "streams of an episode's own are a language model's"
        )
