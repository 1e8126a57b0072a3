"""Cutting a rollout into minibatches: of steps, or of whole rows where a policy is sequential."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict
from torch import Tensor

from textenv.errors import PLACE

ADVANTAGES_ONLY = ("next_observation", "reward", "terminated", "truncated", "next_value", "group", "next_action_mask")
"""Columns that advantages are made from and that nothing reads afterwards."""


def places(rollout: TensorDict) -> Tensor:
    """Where each entry stands, int64 ``[B, T]``, for errors to name it once it was cut out (`PLACE`)."""
    rows, columns = (torch.arange(size, device=rollout.device) for size in rollout.batch_size)
    return (rows[:, None] << 32) | columns


def minibatches(
    rollout: TensorDict, *, size: int | None, sequential: bool, generator: torch.Generator, epochs: int = 1
) -> Iterator[TensorDict]:
    """In each epoch every True entry once, in a new random order where there is more than one minibatch.

    Args:
        rollout: ``[B, T]``.
        size: rows in a minibatch if ``sequential``, else steps; None takes all.
        sequential: whole rows (True), or True entries one by one (False: what the mask leaves out is gone).
        generator: of the order.
        epochs: how many.

    Yields:
        ``[size, T]`` or ``[size]``; an epoch's last may be smaller. Rows without a True entry are left out. The column
        ``place`` says where in the rollout an entry stood (`textenv.errors.PLACE`).
    """
    rollout = rollout.exclude(*ADVANTAGES_ONLY)
    rollout[PLACE] = places(rollout)
    if sequential:
        units = rollout[rollout["mask"].any(dim=1)]
    else:
        units = rollout.flatten()
        if not units["mask"].all():
            units = units[units["mask"]]
    if not len(units):
        return
    for _ in range(epochs):
        if size is None or size >= len(units):
            yield units.clone()  # all of them, and so in any order; what is written into it stays out of the next one
            continue
        order = torch.randperm(len(units), generator=generator)
        # One gather an epoch and views after it, rather than a gather a minibatch.
        yield from units[order].split(size)
