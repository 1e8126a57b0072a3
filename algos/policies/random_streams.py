"""Random streams: of the parts of a training, of each episode, and of each further row of an episode."""

import numpy as np
import torch
from torch import Tensor

NUMBERS_AT_ONCE = 64
"""Uniform numbers that a stream generates at a time."""
ACTIONS = 1
"""Stream of sampled actions, for `stream_seed`."""
MINIBATCHES = 2
"""Stream of the order of minibatches, and of what is drawn from a replay buffer."""


def stream_seed(seed: int, stream: int) -> int:
    """Return the seed of one of the streams of a training, other than ``seed``, which is that of initial weights.

    It is hashed, and has 32 bits: torch's generators on the CPU ignore the higher ones, so that with ``seed`` and
    ``seed + 2**32`` they generate the same numbers.
    """
    return int(np.random.SeedSequence(seed, spawn_key=(stream,)).generate_state(1)[0])


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
    return _not_negative(seeds)


def row_seeds(seeds: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the seed of each row: that of its episode, or another one drawn from it for a further row.

    Args:
        seeds: seed of each row's episode, int64 ``[N]``.
        numbers: number of each row in its episode, from 0, int64 ``[N]``.
    """
    seeds_of_rows = seeds.copy()
    for index in np.flatnonzero(numbers):
        entropy = [int(seeds[index]), int(numbers[index])]
        state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
        seeds_of_rows[index] = _not_negative(state)[0]
    return seeds_of_rows


def _not_negative(state: np.ndarray) -> np.ndarray:
    """Return uint64 numbers as int64 numbers that are not negative."""
    return state.astype(np.int64) & (2**63 - 1)
