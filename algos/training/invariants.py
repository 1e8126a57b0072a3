"""Invariants that are checked during training and raise an error when violated.

Checks at every minibatch use values that are computed anyway (gradient norm, loss); the others run once per
iteration. Details are computed only after a failure.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from textenv.errors import InvariantError as InvariantError
from textenv.lm.model import language_model_of
from textenv.rollout import Evaluation, least_precise_dtype, ratio_gap, start_tolerance, tolerance_note
from textenv.state import is_our_code

if TYPE_CHECKING:
    from algos.policies.policy import Policy

ENTROPY_TOLERANCE = 1e-3
"""Nats below 0 that count as rounding of an entropy."""
WHITE_TOLERANCE = 1e-2
"""Maximum distance of whitened advantages' mean from 0 and of their standard deviation from 1."""
EQUAL_SPREAD = 1e-5
"""Relative spread below which float32 advantages count as equal: whitening would only amplify their rounding."""

CAUSES = {
    "observation": "The environment returned it: check its reset() and step().",
    "reward": "The environment or a KL penalty returned it: check its divisions and logarithms.",
    "log_prob": "Are the policy's weights finite, and is any action available there? Did evaluation overflow?",
    "reference_log_prob": "Does the reference forbid an action that the policy allows, or overflow in a short dtype?",
    "kl": "Does the reference forbid an action that the policy allows? Is an estimator of your own finite?",
    "value": "Are the critic's weights finite? Try a lower learning rate, or scaled rewards.",
    "next_observation": "The environment returned it: check its step() and its final observations.",
    "next_value": "Are the critic's weights finite, and the final observations?",
    "advantage": "Are rewards or values so large that their sums overflow?",
    "value_target": "Are rewards or values so large that their sums overflow?",
}
"""Columns of a rollout, in the order in which non-finite values spread, with advice for each."""


class NonFiniteError(InvariantError, FloatingPointError):
    """A column of a rollout, a loss or a gradient is infinite or NaN."""


def scoring_dtype(policy: "Policy") -> torch.dtype:
    """Return the dtype of a policy's log-probabilities: its autocast's, else the least precise one of its weights."""
    return policy.autocast or least_precise_dtype(policy.parameters())


def check_finite(rollout: TensorDict, *names: str) -> None:
    """Check that the named columns are finite at the True entries; missing columns pass.

    Raises:
        NonFiniteError: names the first column in `CAUSES` that is not finite, which is the cause.
    """
    for name in names:
        column = rollout.get(name, None)
        # A sum is finite if all its terms are, unless it overflows; then the terms are checked.
        if column is None or not column.is_floating_point() or math.isfinite(column.sum().item()):
            continue
        bad = _not_finite_where_used(name, column, rollout)
        if not bad.any():
            continue

        # The cause may be an earlier column
        cause = name
        earliest = first_not_finite(rollout)
        if earliest is not None:
            cause, bad = earliest
        values = rollout[cause][bad][:3].tolist()
        raise NonFiniteError(
            f"found {values}, expected finite numbers. {CAUSES[cause]}", tensor=cause, batch=rollout, bad=bad
        )


def not_finite(column: Tensor, batch: TensorDict) -> Tensor:
    """Return a bool tensor of the batch's shape: True where a column is not finite, inside the mask if there is one."""
    bad = ~column.isfinite()
    if bad.ndim > batch.ndim:  # [B, T, ...] -> [B, T]
        bad = bad.flatten(batch.ndim).any(-1)
    if "mask" in batch.keys():
        bad = bad & batch["mask"]
    return bad


def first_not_finite(batch: TensorDict) -> tuple[str, Tensor] | None:
    """Return the first column of `CAUSES` that is not finite, and `not_finite` of it; None if all are finite."""
    for name in CAUSES:
        column = batch.get(name, None)
        if column is None or not column.is_floating_point():
            continue
        bad = _not_finite_where_used(name, column, batch)
        if bad.any():
            return name, bad
    return None


def _not_finite_where_used(name: str, column: Tensor, batch: TensorDict) -> Tensor:
    """`not_finite` of a column, without what comes after a termination, which is not used."""
    bad = not_finite(column, batch)
    if name.startswith("next_") and "terminated" in batch.keys():
        bad = bad & ~batch["terminated"]
    return bad


def check_inert(rollout: TensorDict, *names: str) -> None:
    """Check that the named columns are 0 outside the mask, so that masked entries have no effect.

    Raises:
        InvariantError: names the column.
    """
    mask = rollout["mask"]
    if mask.all():
        return
    for name in names:
        column = rollout.get(name, None)
        if column is not None and torch.count_nonzero(column.masked_fill(mask, 0)):
            bad = (column != 0) & ~mask
            raise InvariantError(
                f"found {column[bad][:3].tolist()} where the mask is False, expected 0: actions that the policy did "
                "not choose would affect the loss. Apply the mask where this column is computed.",
                tensor=name,
                batch=rollout,
                bad=bad,
            )


def check_advantages(rollout: TensorDict) -> None:
    """Apply `check_finite` and `check_inert` to advantages and, if present, value targets."""
    check_finite(rollout, "advantage", "value_target")
    check_inert(rollout, "advantage", "value_target")


def check_whitened(batch: TensorDict, *, raw: Tensor) -> None:
    """Check that whitened advantages have mean 0 and standard deviation 1 over the mask.

    Advantages that were all equal before whitening pass.

    Args:
        batch: has the ``advantage`` to check.
        raw: the advantages before whitening, of the same shape.

    Raises:
        InvariantError: if they do not.
    """
    # Mean and standard deviation
    mask = batch["mask"]
    white = batch["advantage"]
    if not bool(mask.all()):
        white = white[mask]
    if white.numel() < 2:
        return
    variance_tensor, mean_tensor = torch.var_mean(white, correction=0)
    mean = mean_tensor.item()
    std = variance_tensor.item() ** 0.5
    if abs(mean) <= WHITE_TOLERANCE and abs(std - 1) <= WHITE_TOLERANCE:
        return

    # They are wrong, unless the advantages were equal
    raw_values = raw[mask].double()
    raw_mean = raw_values.mean().item()
    raw_std = raw_values.std(correction=0).item()
    largest = raw_values.abs().max().item()
    if raw_std > max(EQUAL_SPREAD * largest, 1e-6):
        cause = "Was the mask omitted, or another mean subtracted?"
        if largest**2 > torch.finfo(raw.dtype).max:
            cause = f"Advantages of {largest:.3g} overflow when they are squared: scale the rewards down."
        raise InvariantError(
            f"after whitening the mean is {mean:.3g} and the standard deviation {std:.3g}, expected 0 and 1 "
            f"(tolerance {WHITE_TOLERANCE}; before whitening {raw_mean:.3g} and {raw_std:.3g}). {cause}",
            tensor="advantage",
            batch=batch.copy().set("advantage_before", raw),
            bad=mask,
        )


def check_evaluation(evaluation: Evaluation, policy: object) -> None:
    """Check what `evaluate` of a policy of the user's own returned; those of this library are not checked.

    Raises:
        ValueError: if the entropy is no tensor, or the log-probabilities of a policy that learns have no gradient.
    """
    if is_our_code(type(policy)):
        return
    name = type(policy).__name__
    if not isinstance(evaluation.entropy, Tensor):
        raise ValueError(
            f"{name}.evaluate returned an Evaluation whose entropy is {evaluation.entropy!r:.100}, expected a tensor "
            "like log_prob; zeros if it is not known"
        )
    if torch.is_grad_enabled() and not evaluation.log_prob.requires_grad:
        raise ValueError(
            f"{name}.evaluate returned a log_prob without a gradient, so the policy would not learn: compute it from "
            "the weights, outside of torch.no_grad() and without detach()"
        )


def check_first(
    log_ratio: Tensor, *, batch: TensorDict, evaluation: Evaluation, policy: "Policy", tolerance: float | None = None
) -> None:
    """Check, before the first step of an update, that all ratios are 1 and that discrete entropies are not negative.

    Args:
        log_ratio: log-ratios of the minibatch, 0 where the mask is False.
        batch: the minibatch.
        evaluation: the policy's evaluation of the batch.
        policy: the policy; it computes in `scoring_dtype`.
        tolerance: maximum of `textenv.rollout.ratio_gap`, nats; None: `start_tolerance` of the dtype.

    Raises:
        ValueError: as `check_evaluation`.
        InvariantError: on log-probabilities that differ by more than the tolerance, so that a ratio is not 1; or on a
            negative entropy of discrete actions. NaN is left to the gradient check, since the gradient is NaN too
            (`algos.optimizer.Optimizer.step`); an infinite ratio is refused here: its gradient may be 0.
    """
    check_evaluation(evaluation, policy)

    # Tolerance
    if log_ratio.isnan().any():
        return
    language_model = language_model_of(policy)
    choices: Sequence[str] = ()
    if language_model is not None:
        choices = language_model.hard_choices
    dtype = scoring_dtype(policy)
    if tolerance is None:
        tolerance = start_tolerance(dtype, choices)

    # Ratios
    gap = log_ratio.detach().abs()
    if not ratio_gap(gap, mask=batch["mask"], dtype=dtype, choices=choices) <= tolerance:
        bad = ~(gap <= tolerance)
        scored = evaluation.log_prob.detach()
        note = tolerance_note(dtype, choices)
        raise InvariantError(
            f"before the first step of an update evaluate() gives log-probabilities up to {gap.max().item():.3g} nats "
            f"away from those that the actions were sampled with (tolerance {tolerance}{note}; sampled "
            f"{batch['log_prob'][bad][:3].tolist()}, evaluated {scored[bad][:3].tolist()}): evaluate() and act() "
            "disagree. Does dropout, temperature, a mask or state differ between them? If it is only rounding, which a "
            "low temperature amplifies, raise ratio_tolerance in the config; if another model or engine sampled them, "
            "set max_importance_weight.",
            tensor="log_prob",
            batch=batch.copy().set("scored_log_prob", scored),
            bad=bad,
        )

    # Entropies
    if batch["action"].is_floating_point():
        return  # a differential entropy may be negative
    entropy = torch.where(batch["mask"], evaluation.entropy.detach(), 0.0)
    if entropy.numel() and not entropy.min().item() >= -ENTROPY_TOLERANCE:
        bad = ~(entropy >= -ENTROPY_TOLERANCE)
        raise InvariantError(
            f"evaluate() returned {entropy[bad][:3].tolist()} nats, but the entropy of discrete actions, -Σ p log p, "
            "is at least 0. Is a sign wrong, or do the probabilities not sum to 1?",
            tensor="entropy",
            batch=batch.copy().set("entropy", entropy),
            bad=bad,
        )
