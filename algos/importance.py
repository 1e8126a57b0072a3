"""Importance weights: how much a step counts that another engine, precision or older policy sampled.

Of each step the trainer knows log π_old(a|s) - log μ(a|s): π_old is the policy before the update, μ what sampled. A
product of all ratios of a row makes the expected gradient of its return exact, but its variance grows with the length;
a ratio for each token has little variance and a bias. Bounds reduce the variance and add a bias
(tests/algos/test_importance.py has both for each function, by enumeration).

A row is a whole answer or conversation in text, a single step in control (with an LSTM: a slot's part of the rollout).
A step of weight 0 still counts in the mean that the loss is, so that dropping steps does not enlarge the others.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from algos import losses
from algos.config import ClippedConfig, weighs_samples
from algos.losses import row_mean, row_sum
from algos.policies.policy import Policy
from algos.ranks import collectives
from algos.training.metrics import Metrics
from textenv.rollout import masked, masked_mean


class ImportanceWeights(Protocol):
    """Weight of each step: the signature that a function for `ClippedConfig.importance_weights` must have."""

    def __call__(self, *, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """Return the weight of each step, at least 0, ``[B, T]`` like both tensors (``[B]`` for single steps).

        Args:
            log_ratio: log π_old(a|s) - log μ(a|s), in nats; 0 where ``mask`` is False.
            mask: bool, True at the steps that count. Elsewhere any finite weight may be returned.

        If the config has a ``max_importance_weight``, it is given as ``limit``.
        """


@masked
def token_truncate(*, log_ratio: Tensor, mask: Tensor, limit: float = 2.0) -> Tensor:
    """Ratio of each token, at most ``limit`` (TIS, Yao et al. 2025): ``[B, T]``."""
    return torch.where(mask, log_ratio.exp().clamp(max=limit), 0.0)


@masked
def token_mask(*, log_ratio: Tensor, mask: Tensor, limit: float = 2.0) -> Tensor:
    """Ratio of each token, 0 where it exceeds ``limit`` (TRL's ``token_mask``): ``[B, T]``."""
    ratio = log_ratio.exp()
    return torch.where(mask & (ratio <= limit), ratio, 0.0)


@masked
def two_sided_token_mask(*, log_ratio: Tensor, mask: Tensor, limit: float = 5.0, lower_limit: float = 0.5) -> Tensor:
    """Ratio of each token, 0 outside ``lower_limit`` to ``limit`` (IcePop; Ling Team 2025, eq. 3): ``[B, T]``."""
    if not limit > lower_limit:
        raise ValueError(f"max_importance_weight is {limit}, expected more than the lower limit, {lower_limit}")
    ratio = log_ratio.exp()
    return torch.where(mask & (ratio >= lower_limit) & (ratio <= limit), ratio, 0.0)


@masked
def sequence_truncate(*, log_ratio: Tensor, mask: Tensor, limit: float = 3.0) -> Tensor:
    """Product of the ratios of a row, at most ``limit``, at each of its tokens (TRL, verl): ``[B, T]``.

    Without a limit this is the exact correction of a row's return.
    """
    ratio = row_sum(torch.where(mask, log_ratio, 0.0)).exp()
    return torch.where(mask, ratio.clamp(max=limit), 0.0)


@masked
def sequence_mask(*, log_ratio: Tensor, mask: Tensor, limit: float = 3.0) -> Tensor:
    """Product of the ratios of a row, 0 if it exceeds ``limit`` (MIS, Liu et al. 2025; TRL's default): ``[B, T]``."""
    ratio = row_sum(torch.where(mask, log_ratio, 0.0)).exp()
    return torch.where(mask & (ratio <= limit), ratio, 0.0)


@masked
def geometric_truncate(*, log_ratio: Tensor, mask: Tensor, limit: float = 2.0) -> Tensor:
    """Geometric mean of the ratios of a row, at most ``limit`` (the ratio of GSPO, Zheng et al. 2025): ``[B, T]``."""
    ratio = row_mean(torch.where(mask, log_ratio, 0.0), mask=mask).exp()
    return torch.where(mask, ratio.clamp(max=limit), 0.0)


@masked
def geometric_mask(*, log_ratio: Tensor, mask: Tensor, limit: float = 1.01) -> Tensor:
    """1, or 0 for rows whose geometric mean of ratios is not within 1/limit to limit (verl, SkyRL): ``[B, T]``.

    The weights of the rows that stay are not corrected. A single bad token in a long row does not move the mean much.
    """
    if not limit > 1:
        raise ValueError(f"max_importance_weight is {limit}, expected more than 1: geometric_mask would drop every row")
    mean = row_mean(torch.where(mask, log_ratio, 0.0), mask=mask)
    near = mean.abs() <= torch.tensor(limit, dtype=mean.dtype, device=mean.device).log()
    return torch.where(mask & near, 1.0, 0.0).to(log_ratio.dtype)


NAMED: dict[str, Callable[..., Tensor]] = {
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "two_sided_token_mask": two_sided_token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "geometric_truncate": geometric_truncate,
    "geometric_mask": geometric_mask,
}
"""Importance weights by name: those of `algos.config.ImportanceWeightsName`."""


def weights_of(config: ClippedConfig) -> Callable[..., Tensor] | None:
    """Return the function of a config that gives importance weights, with its limit; None if it has none."""
    if not weighs_samples(config):
        return None
    choice = config.importance_weights or "token_truncate"
    function = losses.by_name(choice=choice, names=NAMED)
    if config.max_importance_weight is None:
        return function
    return partial(function, limit=config.max_importance_weight)


@torch.no_grad()
def with_importance_weights(
    rollout: TensorDict, *, policy: Policy, config: ClippedConfig
) -> tuple[TensorDict, Metrics]:
    """Score a rollout again by the policy, and weight steps that another engine sampled.

    Args:
        rollout: ``[B, T]`` with ``log_prob`` of what sampled, μ.
        policy: the policy before its update, π_old.
        config: says which weights.

    Returns:
        A copy with ``log_prob`` of π_old and ``importance_weight``, float32 ``[B, T]``; metrics. Without importance
        weights the rollout itself, and no metrics.

    Raises:
        ValueError: if a function of the user's does not return a finite number of at least 0 for each step.
    """
    weights_of_steps = weights_of(config)
    if weights_of_steps is None:
        return rollout, {}

    # Scores of the policy
    def score(rows: TensorDict) -> list[Tensor]:
        return [policy.evaluate(rows).log_prob]

    mask = rollout["mask"]
    (log_prob,) = collectives.map_rows(score, rollout)
    log_ratio = losses.log_ratio(log_prob=log_prob, old_log_prob=rollout["log_prob"], mask=mask)

    # Weights: of rows, which are answers if the policy is sequential; else each step is a row of its own
    shape = mask.shape if policy.sequential else (mask.numel(),)
    arguments = {"log_ratio": log_ratio.reshape(shape), "mask": mask.reshape(shape)}
    weight = weights_of_steps(**arguments)
    _check_weight(weight, **arguments)
    weight = torch.where(mask, weight.reshape(mask.shape), 0.0)

    metrics = {
        "policy/sampler_gap": masked_mean(log_ratio.abs(), mask=mask).item(),
        "policy/importance_weight": masked_mean(weight, mask=mask).item(),
        "policy/importance_dropped": masked_mean((weight == 0).float(), mask=mask).item(),
    }
    columns = {"log_prob": torch.where(mask, log_prob, 0.0), "importance_weight": weight}
    return rollout.copy().update(columns), metrics


def _check_weight(weight: Tensor, *, log_ratio: Tensor, mask: Tensor) -> None:
    """Raise a ValueError unless a function, perhaps one of the user's, returned a weight for each step."""
    expected = f"expected one number of at least 0 for each step, {tuple(log_ratio.shape)} as log_ratio and mask"
    if not isinstance(weight, Tensor):
        raise ValueError(f"importance_weights returned {weight!r:.200}, {expected}")
    if weight.shape != log_ratio.shape:
        raise ValueError(f"importance_weights returned shape {tuple(weight.shape)}, {expected}")
    wrong = mask & ~((weight >= 0) & weight.isfinite())
    if wrong.any():
        raise ValueError(f"importance_weights returned {weight[wrong][0].item()}, {expected}")
