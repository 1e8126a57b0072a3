"""KL penalties towards a reference policy: ``reward_t = score_t - coef * kl_t``, or ``kl_t`` in the loss.

`KLPenalty` is the batched form that our agents use. For agents that know nothing of rollouts there are two
wrappers in `textenv.envs.kl_wrappers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from textenv.errors import InvariantError
from textenv.kl.coefficients import Coefficient, as_coefficient
from textenv.kl.estimators import EXACT, Estimator, resolve
from textenv.rollout import Reference


class KLPenalty:
    """Charges a policy for leaving the reference: adds ``reference_log_prob`` and ``kl`` to rollouts.

    In the reward, ``reward`` is changed too. In the loss, β times the mean of the KL over the steps of a minibatch is
    added by the algorithm. The expected gradient is that of KL(π‖π_ref) at the states visited, or it is not:

    =========  ==================================================  ===========================================
    estimator  in the reward                                       in the loss
    =========  ==================================================  ===========================================
    ``k1``     **right**                                           0, refused
    ``k2``     wrong: of second order near the reference           **right**, while on-policy
    ``k3``     wrong: that of KL(π‖π_ref) - KL(π_ref‖π)            wrong: that of KL(π_ref‖π) (GRPO)
    ``exact``  wrong: misses the present state (0 for one step)    **right**
    =========  ==================================================  ===========================================

    The wrong ones warn. In the reward a return carries the KL of later states back to the actions that lead there; a
    loss never does, so over several steps only ``k1`` in the reward has the optimum π* ∝ π_ref·exp(r/β). "While
    on-policy" is the first minibatch of an update; later ones move away from the policy that acted, and nothing
    corrects for it (PPO's clipping keeps it small).

    Args:
        reference: anything with ``evaluate(rollout)``, a `LanguageModel` or ``policy.reference()``. A
            callable without arguments that returns one is called at the first use.
        coef: β ≥ 0, reward per nat; or one that changes, of `textenv.kl.coefficients`.
        estimator: ``"k1"``, ``"k2"``, ``"k3"``, ``"exact"`` (the sum over all actions, by ``policy.divergence``, of the
            policy's own kind), or a function of the log-ratio.
        place: ``"reward"`` or ``"loss"``.

    Raises:
        ValueError: on a coefficient, estimator or place out of range, or (when called) if the reference shares weights
            that train.
        InvariantError: when called, if the reference starts with the policy's own weights and yet the KL is not 0, or
            if the reference's weights have changed since the first call.

    Warns:
        UserWarning: on the combinations that are wrong above.

    Example:
        >>> penalty = KLPenalty(policy.reference(), AdaptiveCoefficient(0.1, target=6.0))  # doctest: +SKIP
    """

    def __init__(
        self,
        reference: Reference | Callable[[], Reference],
        coef: float | Coefficient,
        estimator: str | Estimator = "k1",
        place: Literal["reward", "loss"] = "reward",
    ) -> None:
        self._coefficient = as_coefficient(coef)
        self.estimator, self._estimate = resolve(estimator, place=place)
        self.place = place
        self._reference = reference
        self._hashes: dict[str, int] | None = None  # of the reference's tensors, once it was used
        self._unfinished_kl = 0.0  # nats of episodes that had not ended at the last update

    @property
    def reference(self) -> Reference:
        """The reference policy, loaded at first use."""
        if not hasattr(self._reference, "evaluate"):
            self._reference = self._reference()
        return self._reference

    @property
    def coef(self) -> float:
        """β in force."""
        return self._coefficient.value

    @torch.no_grad()
    def __call__(self, rollout: TensorDict, policy: Any) -> None:
        """Change the rollout in place; the coefficient stays as it is.

        Args:
            rollout: with ``log_prob``; see `textenv.rollout`.
            policy: the policy that acted; the reference is tempered like it.
        """
        reference, mask = self.reference, rollout["mask"]
        first, self._hashes = self._hashes is None, _unchanged(reference, policy, self._hashes, rollout)
        temperature = getattr(policy, "temperature", None)
        scorer = getattr(reference, "lm", reference)  # a policy's language model, or the reference itself
        if temperature is not None and hasattr(scorer, "temperature"):
            scorer.temperature = temperature
        reference_log_prob = reference.evaluate(rollout).log_prob
        # Selected before the estimator, so that what stands outside the mask is never computed with.
        log_ratio = torch.where(mask, rollout["log_prob"] - reference_log_prob, 0.0)
        rollout["reference_log_prob"] = torch.where(mask, reference_log_prob, 0.0)
        rollout["kl"] = torch.where(mask, self._kl(rollout, log_ratio, policy), 0.0)
        if self.place == "reward":
            rollout["reward"] = rollout["reward"] - self.coef * rollout["kl"]
        if first:
            _check_start(rollout, log_ratio, policy, reference)

    def losses(self, part: TensorDict, *, log_prob: Tensor, policy: Any) -> dict[str, Tensor]:
        """What an algorithm adds to its loss: terms by name, one number an entry; none if the reward was charged.

        Args:
            part: of a rollout that the penalty was called on.
            log_prob: log π of its actions by the policy as it is now, with gradient.
            policy: that policy.
        """
        if self.place == "reward":
            return {}
        mask = part["mask"]
        log_ratio = torch.where(mask, log_prob - part["reference_log_prob"], 0.0)
        return {"reference/loss": self.coef * torch.where(mask, self._kl(part, log_ratio, policy), 0.0)}

    def update(self, rollout: TensorDict) -> None:
        """Adapt the coefficient to a rollout that the penalty was called on; after the update that it was charged in.

        The KL an episode is that of all steps since an episode last ended, over the number of those that ended.
        """
        mask = rollout["mask"]
        self._unfinished_kl += torch.where(mask, rollout["kl"], 0.0).sum().item()
        episodes = int((rollout["terminated"] | rollout["truncated"]).sum())
        self._coefficient.update(kl=self._unfinished_kl / episodes if episodes else None, steps=int(mask.sum()))
        if episodes:
            self._unfinished_kl = 0.0

    def state_dict(self) -> dict[str, Any]:
        """What changes while training, for JSON."""
        return {
            "coefficient": self._coefficient.state_dict(),
            "open_kl": self._unfinished_kl,
            "reference": None if self._hashes is None else {name: str(x) for name, x in self._hashes.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            ValueError: if it is another kind of coefficient's.
        """
        self._coefficient.load_state_dict(state["coefficient"])
        self._unfinished_kl = state["open_kl"]
        if state.get("reference") is not None:
            self._hashes = {name: int(x) for name, x in state["reference"].items()}

    def _kl(self, rollout: TensorDict, log_ratio: Tensor, policy: Any) -> Tensor:
        if self._estimate is not None:
            return self._estimate(log_ratio)
        if not hasattr(policy, "divergence"):
            raise ValueError(
                f"estimator {EXACT!r} needs {type(policy).__name__}.divergence(rollout, other) -> [B, T], which it has "
                "not: write it, or take 'k1' in the reward or 'k2' in the loss"
            )
        return policy.divergence(rollout, self.reference)


def _unchanged(reference: Any, policy: Any, before: dict[str, int] | None, rollout: TensorDict) -> dict[str, int]:
    """A hash of each of a reference's tensors, which must be what it was before; of a module, else of nothing."""
    module, own = _language_model(reference), _language_model(policy)
    # Of a frozen adapter's model other names of what trains are listed too; a reference made of them was refused.
    trained = set() if own is None else {p.data_ptr() for p in own.parameters() if p.requires_grad}
    named = {} if module is None else module.state_dict()
    tensors = {name: x for name, x in named.items() if x.numel() and x.data_ptr() not in trained}
    # A sum of bits that any change of a value or two tells, for the price of reading the weights; and of bytes where
    # the dtype has none.
    hashes = [torch.hash_tensor(x if x.element_size() > 1 else x.view(torch.uint8)).to("cpu") for x in tensors.values()]
    found = dict(zip(tensors, torch.stack(hashes).tolist() if hashes else [], strict=True))
    changed = [name for name in found if before is not None and found[name] != before.get(name)]
    if changed:
        raise InvariantError(
            f"the reference has changed ({len(changed)} of its {len(found)} tensors) since the first rollout was "
            "compared with it, so the KL is no distance from where training began. Does an optimiser have its "
            "parameters, or does it share them? Pass policy.reference(), which nothing trains.",
            tensor=f"reference.{changed[0]}",
            batch=rollout,
        )
    return found


def _check_start(rollout: TensorDict, log_ratio: Tensor, policy: Any, reference: Any) -> None:
    """A reference has weights of its own; a policy that starts with equal ones has KL 0, or one is scored wrongly.

    Weights that do not train may be shared.
    """
    own, other = _language_model(policy), _language_model(reference)
    if own is None or other is None:
        return
    trained = {p.data_ptr() for p in own.parameters() if p.requires_grad}
    if trained & {p.data_ptr() for p in other.parameters()}:
        raise ValueError(
            "the reference shares the policy's weights, so its KL would be 0 for ever: pass policy.reference(), "
            "or a deep copy of the policy"
        )
    if not _same_weights(own, other):
        return
    # What is charged, and what it was made from: an estimator of one's own may have forgotten that KL(π‖π) is 0.
    gap = torch.maximum(log_ratio.abs(), rollout["kl"].abs())
    worst = gap.max().item()
    computed_in = getattr(own, "autocast", None) or next(own.parameters()).dtype
    tolerance = 1e-3 if computed_in == torch.float32 else 0.1
    if not worst <= tolerance:
        raise InvariantError(
            f"policy and reference have the same weights, yet their log-probabilities or the KL made from them differ "
            f"by up to {worst:.3g} nats (tolerance {tolerance}): dropout on, another temperature or other forbidden "
            "tokens in one of them?",
            tensor="kl",
            batch=rollout,
            bad=~(gap <= tolerance),
        )


def _language_model(holder: Any) -> nn.Module | None:
    found = getattr(holder, "lm", holder)
    return found if isinstance(found, nn.Module) else None


def _same_weights(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
