"""Losses: pure functions, elementwise over the entries, 0 where the mask is False.

They return one number per entry. An aggregation then weights all entries of a minibatch before the minibatch is
split, so the gradient does not depend on the split.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor

from textenv.rollout import check_mask


class Aggregation(Protocol):
    """Weights of the entries of a minibatch in its loss."""

    def __call__(self, *, mask: Tensor) -> Tensor:
        """Return the weight of each entry, float32, from the whole minibatch's mask; 0 where it is False."""


def log_ratio(*, log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return log π(a|s) - log π_old(a|s) at the True entries, 0 elsewhere; False entries have no gradient."""
    check_mask(mask, log_prob=log_prob, old_log_prob=old_log_prob)
    return torch.where(mask, log_prob - old_log_prob, 0.0)


def policy_gradient_loss(*, log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Score-function surrogate -A log π(a|s) (Williams 1992; Sutton et al. 2000): ``[B, T]``.

    Args:
        log_ratio: log π(a|s), or the result of `log_ratio`, which differs by the constant log π_old.
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
        clip_range: ε; the ratio is clipped to [1 - ε, 1 + ε].
        clip_higher: ε of the upper bound, usually larger (Yu et al. 2025, DAPO); None: ε.
    """
    check_mask(mask, log_ratio=log_ratio, advantage=advantage)
    ratio = log_ratio.exp()
    loss = -torch.where(mask, advantage, 0.0)
    most = 1 + (clip_range if clip_higher is None else clip_higher)
    # In the smaller of the two products the ratio is clipped on one side, which the advantage's sign selects.
    lower = torch.where(loss > 0, 1 - clip_range, -torch.inf)
    upper = torch.where(loss > 0, torch.inf, most)
    return loss * ratio.clamp(lower, upper)


def dual_clipped_policy_loss(*, advantage: Tensor, mask: Tensor, limit: float = 3.0, **columns: Any) -> Tensor:
    """`clipped_policy_loss` that is also bounded for negative advantages (Ye et al. 2020, eq. 5): ``[B, T]``.

    Where A < 0 the ratio is limited to ``limit``, beyond which there is no gradient.

    Args:
        advantage: ``[B, T]``.
        mask: bool ``[B, T]``.
        limit: c > 1.
        columns: further arguments of `clipped_policy_loss`.

    Raises:
        ValueError: if the limit is not above 1.
    """
    if not limit > 1:
        raise ValueError(f"limit is {limit}, expected a ratio above 1 (3 in Ye et al.)")
    loss = clipped_policy_loss(advantage=advantage, mask=mask, **columns)
    most = -limit * torch.where(mask, advantage, 0.0)
    return torch.where(mask & (advantage < 0), torch.minimum(loss, most), loss)


def gspo_policy_loss(*, log_ratio: Tensor, mask: Tensor, **columns: Any) -> Tensor:
    """`clipped_policy_loss` with one ratio a row, its tokens' geometric mean (Zheng et al. 2025, GSPO): ``[B, T]``.

    Rows are whole answers if the policy is sequential, else single steps. With `sequence_mean` this is the paper's
    objective (eq. 5), whose ranges are far below a token's: 3e-4 and 4e-4 there. Arguments as of `clipped_policy_loss`.
    """
    check_mask(mask, log_ratio=log_ratio)
    log_ratio = _row_mean(torch.where(mask, log_ratio, 0.0), mask)
    return clipped_policy_loss(log_ratio=log_ratio, mask=mask, **columns)


def thresholded_policy_loss(*, log_ratio: Tensor, mask: Tensor, threshold: float = 10.0, **columns: Any) -> Tensor:
    """`clipped_policy_loss` without rows whose mean ratio is too large: ``[B, T]``.

    A row (one step unless the policy is sequential) whose mean ratio exceeds ``threshold`` contributes nothing. This is
    TRL 0.7's ``ratio_threshold``, applied per row, so that the split of a minibatch has no effect.

    Args:
        log_ratio: from `log_ratio`.
        mask: bool ``[B, T]``.
        threshold: largest mean ratio that still counts, > 1.
        columns: further arguments of `clipped_policy_loss`.

    Raises:
        ValueError: if the threshold is not above 1.
    """
    if not threshold > 1:
        raise ValueError(f"threshold is {threshold}, expected a ratio above 1")
    loss = clipped_policy_loss(log_ratio=log_ratio, mask=mask, **columns)
    ratio = _row_mean(torch.where(mask, log_ratio.detach().exp(), 0.0), mask)
    return torch.where(ratio <= threshold, loss, 0.0)


def _row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the True entries of each row, at all of its entries; single steps ``[B]`` stay as they are."""
    return x if mask.ndim == 1 else (x.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(x)


def value_loss(
    *, value: Tensor, value_target: Tensor, mask: Tensor, old_value: Tensor | None = None,
    clip_range: float | None = None,
) -> Tensor:  # fmt: skip
    """Half the squared error of the value, clipped around the old value if a range is given: ``[B, T]``.

    The clipped form takes the larger of the two errors (Schulman et al.'s PPO code; torchrl's ``clip_value``).

    Args:
        value: ``[B, T]``, with gradient.
        value_target: ``[B, T]``.
        mask: bool ``[B, T]``.
        old_value: ``[B, T]``, needed with ``clip_range``.
        clip_range: maximum change of the value from the old one, in units of the return.
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
    """Equal weight for every True entry: an `Aggregation`, and the only one that single steps need."""
    return mask / mask.sum().clamp(min=1)


def sequence_mean(*, mask: Tensor) -> Tensor:
    """Equal weight for every row, so a token of a short completion counts more (Shao et al. 2024, GRPO)."""
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    return mask / length / mask.any(-1).sum().clamp(min=1)


def fixed_length_mean(*, mask: Tensor, length: int) -> Tensor:
    """Sum over each row, divided by a constant instead of the row's length (Liu et al. 2025, "Dr. GRPO").

    Args:
        mask: bool ``[B, T]``.
        length: the constant, such as the maximum completion length; `functools.partial` makes this an `Aggregation`.
    """
    return mask / (length * mask.any(-1).sum().clamp(min=1))
