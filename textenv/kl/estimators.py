"""Estimators of KL(π‖π_ref) from log π(a|s) - log π_ref(a|s) at sampled actions (Schulman 2020, "Approximating KL").

An estimator with the right mean can have the wrong gradient: that depends on whether it is used in the reward or in the
loss. See the table in `textenv.kl.penalty.KLPenalty`.
"""

import warnings
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType

import torch
from torch import Tensor

Estimator = Callable[[Tensor], Tensor]
"""Function from log π(a|s) - log π_ref(a|s) of sampled actions to elementwise KL estimates."""


def k1(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio itself: unbiased, positive or negative."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return half the squared log-ratio: biased, never negative, but with the expected gradient of the exact KL."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """Return ``π_ref/π - 1 + log(π/π_ref)``: unbiased, never negative; noisy where ``π_ref/π`` is large."""
    return (-log_ratio).expm1() + log_ratio


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}
EXACT = "exact"
"""Exact KL: sum over all actions at each state instead of sampling."""
PLACES = ("reward", "loss")
"""Where a KL penalty is charged."""

_WRONG_GRADIENTS = {
    ("k2", "reward"): (
        "its expected gradient is not that of the KL: it weighs actions by half the squared log-ratio, which has no "
        "sign and is of second order near the reference (the KL's weight is of first order). "
        "Use 'k1' in the reward, or 'k2' in the loss"
    ),
    ("k3", "reward"): (
        "its expected gradient is that of KL(π‖π_ref) - KL(π_ref‖π): near the reference the two cancel, so the "
        "policy drifts freely. Use 'k1' in the reward"
    ),
    ("exact", "reward"): (
        "the KL of a state does not depend on the action taken there, so its expected gradient ignores the current "
        "state and counts only later states (0 for one step). Use 'k1' in the reward, or 'exact' in the loss"
    ),
    ("k3", "loss"): (
        "its expected gradient is that of the other direction, KL(π_ref‖π), as in GRPO. "
        "Use 'k2' or 'exact' in the loss for KL(π‖π_ref)"
    ),
}
"""Combinations whose expected gradient is not that of KL(π‖π_ref), with an explanation."""


_K1_IN_THE_LOSS = (
    "in the first step of an update its expected gradient is 0 (as E[∇ log π] = 0), and in later steps it drives the "
    "policy away from its samples (docs/results/kl-gradients.md). Use 'k2' or 'exact' in the loss, or place='reward'"
)


def choose_estimator(estimator: str | Estimator, *, place: str) -> tuple[str, Estimator | None]:
    """Return name and function of an estimator; the function is None for the exact KL.

    Args:
        estimator: a key of `ESTIMATORS`, ``"exact"``, or a function, whose gradient is only checked for being
            that of k1 in the loss.
        place: ``"reward"`` or ``"loss"``.

    Raises:
        ValueError: on an unknown name or place, and on k1 in the loss, whose expected gradient is 0.

    Warns:
        UserWarning: if the expected gradient is not that of KL(π‖π_ref); the message describes it.
    """
    if place not in PLACES:
        raise ValueError(f"place is {place!r}, expected 'reward' or 'loss'")

    # Name and function
    if isinstance(estimator, str):
        if estimator not in (*ESTIMATORS, EXACT):
            raise ValueError(f"estimator is {estimator!r}, expected {', '.join(ESTIMATORS)}, {EXACT}, or a function")
        name = estimator
        function = ESTIMATORS.get(name)
    else:
        names = {function: name for name, function in ESTIMATORS.items()}
        if estimator not in names:
            function_name = _function_name(estimator)
            if place == "loss" and _is_linear(estimator):
                warnings.warn(f"{function_name!r} is linear in the log-ratio, as k1: {_K1_IN_THE_LOSS}.", stacklevel=4)
            return function_name, estimator
        name = names[estimator]
        function = estimator

    # Is its expected gradient that of the KL?
    if (name, place) == ("k1", "loss"):
        raise ValueError(f"k1 in the loss is no penalty: {_K1_IN_THE_LOSS}")
    if (name, place) in _WRONG_GRADIENTS:
        warnings.warn(f"KL estimator {name!r} in the {place}: {_WRONG_GRADIENTS[name, place]}.", stacklevel=4)
    return name, function


def _is_linear(estimator: Estimator) -> bool:
    """Return whether the derivative of an estimator is the same at several log-ratios; False if it has none."""
    log_ratio = torch.tensor([-2.0, -0.5, 0.1, 1.0, 3.0], requires_grad=True)
    try:
        (slope,) = torch.autograd.grad(estimator(log_ratio).sum(), log_ratio)
    except Exception:  # a user's function may expect other shapes
        return False
    return bool((slope - slope[0]).abs().max() < 1e-6)


def _function_name(estimator: Estimator) -> str:
    """Return the name of a user's estimator; ``"function"`` for a callable object."""
    if isinstance(estimator, (FunctionType, BuiltinFunctionType)):
        return estimator.__name__
    return "function"
