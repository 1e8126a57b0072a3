"""KL penalties towards a reference policy: ``reward_t = score_t - coef * kl_t``, or ``kl_t`` in the loss.

`KLPenalty` is the batched form that the kit's agents use. For other agents, there are two wrappers in
`textenv.envs.kl_wrappers`.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from textenv.errors import InvariantError
from textenv.kl.coefficients import CoefficientLike, as_coefficient
from textenv.kl.estimators import Estimator, choose_estimator
from textenv.lm.model import LanguageModel, language_model_of
from textenv.names import check_names
from textenv.rollout import Reference, median_note, ratio_gap, start_tolerance


class KLPenalty:
    """KL penalty towards a reference policy: adds ``reference_log_prob`` and ``kl`` to rollouts.

    With ``place="reward"`` it also subtracts β·KL from ``reward``. With ``place="loss"`` the algorithm adds β times the
    minibatch mean of the KL. "Right" means: the expected gradient is that of KL(π‖π_ref) at the visited states.

    =========  ==================================================  ===========================================
    estimator  in the reward                                       in the loss
    =========  ==================================================  ===========================================
    ``k1``     **right**                                           refused: gradient 0
    ``k2``     wrong: second-order near the reference              **right**, while on-policy
    ``k3``     wrong: that of KL(π‖π_ref) - KL(π_ref‖π)            wrong: that of KL(π_ref‖π) (GRPO)
    ``exact``  wrong: counts only later states (if none, 0)        **right**
    =========  ==================================================  ===========================================

    Wrong combinations warn. In the reward, returns carry the KL of later states back to the actions that lead there; a
    loss does not, so for whole texts only ``k1`` in the reward has the optimum π* ∝ π_ref·exp(r/β). "While on-policy"
    means the first minibatch of an update; in later ones, no correction is made for the difference between the policy
    and the one that acted (PPO's clipping keeps it small).

    Args:
        reference: any object with ``evaluate(rollout)``, such as a `LanguageModel` or ``policy.reference()``; or a
            function without arguments that returns one, called at first use.
        coef: β ≥ 0, reward per nat; a function of the number of steps so far; or a changing coefficient from
            `textenv.kl.coefficients`.
        estimator: ``"k1"``, ``"k2"``, ``"k3"``, ``"exact"`` (sum over all actions by ``policy.divergence``; needs a
            reference of the policy's kind), or a function of the log-ratio.
        place: ``"reward"`` or ``"loss"``.

    Raises:
        ValueError: if coefficient, estimator or place is invalid, or (when called) if the reference shares trained
            weights.
        InvariantError: when called, if the KL is not 0 although the reference starts with the policy's weights, or if
            the reference's weights have changed since the first call.

    Warns:
        UserWarning: on the combinations marked wrong above.

    Example:
        >>> penalty = KLPenalty(policy.reference(), AdaptiveCoefficient(0.1, target=6.0))  # doctest: +SKIP
    """

    @check_names
    def __init__(
        self,
        reference: Reference | Callable[[], Reference],
        coef: CoefficientLike,
        estimator: str | Estimator = "k1",
        place: Literal["reward", "loss"] = "reward",
    ) -> None:
        self._coefficient = as_coefficient(coef)
        self.estimator, self._estimate = choose_estimator(estimator, place=place)
        self.place = place
        self._reference = reference
        self._hashes: dict[str, int] | None = None  # of the reference's tensors, from the first call on
        self._unfinished_kl = 0.0  # nats, since the last update with finished episodes

    @property
    def reference(self) -> Reference:
        """The reference policy, loaded at first use."""
        if not isinstance(self._reference, Reference):
            self._reference = self._reference()
        return self._reference

    @property
    def coef(self) -> float:
        """Current β."""
        return self._coefficient.value

    @torch.no_grad()
    def __call__(
        self, rollout: TensorDict, policy: Any, *, tolerance: float | None = None, other_sampler: bool = False
    ) -> None:
        """Add the KL to the rollout in place; the coefficient does not change.

        Args:
            rollout: rollout with ``log_prob``; see `textenv.rollout`.
            policy: the policy that acted; the reference gets its temperature, and moves to the rollout's device.
            tolerance: at the first call, the largest KL of equal weights, nats: ``ratio_tolerance`` of a config. None:
                by the dtype.
            other_sampler: another engine may have sampled, and the update corrects for it: the first call then compares
                the reference with the policy's own scores instead of ``log_prob``.
        """
        reference, mask = self.reference, rollout["mask"]
        if (module := _scoring_module(reference)) is not None:
            module.to(mask.device)
        first, self._hashes = self._hashes is None, _unchanged(reference, policy, self._hashes, rollout)
        own, other = language_model_of(policy), language_model_of(reference)
        if own is not None and other is not None:
            other.temperature = own.temperature
        reference_log_prob = reference.evaluate(rollout).log_prob
        # Applied before the estimator, so that entries outside the mask are never used.
        log_ratio = torch.where(mask, rollout["log_prob"] - reference_log_prob, 0.0)
        rollout["reference_log_prob"] = torch.where(mask, reference_log_prob, 0.0)
        rollout["kl"] = torch.where(mask, self._kl(rollout, log_ratio, policy), 0.0)
        if self.place == "reward":
            rollout["reward"] = rollout["reward"] - self.coef * rollout["kl"]
        if first and _start_alike(policy, reference):
            kl = rollout["kl"]
            if other_sampler:
                scorer = policy if own is None else own
                scored = scorer.evaluate(rollout).log_prob
                log_ratio = torch.where(mask, scored - reference_log_prob, 0.0)
                kl = torch.where(mask, self._kl(rollout, log_ratio, policy), 0.0)
            _check_start(rollout, log_ratio, kl, policy, tolerance)

    def loss(self, part: TensorDict, *, log_prob: Tensor, policy: Any) -> Tensor:
        """Return β times the KL, one number per entry, 0 where the mask is False; for ``place="loss"``.

        Args:
            part: part of a rollout that the penalty was called on.
            log_prob: log π of the part's actions under the current policy, with gradient.
            policy: the current policy.
        """
        mask = part["mask"]
        log_ratio = torch.where(mask, log_prob - part["reference_log_prob"], 0.0)
        return self.coef * torch.where(mask, self._kl(part, log_ratio, policy), 0.0)

    def update(self, rollout: TensorDict) -> None:
        """Adapt the coefficient to a rollout that the penalty was called on; call it after the policy update.

        KL per episode: the sum since the last rollout with finished episodes, divided by the episodes finished now.
        """
        mask = rollout["mask"]
        self._unfinished_kl += torch.where(mask, rollout["kl"], 0.0).sum().item()
        episodes = int((rollout["terminated"] | rollout["truncated"]).sum())
        self._coefficient.update(kl=self._unfinished_kl / episodes if episodes else None, steps=int(mask.sum()))
        if episodes:
            self._unfinished_kl = 0.0

    def state_dict(self) -> dict[str, Any]:
        """State that changes during training, for JSON."""
        return {
            "coefficient": self._coefficient.state_dict(),
            "open_kl": self._unfinished_kl,
            "reference": None if self._hashes is None else {name: str(x) for name, x in self._hashes.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            ValueError: if the state belongs to another kind of coefficient.
        """
        self._coefficient.load_state_dict(state["coefficient"])
        self._unfinished_kl = state["open_kl"]
        if state.get("reference") is not None:
            self._hashes = {name: int(x) for name, x in state["reference"].items()}

    def _kl(self, rollout: TensorDict, log_ratio: Tensor, policy: Any) -> Tensor:
        return policy.divergence(rollout, self.reference) if self._estimate is None else self._estimate(log_ratio)


def _unchanged(reference: Any, policy: Any, before: dict[str, int] | None, rollout: TensorDict) -> dict[str, int]:
    """Hash each tensor of the reference (if not a module, it has none); raise if one has changed."""
    module, own = _scoring_module(reference), _scoring_module(policy)
    # The state of a frozen adapter's model also lists trained weights: skip them (`_start_alike` refuses shared ones).
    trained = set() if own is None else {p.data_ptr() for p in own.parameters() if p.requires_grad}
    named = {} if module is None else module.state_dict()
    tensors = {name: x for name, x in named.items() if x.numel() and x.data_ptr() not in trained}
    # A cheap xor of the bits: differs if one value changes, not always if two do; one-byte dtypes are hashed as uint8.
    hashes = [torch.hash_tensor(x if x.element_size() > 1 else x.view(torch.uint8)).to("cpu") for x in tensors.values()]
    found = dict(zip(tensors, torch.stack(hashes).tolist() if hashes else [], strict=True))
    changed = [name for name in found if before is not None and found[name] != before.get(name)]
    if changed:
        raise InvariantError(
            f"the reference has changed ({len(changed)} of its {len(found)} tensors) since the first rollout, "
            "so the KL no longer measures the distance from the initial policy. Does an optimizer have its "
            "parameters, or does it share them? Pass policy.reference(), which is never trained.",
            tensor=f"reference.{changed[0]}",
            batch=rollout,
        )
    return found


def _start_alike(policy: Any, reference: Any) -> bool:
    """Return True if the reference has the policy's weights; frozen ones may be shared.

    Raises:
        ValueError: if it shares trained weights.
    """
    policy_module = _scoring_module(policy)
    reference_module = _scoring_module(reference)
    if policy_module is None or reference_module is None:
        return False
    trained = {p.data_ptr() for p in policy_module.parameters() if p.requires_grad}
    if trained & {p.data_ptr() for p in reference_module.parameters()}:
        raise ValueError(
            "the reference shares the policy's weights, so its KL would always be 0: pass policy.reference(), "
            "or a deep copy of the policy"
        )
    weights = policy_module.state_dict()
    reference_weights = reference_module.state_dict()
    if weights.keys() != reference_weights.keys():
        return False
    return all(torch.equal(weights[name], reference_weights[name]) for name in weights)


def _check_start(rollout: TensorDict, log_ratio: Tensor, kl: Tensor, policy: Any, tolerance: float | None) -> None:
    """Raise if a reference of equal weights has another log-probability, or a KL other than 0.

    Both are checked, as an estimator of the user's may violate KL(π‖π) = 0. The tolerance is that of
    `textenv.rollout.ratio_gap`, nats; None: by the dtype.
    """
    module = _scoring_module(policy)
    assert module is not None
    choices: tuple[str, ...] = ()
    computed_in = next(module.parameters()).dtype
    if isinstance(module, LanguageModel):
        choices = module.hard_choices
        computed_in = module.autocast or computed_in
    if tolerance is None:
        tolerance = start_tolerance(computed_in, choices)
    gap = torch.maximum(log_ratio.abs(), kl.abs())
    if not ratio_gap(gap, mask=rollout["mask"], choices=choices) <= tolerance:
        raise InvariantError(
            f"policy and reference have the same weights, but their log-probabilities or the KL differ from 0 "
            f"by up to {gap.max().item():.3g} nats (tolerance {tolerance}{median_note(choices)}): is dropout on, or do "
            "temperature or forbidden tokens differ? If it is only rounding, which a low temperature amplifies, raise "
            "ratio_tolerance in the config.",
            tensor="kl",
            batch=rollout,
            bad=~(gap <= tolerance),
        )


def _scoring_module(holder: Any) -> nn.Module | None:
    """The module that computes log-probabilities: a language model, else the policy or reference itself."""
    lm = language_model_of(holder)
    return lm if lm is not None else holder if isinstance(holder, nn.Module) else None
