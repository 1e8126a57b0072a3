"""One stream of uniform random numbers per episode."""

import numpy as np
import torch
from torch import Tensor

NUMBERS_AT_ONCE = 64
"""Uniform numbers that a stream generates at a time."""


class UniformStreams:
    """One independent uniform stream per slot, so that a slot's samples do not depend on the other slots.

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
        # The next numbers of each stream, and how many of them were used
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
    """Draw int64 seeds for ``count`` episodes from a policy's generator."""
    entropy = torch.randint(2**62, (1,), generator=generator, device=generator.device)
    seeds = np.random.SeedSequence(int(entropy.item())).generate_state(count, np.uint64)
    return seeds.astype(np.int64) & (2**63 - 1)  # not negative
