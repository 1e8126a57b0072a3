"""Losses: pure functions, elementwise over the entries, 0 where the mask is False.

They return one number an entry and leave the mean to an aggregation, which gives every entry of a whole minibatch its
weight before the minibatch is cut: so the gradient does not depend on how it is cut.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import Tensor

from textenv.rollout import check_mask


class PolicyLoss(Protocol):
    """What is minimised at each entry so that the policy improves; numbers of its own by `functools.partial`."""

    def __call__(self, *, log_ratio: Tensor, advantage: Tensor, mask: Tensor, clip_range: float) -> Tensor:
        """One number an entry, 0 where the mask is False."""
        ...


class Aggregation(Protocol):
    """How the entries of a minibatch make one loss."""

    def __call__(self, *, mask: Tensor) -> Tensor:
        """Weight of each entry, float32, from the whole minibatch's mask; 0 where it is False."""
        ...


def log_ratio(*, log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """log π(a|s) - log π_old(a|s) at the True entries, 0 elsewhere; no gradient from what stands elsewhere."""
    check_mask(mask, log_prob=log_prob, old_log_prob=old_log_prob)
    return torch.where(mask, log_prob - old_log_prob, 0.0)


def policy_gradient_loss(*, log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """The score function's surrogate -A log π(a|s) (Williams 1992; Sutton et al. 2000): ``[B, T]``.

    Args:
        log_ratio: log π(a|s), or from `log_ratio`: log π_old is a constant, without a gradient.
        advantage: ``[B, T]``.
        mask: bool ``[B, T]``.
    """
    check_mask(mask, log_ratio=log_ratio, advantage=advantage)
    return -torch.where(mask, advantage, 0.0) * torch.where(mask, log_ratio, 0.0)


def clipped_policy_loss(
    *, log_ratio: Tensor, advantage: Tensor, mask: Tensor, clip_range: float, clip_higher: float | None = None
) -> Tensor:
    """PPO's clipped surrogate, negated (Schulman et al. 2017, eq. 7): ``[B, T]``.

    Args:
        log_ratio: from `log_ratio`.
        advantage: ``[B, T]``.
        mask: bool ``[B, T]``.
        clip_range: ε; the ratio counts between 1 - ε and 1 + ε.
        clip_higher: another ε above 1, usually a wider one (Yu et al. 2025, DAPO); None is the same.
    """
    check_mask(mask, log_ratio=log_ratio, advantage=advantage)
    ratio = log_ratio.exp()
    loss = -torch.where(mask, advantage, 0.0)
    most = 1 + (clip_range if clip_higher is None else clip_higher)
    # The lesser of both products is that of the ratio which is clipped on one side only, by the advantage's sign.
    lower = torch.where(loss > 0, 1 - clip_range, -torch.inf)
    upper = torch.where(loss > 0, torch.inf, most)
    return loss * ratio.clamp(lower, upper)


def dual_clipped_policy_loss(
    *, log_ratio: Tensor, advantage: Tensor, mask: Tensor, clip_range: float, limit: float = 3.0
) -> Tensor:
    """`clipped_policy_loss` that is bounded for negative advantages too (Ye et al. 2020, eq. 5): ``[B, T]``.

    Where A < 0 the ratio counts no further than ``limit``, beyond which there is no gradient.

    Args:
        log_ratio: from `log_ratio`.
        advantage: ``[B, T]``.
        mask: bool ``[B, T]``.
        clip_range: ε.
        limit: c > 1.

    Raises:
        ValueError: if the limit is not above 1.
    """
    if not limit > 1:
        raise ValueError(f"limit is {limit}, expected a ratio above 1 (Ye et al. take 3)")
    loss = clipped_policy_loss(log_ratio=log_ratio, advantage=advantage, mask=mask, clip_range=clip_range)
    most = -limit * torch.where(mask, advantage, 0.0)
    return torch.where(mask & (advantage < 0), torch.minimum(loss, most), loss)


def thresholded_policy_loss(
    *, log_ratio: Tensor, advantage: Tensor, mask: Tensor, clip_range: float, threshold: float = 10.0
) -> Tensor:
    """`clipped_policy_loss` without the rows whose mean ratio has run away: ``[B, T]``.

    A row (text: a response; else a single step) whose ratios are above ``threshold`` on average adds nothing. It is TRL
    0.7's ``ratio_threshold``, by rows, so that it does not depend on how a minibatch is cut.

    Args:
        log_ratio: from `log_ratio`.
        advantage: ``[B, T]``.
        mask: bool ``[B, T]``.
        clip_range: ε.
        threshold: greatest mean ratio that still counts, > 1.

    Raises:
        ValueError: if the threshold is not above 1.
    """
    if not threshold > 1:
        raise ValueError(f"threshold is {threshold}, expected a ratio above 1")
    loss = clipped_policy_loss(log_ratio=log_ratio, advantage=advantage, mask=mask, clip_range=clip_range)
    ratio = torch.where(mask, log_ratio.detach().exp(), 0.0)
    if mask.ndim > 1:
        ratio = (ratio.sum(-1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1)
    return torch.where(ratio <= threshold, loss, 0.0)


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
    error = F.mse_loss(value, target, reduction="none")
    if clip_range is not None:
        if old_value is None:
            raise ValueError("clip_range was given without old_value: pass the rollout's 'value' column")
        check_mask(mask, value=value, old_value=old_value)
        old = torch.where(mask, old_value, 0.0)
        clipped = old + (value - old).clamp(-clip_range, clip_range)
        error = torch.maximum(error, (clipped - target).square())
    return 0.5 * error


def token_mean(*, mask: Tensor) -> Tensor:
    """Every True entry counts the same: an `Aggregation`, and the only one that sequences of single steps need."""
    return mask / mask.sum().clamp(min=1)


def sequence_mean(*, mask: Tensor) -> Tensor:
    """Every row counts the same, so a token of a short response counts more (Shao et al. 2024, GRPO)."""
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    return mask / length / mask.any(-1).sum().clamp(min=1)


def fixed_length_mean(*, mask: Tensor, length: int) -> Tensor:
    """Sums over the rows, divided by a constant instead of their lengths (Liu et al. 2025, "Dr. GRPO").

    Args:
        mask: bool ``[B, T]``.
        length: the constant, such as the longest response; by `functools.partial` it is an `Aggregation`.
    """
    return mask / (length * mask.any(-1).sum().clamp(min=1))
