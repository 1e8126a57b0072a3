"""Losses: pure functions, elementwise over the entries, 0 where the mask is False.

They return one number an entry and leave the mean to the caller, who divides by the number of True entries of
the whole minibatch: so the gradient does not depend on how a minibatch is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textenv.rollout import check_mask


def log_ratio(*, log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """log π(a|s) - log π_old(a|s) at the True entries, 0 elsewhere; no gradient from what stands elsewhere."""
    check_mask(mask, log_prob=log_prob, old_log_prob=old_log_prob)
    return torch.where(mask, log_prob - old_log_prob, 0.0)


def clipped_policy_loss(*, log_ratio: Tensor, advantage: Tensor, mask: Tensor, clip_range: float) -> Tensor:
    """PPO's clipped surrogate, negated (Schulman et al. 2017, eq. 7): ``[B, T]``.

    Args:
        log_ratio: from `log_ratio`.
        advantage: ``[B, T]``.
        mask: bool ``[B, T]``.
        clip_range: ε; the ratio counts between 1 - ε and 1 + ε.
    """
    check_mask(mask, log_ratio=log_ratio, advantage=advantage)
    ratio = log_ratio.exp()
    gain = torch.where(mask, advantage, 0.0)
    return -torch.minimum(gain * ratio, gain * ratio.clamp(1 - clip_range, 1 + clip_range))


def value_loss(
    *, value: Tensor, value_target: Tensor, mask: Tensor, old_value: Tensor | None = None,
    clip_range: float | None = None,
) -> Tensor:  # fmt: skip
    """Half the squared error of the value, clipped around the old value if a range is given: ``[B, T]``.

    The clipped form takes the worse of both errors (Schulman et al.'s PPO code; torchrl's ``clip_value``).

    Args:
        value: ``[B, T]``, with gradient.
        value_target: ``[B, T]``.
        mask: bool ``[B, T]``.
        old_value: ``[B, T]``, needed with ``clip_range``.
        clip_range: most that the value may move from the old one, in units of the return.
    """
    check_mask(mask, value=value, value_target=value_target)
    value, target = torch.where(mask, value, 0.0), torch.where(mask, value_target, 0.0)
    error = (value - target).square()
    if clip_range is not None:
        if old_value is None:
            raise ValueError("clip_range was given without old_value: pass the rollout's 'value' column")
        check_mask(mask, value=value, old_value=old_value)
        old = torch.where(mask, old_value, 0.0)
        clipped = old + (value - old).clamp(-clip_range, clip_range)
        error = torch.maximum(error, (clipped - target).square())
    return 0.5 * error
