"""Checks that fail loudly: of configs at construction, of tensors while training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

RATIO_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference of the sampler's and the scorer's log-probabilities, nats; .1 for the short dtypes."""


def check_range(
    config: Any,
    *,
    at_least_one: Sequence[str] = (),
    positive: Sequence[str] = (),
    not_negative: Sequence[str] = (),
    unit_interval: Sequence[str] = (),
) -> None:
    """Raise a ValueError that names the first field of a config outside its range; None passes."""
    rules = [
        (at_least_one, lambda x: isinstance(x, int) and x >= 1, "an integer of at least 1"),
        (positive, lambda x: x > 0, "a number above 0"),
        (not_negative, lambda x: x >= 0, "a number of at least 0"),
        (unit_interval, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    ]
    for names, holds, expected in rules:
        for name in names:
            value = getattr(config, name)
            if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and holds(value)):
                raise ValueError(f"{type(config).__name__}.{name} is {value!r}, expected {expected}")


def coarsest_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """The floating dtype with the fewest digits: that of the base where a float32 adapter sits on bfloat16 weights."""
    dtypes = {p.dtype for p in parameters if p.dtype.is_floating_point}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def scoring_dtype(policy: Any) -> torch.dtype:
    """What a policy computes log-probabilities in: the dtype of its autocast if it has one, else of its weights."""
    autocast = getattr(policy, "autocast", None)
    return coarsest_dtype(policy.parameters()) if autocast is None else autocast


def check_ratio_is_one(log_ratio: Tensor, *, dtype: torch.dtype) -> None:
    """Before the first step of an update the policy is the one that acted, so every ratio is 1.

    Raises:
        RuntimeError: if the log-probabilities differ by more than `RATIO_TOLERANCE`.
    """
    worst = log_ratio.detach().abs().max().item() if log_ratio.numel() else 0.0
    tolerance = RATIO_TOLERANCE.get(dtype, 0.1)
    if not worst <= tolerance:
        entry = torch.unravel_index(log_ratio.detach().abs().argmax(), log_ratio.shape)
        raise RuntimeError(
            f"before the first update the policy scores its own actions {worst:.3g} nats away from the log-probability "
            f"they were sampled with (entry {[int(i) for i in entry]} of the first minibatch, tolerance {tolerance}): "
            "evaluate() and act() disagree. Dropout, temperature, a mask or stale state in one of them?"
        )


def check_finite_gradient(grad_norm: Tensor) -> None:
    """Raise a FloatingPointError before a non-finite gradient reaches the weights."""
    if not math.isfinite(grad_norm.item()):
        raise FloatingPointError(
            f"the gradient's norm is {grad_norm.item()}: the weights were left as they are. Look for rewards of great "
            "size, a learning rate that is too high, or log-probabilities of forbidden actions."
        )
