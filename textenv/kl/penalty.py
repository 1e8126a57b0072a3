"""KL penalties towards a reference policy: ``reward_t = score_t - coef * kl_t``, or ``kl_t`` in the loss.

`KLPenalty` is the batched form that the kit's agents use. For other agents, there are two wrappers in
`textenv.envs.kl_wrappers`.
"""

from collections.abc import Callable
from typing import Any, Literal, NotRequired, Protocol, TypedDict

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from textenv.errors import InvariantError
from textenv.kl.coefficients import CoefficientLike, as_coefficient
from textenv.kl.estimators import Estimator, choose_estimator
from textenv.lm.loading import check_same_vocabulary
from textenv.lm.model import LanguageModel, language_model_of
from textenv.names import check_names
from textenv.rollout import Reference, least_precise_dtype, ratio_gap, start_tolerance, tolerance_note


class _Policy(Reference, Protocol):
    """What the penalty needs of the policy: scores of actions and, for the exact KL, the divergence."""

    def divergence(self, rollout: TensorDict, other: Any) -> Tensor:
        """Return the exact KL to another policy of the same kind, ``[B, T]``, nats."""


class PenaltyState(TypedDict):
    """What changes in a `KLPenalty` during training, for JSON."""

    coefficient: dict[str, float]
    """State of the coefficient."""
    open_kl: float
    """KL of episodes that have not ended yet, nats."""
    reference: NotRequired[dict[str, str] | None]
    """Hashes of the reference's parameters by name, in digits; None before the first rollout."""


class KLPenalty:
    """KL penalty towards a reference policy: adds ``reference_log_prob`` and ``kl`` to rollouts.

    With ``place="reward"`` it also subtracts β·KL from ``reward``. With ``place="loss"`` the algorithm adds β times the
    minibatch mean of the KL. "Right" means: the expected gradient is that of KL(π‖π_ref) at the visited states.

    =========  ==================================================  ===========================================
    estimator  in the reward                                       in the loss
    =========  ==================================================  ===========================================
    ``k1``     **right**                                           refused: gradient 0
    ``k2``     wrong: second-order near the reference              **right**, while on-policy
    ``k3``     wrong: gradient of KL(π‖π_ref) - KL(π_ref‖π)        wrong: gradient of KL(π_ref‖π) (GRPO)
    ``exact``  wrong: counts only later states (if none, 0)        **right**
    =========  ==================================================  ===========================================

    Wrong combinations warn. In the reward, returns carry the KL of later states back to the actions that lead there; a
    loss does not. So for whole texts only ``k1`` in the reward has the optimum π* ∝ π_ref·exp(r/β). "While on-policy"
    means the first minibatch of an update. In later minibatches the policy differs from the one that acted, and this is
    not corrected (PPO's clipping keeps the difference small).

    Args:
        reference: any object with ``evaluate(rollout)``, such as ``policy.reference()``, or a `LanguageModel` of any
            size with the policy's tokenizer (a teacher, docs/distillation.md); or a function without arguments that
            returns one, called at first use.
        coef: β ≥ 0, reward per nat; a function of the number of steps so far; or a changing coefficient from
            `textenv.kl.coefficients`.
        estimator: ``"k1"``, ``"k2"``, ``"k3"``, ``"exact"`` (sum over all actions by ``policy.divergence``; needs a
            reference of the policy's kind), or a function of the log-ratio.
        place: ``"reward"`` or ``"loss"``.

    Raises:
        ValueError: if coefficient, estimator or place is invalid, or (when called) if the reference shares trained
            weights or has another vocabulary.
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
        self._hashes: dict[str, int] | None = None
        """Hashes of the reference's tensors by name; None before the first call."""
        self._unfinished_kl = 0.0
        """Sum of the KL since the last update with finished episodes, nats."""

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
        self, rollout: TensorDict, policy: _Policy, *, tolerance: float | None = None, other_sampler: bool = False
    ) -> None:
        """Add ``reference_log_prob`` and ``kl`` to the rollout in place; the coefficient does not change.

        Args:
            rollout: rollout with ``log_prob``; see `textenv.rollout`.
            policy: the policy that acted. The reference gets the policy's temperature, and moves to the rollout's
                device.
            tolerance: for the check at the first call: the largest KL, in nats, that counts as 0 if policy and
                reference have equal weights (``ratio_tolerance`` of a config). None: by the dtype.
            other_sampler: True if another engine may have sampled and the update corrects for it. The first call then
                compares the reference with the policy's own scores instead of ``log_prob``.
        """
        reference = self.reference
        mask = rollout["mask"]
        module = _scoring_module(reference)
        if module is not None:
            module.to(mask.device)

        # The reference must read the policy's tokens
        is_first_call = self._hashes is None
        policy_lm = language_model_of(policy)
        reference_lm = language_model_of(reference)
        if is_first_call and policy_lm is not None and reference_lm is not None:
            check_same_vocabulary(policy_lm.tokenizer, reference_lm.tokenizer)

        # It must never be trained
        hashes = _hash_tensors(reference, policy)
        if self._hashes is not None:
            _check_unchanged(hashes, self._hashes, rollout)
        self._hashes = hashes

        # Score the actions, at the policy's temperature
        if policy_lm is not None and reference_lm is not None:
            reference_lm.temperature = policy_lm.temperature
        reference_log_prob = reference.evaluate(rollout).log_prob

        # The mask goes before the estimator, so that entries outside the mask are never used
        log_ratio = torch.where(mask, rollout["log_prob"] - reference_log_prob, 0.0)
        rollout["reference_log_prob"] = torch.where(mask, reference_log_prob, 0.0)
        rollout["kl"] = torch.where(mask, self._kl(rollout, log_ratio, policy), 0.0)
        if self.place == "reward":
            rollout["reward"] = rollout["reward"] - self.coef * rollout["kl"]

        # Equal weights must give a KL of 0 by the policy's own scores
        if is_first_call and _have_equal_weights(policy, reference):
            kl = rollout["kl"]
            if other_sampler:
                scorer = policy if policy_lm is None else policy_lm
                own_log_prob = scorer.evaluate(rollout).log_prob
                log_ratio = torch.where(mask, own_log_prob - reference_log_prob, 0.0)
                kl = torch.where(mask, self._kl(rollout, log_ratio, policy), 0.0)
            _check_start(rollout, log_ratio, kl, policy, tolerance)

    def loss(self, part: TensorDict, *, log_prob: Tensor, policy: _Policy) -> Tensor:
        """Return β times the KL of each entry, ``[B, T]``, 0 where the mask is False; for ``place="loss"``.

        Args:
            part: part of a rollout that the penalty was called on.
            log_prob: log π of the part's actions under the current policy, ``[B, T]``, with gradient.
            policy: the current policy.
        """
        mask = part["mask"]
        log_ratio = torch.where(mask, log_prob - part["reference_log_prob"], 0.0)
        return self.coef * torch.where(mask, self._kl(part, log_ratio, policy), 0.0)

    def update(self, rollout: TensorDict) -> None:
        """Adapt the coefficient to a rollout that the penalty was called on; call it after the policy update.

        The KL per episode is the sum since the last rollout with finished episodes, divided by the number of episodes
        that finish in this rollout.
        """
        mask = rollout["mask"]
        self._unfinished_kl += torch.where(mask, rollout["kl"], 0.0).sum().item()
        episodes = int((rollout["terminated"] | rollout["truncated"]).sum())
        kl_per_episode = None
        if episodes:
            kl_per_episode = self._unfinished_kl / episodes
            self._unfinished_kl = 0.0
        self._coefficient.update(kl=kl_per_episode, steps=int(mask.sum()))

    def state_dict(self) -> PenaltyState:
        """State that changes during training, for JSON."""
        hashes = None
        if self._hashes is not None:
            hashes = {name: str(value) for name, value in self._hashes.items()}
        return {
            "coefficient": self._coefficient.state_dict(),
            "open_kl": self._unfinished_kl,
            "reference": hashes,
        }

    def load_state_dict(self, state: PenaltyState) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            ValueError: if the state belongs to another kind of coefficient.
        """
        self._coefficient.load_state_dict(state["coefficient"])
        self._unfinished_kl = state["open_kl"]
        saved_hashes = state.get("reference")
        if saved_hashes is not None:
            self._hashes = {name: int(digits) for name, digits in saved_hashes.items()}

    def _kl(self, rollout: TensorDict, log_ratio: Tensor, policy: _Policy) -> Tensor:
        """Return the KL of each entry, ``[B, T]``, exact or estimated from the log-ratio."""
        if self._estimate is None:
            return policy.divergence(rollout, self.reference)
        return self._estimate(log_ratio)


def _hash_tensors(reference: Reference, policy: _Policy) -> dict[str, int]:
    """Hash each tensor of the reference, by name; a reference that is no module has none.

    A hash is a cheap xor of the bits. It differs if one value changes, but not always if two do.
    """
    reference_module = _scoring_module(reference)
    if reference_module is None:
        return {}

    # The state_dict of a frozen adapter model also lists weights that are trained: skip them. A reference that shares
    # trained weights as parameters is refused by `_have_equal_weights`
    trained: set[int] = set()
    policy_module = _scoring_module(policy)
    if policy_module is not None:
        trained = _trained_addresses(policy_module)

    hashes: dict[str, Tensor] = {}
    for name, tensor in reference_module.state_dict().items():
        if tensor.numel() == 0 or tensor.data_ptr() in trained:
            continue
        if tensor.element_size() == 1:
            tensor = tensor.view(torch.uint8)  # float8 has no hash of its own
        hashes[name] = torch.hash_tensor(tensor).to("cpu")
    if not hashes:
        return {}
    values = torch.stack([*hashes.values()]).tolist()
    return dict(zip(hashes, values, strict=True))


def _check_unchanged(hashes: dict[str, int], first_hashes: dict[str, int], rollout: TensorDict) -> None:
    """Raise an InvariantError if a tensor of the reference has another hash than at the first call."""
    changed = [name for name in hashes if hashes[name] != first_hashes.get(name)]
    if changed:
        raise InvariantError(
            f"the reference has changed ({len(changed)} of its {len(hashes)} tensors) since the first rollout, "
            "so the KL no longer measures the distance from the initial policy. Does an optimizer hold the reference's "
            "parameters, or does the reference share them with the policy? Pass policy.reference(), which is never "
            "trained.",
            tensor=f"reference.{changed[0]}",
            batch=rollout,
        )


def _have_equal_weights(policy: _Policy, reference: Reference) -> bool:
    """Return True if policy and reference have equal weights.

    Raises:
        ValueError: if they share weights that are trained. Frozen weights may be shared.
    """
    policy_module = _scoring_module(policy)
    reference_module = _scoring_module(reference)
    if policy_module is None or reference_module is None:
        return False
    reference_addresses = {p.data_ptr() for p in reference_module.parameters()}
    if _trained_addresses(policy_module) & reference_addresses:
        raise ValueError(
            "the reference shares the policy's weights, so its KL would always be 0: pass policy.reference(), "
            "or a deep copy of the policy"
        )
    weights = policy_module.state_dict()
    reference_weights = reference_module.state_dict()
    if weights.keys() != reference_weights.keys():
        return False
    return all(torch.equal(weights[name], reference_weights[name]) for name in weights)


def _trained_addresses(module: nn.Module) -> set[int]:
    """Return the addresses in memory of the module's trained parameters."""
    return {p.data_ptr() for p in module.parameters() if p.requires_grad}


def _check_start(rollout: TensorDict, log_ratio: Tensor, kl: Tensor, policy: _Policy, tolerance: float | None) -> None:
    """Raise an InvariantError if a reference of equal weights has another log-probability, or a KL other than 0.

    Both are checked, because a user's estimator may violate KL(π‖π) = 0. The tolerance, in nats, bounds
    `textenv.rollout.ratio_gap`; None: by the dtype.
    """
    module = _scoring_module(policy)
    assert module is not None

    # What rounding may explain depends on the model
    choices: tuple[str, ...] = ()
    dtype = least_precise_dtype(module.parameters())
    if isinstance(module, LanguageModel):
        choices = module.hard_choices
        dtype = module.autocast or dtype
    if tolerance is None:
        tolerance = start_tolerance(dtype, choices)

    # The larger of both gaps at each entry
    gap = torch.maximum(log_ratio.abs(), kl.abs())
    if not ratio_gap(gap, mask=rollout["mask"], dtype=dtype, choices=choices) <= tolerance:
        raise InvariantError(
            f"policy and reference have the same weights, but their log-probabilities differ, or the KL is not 0, "
            f"by up to {gap.max().item():.3g} nats (tolerance {tolerance}{tolerance_note(dtype, choices)}): is dropout "
            "on, do temperature or forbidden tokens differ, or did act() store other log-probabilities than evaluate() "
            "gives (docs/concepts/invariants.md)? If it is only rounding, which a low temperature amplifies, raise "
            "ratio_tolerance in the config.",
            tensor="kl",
            batch=rollout,
            bad=~(gap <= tolerance),
        )


def _scoring_module(holder: object) -> nn.Module | None:
    """Return the module that computes log-probabilities: a language model, else the policy or reference itself."""
    lm = language_model_of(holder)
    if lm is not None:
        return lm
    if isinstance(holder, nn.Module):
        return holder
    return None
