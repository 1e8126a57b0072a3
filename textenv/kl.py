"""KL penalties towards a reference policy: ``reward_t = score_t - coefficient * kl_t``.

`KLPenalty` is the batched form that our agents use. For agents that know nothing of rollouts there are two
wrappers in `textenv.kl_wrappers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from textenv.rollout import Reference

Estimator = Callable[[Tensor], Tensor]
"""From log π(a|s) - log π_ref(a|s) of sampled actions to an estimate of the KL divergence, elementwise."""


def k1(log_ratio: Tensor) -> Tensor:
    """The log-ratio itself: unbiased, and as a reward its gradient is that of the exact KL.

    Source: Schulman 2020, "Approximating KL divergence", k1.
    """
    return log_ratio


class KLPenalty:
    """Charges a rollout for leaving the reference: adds ``reference_log_prob`` and ``kl``, changes ``reward``.

    Args:
        reference: anything with ``evaluate(rollout)``, a `LanguageModel` or a frozen copy of the policy. A
            callable without arguments that returns one is called at the first use.
        coefficient: β ≥ 0, reward per nat.
        estimator: of the KL at each action; `k1` by default.

    Raises:
        ValueError: if the coefficient is negative, or (when called) if the reference starts with the policy's
            own weights and yet gives other log-probabilities.

    Example:
        >>> penalty = KLPenalty(policy.reference(), coefficient=0.1)  # doctest: +SKIP
    """

    def __init__(
        self, reference: Reference | Callable[[], Reference], coefficient: float, estimator: Estimator = k1
    ) -> None:
        if not coefficient >= 0:
            raise ValueError(f"coefficient is {coefficient}, expected a number of at least 0 (reward per nat)")
        self._reference = reference
        self.coefficient = coefficient
        self.estimator = estimator
        self._checked = False

    @property
    def reference(self) -> Reference:
        """The reference policy, loaded at first use."""
        if not hasattr(self._reference, "evaluate"):
            self._reference = self._reference()
        return self._reference

    @torch.no_grad()
    def __call__(self, rollout: TensorDict, policy: Any) -> None:
        """Change the rollout in place.

        Args:
            rollout: with ``log_prob``; see `textenv.rollout`.
            policy: the policy that acted; the reference is tempered like it.
        """
        reference, mask = self.reference, rollout["mask"]
        temperature = getattr(policy, "temperature", None)
        scorer = getattr(reference, "lm", reference)  # a policy's language model, or the reference itself
        if temperature is not None and hasattr(scorer, "temperature"):
            scorer.temperature = temperature
        reference_log_prob = reference.evaluate(rollout).log_prob
        # Selected before the estimator, so that what stands outside the mask is never computed with.
        log_ratio = torch.where(mask, rollout["log_prob"] - reference_log_prob, 0.0)
        rollout["reference_log_prob"] = torch.where(mask, reference_log_prob, 0.0)
        rollout["kl"] = torch.where(mask, self.estimator(log_ratio), 0.0)
        rollout["reward"] = rollout["reward"] - self.coefficient * rollout["kl"]
        if not self._checked:
            self._checked = True
            _check_start(log_ratio, policy, reference)


def _check_start(log_ratio: Tensor, policy: Any, reference: Any) -> None:
    """A reference has weights of its own; a policy that starts with equal ones has KL 0, or one is scored wrongly."""
    own, other = _language_model(policy), _language_model(reference)
    if own is not None and other is not None:
        own_places = {p.data_ptr() for p in own.parameters()}
        if own_places & {p.data_ptr() for p in other.parameters()}:
            raise ValueError(
                "the reference shares the policy's weights, so its KL would be 0 for ever: pass policy.reference(), "
                "or a deep copy of the policy"
            )
    if own is None or other is None or not _same_weights(own, other):
        return
    worst = log_ratio.abs().max().item()
    tolerance = 1e-3 if next(own.parameters()).dtype == torch.float32 else 0.1
    if not worst <= tolerance:
        raise ValueError(
            f"policy and reference have the same weights, yet their log-probabilities differ by up to {worst:.3g} nats "
            f"(tolerance {tolerance}): dropout on, another temperature or other forbidden tokens in one of them?"
        )


def _language_model(holder: Any) -> nn.Module | None:
    found = getattr(holder, "lm", holder)
    return found if isinstance(found, nn.Module) else None


def _same_weights(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
