"""Random numbers of slots: matrices that are held for several steps (gSDE), and streams of an episode's own."""

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


NUMBERS_AT_ONCE = 64
"""Uniform numbers that a stream gives at a time."""


class UniformStreams:
    """Uniform numbers for slots, in each from a stream that a seed has begun: the same whatever stands beside it.

    Args:
        seeds: int64 ``[N]``, not negative.

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
        """Give these slots (bool ``[N]``) the streams of their seeds (int64 ``[N]``)."""
        for slot in np.flatnonzero(rows):
            self._generators[slot] = np.random.default_rng(int(seeds[slot]))
        self._used[rows] = NUMBERS_AT_ONCE

    def next(self) -> Tensor:
        """The next number of every slot, float32 ``[N]``, at least 0 and below 1."""
        for slot in np.flatnonzero(self._used == NUMBERS_AT_ONCE):
            self._numbers[slot] = self._generators[slot].random(NUMBERS_AT_ONCE, dtype=np.float32)
            self._used[slot] = 0
        numbers = self._numbers[self._slots, self._used]
        self._used += 1
        return torch.from_numpy(numbers)


def episode_seeds(count: int, generator: torch.Generator) -> np.ndarray:
    """Seeds of that many episodes, int64, drawn from a policy's random numbers."""
    drawn = torch.randint(2**62, (1,), generator=generator, device=generator.device)
    return np.random.SeedSequence(int(drawn.item())).generate_state(count, np.uint64).astype(np.int64) & (2**63 - 1)


def refuse_seeds(seeds: np.ndarray | None, policy: object) -> None:
    """Raise a ValueError if a policy that draws for all its slots from one generator is given a stream for each."""
    if seeds is not None:
        raise ValueError(
            f"a {type(policy).__name__} draws the actions of all slots from policy.generator: leave seeds out, for "
            "streams of an episode's own are a language model's"
        )
