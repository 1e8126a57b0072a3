"""What the losses of all policy-gradient algorithms share, beside the policy's own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from algos import losses
from algos.advantages import discounted_returns, gae, whiten
from algos.config import ActorCriticConfig, PolicyGradientConfig
from algos.descent import Term, Terms, Totals, add_up
from algos.invariants import check_advantages, check_first, check_inert, check_whitened, scoring_dtype
from algos.learning import Penalty
from algos.losses import Aggregation, log_ratio, policy_gradient_loss, token_mean
from algos.metrics import sampler_gap
from algos.minibatches import minibatches
from algos.normalizers import RewardNormalizer
from algos.policy import Policy
from textenv.rollout import Evaluation


def add_advantages(
    rollout: TensorDict, *, policy: Policy, config: ActorCriticConfig, normalizer: RewardNormalizer | None
) -> None:
    """Write ``value``, ``next_value``, ``advantage`` and ``value_target`` into a rollout, by GAE.

    The rollout keeps the rewards that were paid; the advantages are made from scaled ones if the config says so.

    Args:
        rollout: ``[B, T]``, see `textenv.rollout`.
        policy: whose values.
        config: discount, trace decay, scaling of rewards, whether limits bootstrap.
        normalizer: of the rewards, or None.
    """
    reward, limit = rollout["reward"] if normalizer is None else normalizer(rollout), rollout["truncated"]
    if config.whiten_rewards:
        reward = whiten(reward, mask=rollout["mask"], shift_mean=False)
    rollout["value"], rollout["next_value"] = policy.values(rollout)
    rollout["advantage"], rollout["value_target"] = gae(
        reward=reward,
        value=rollout["value"],
        next_value=rollout["next_value"],
        terminated=rollout["terminated"] if config.bootstrap_truncated else rollout["terminated"] | limit,
        truncated=limit,
        mask=rollout["mask"],
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
    )


def episode_returns(rollout: TensorDict) -> Tensor:
    """Sum of the rewards of each row's episode, float32 ``[B]``, where a row is one; 0 for a row without a step."""
    columns = {name: rollout[name] for name in ("reward", "terminated", "truncated", "mask")}
    to_go = discounted_returns(**columns, gamma=1.0)
    return to_go.gather(1, rollout["mask"].int().argmax(1, keepdim=True)).squeeze(1)


def by_name(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function of `algos.losses` that a config names; a function is returned as it is."""
    return getattr(losses, function) if isinstance(function, str) else function


def weighted_minibatches(
    rollout: TensorDict,
    *,
    policy: Policy,
    generator: torch.Generator,
    size: int | None = None,
    epochs: int = 1,
    normalize_advantage: str | bool | None = False,
    aggregation: Aggregation = token_mean,
) -> Iterator[TensorDict]:
    """Minibatches with what their losses are averaged by, which does not change when they are cut.

    Args:
        rollout: ``[B, T]`` with advantages.
        policy: whole rows for a sequential one, else single steps.
        generator: of the order, where there is more than one.
        size: units in a minibatch; None takes all.
        epochs: passes over the rollout.
        normalize_advantage: over what advantages are scaled to mean 0 and variance 1, ``"rollout"`` or ``"minibatch"``;
            False leaves them. The rollout itself keeps them as they are.
        aggregation: weight of each entry in the loss.

    Yields:
        As `minibatches`, with ``weight`` of the entries in the loss and ``share`` in the log.

    Raises:
        InvariantError: if the advantages are not finite, or anything counts that stands outside the mask; or if those
            of the rollout or first minibatch have not mean 0 and deviation 1 after whitening.
    """
    check_advantages(rollout)
    if normalize_advantage == "rollout":
        rollout = rollout.copy()
        whiten_advantage(rollout)
    by_row = aggregation is not token_mean and not policy.sequential
    if by_row:  # single steps know nothing of their row: weighed before they leave it, 1 on average
        rollout["weight"] = aggregation(mask=rollout["mask"]) * rollout["mask"].sum()
    cuts = minibatches(rollout, size=size, sequential=policy.sequential, generator=generator, epochs=epochs)
    for number, batch in enumerate(cuts):
        mask = batch["mask"]
        if normalize_advantage == "minibatch":
            whiten_advantage(batch, check=number == 0)
        batch["share"] = share = token_mean(mask=mask)
        if by_row:
            batch["weight"] = batch["weight"] / len(batch)
        else:
            batch["weight"] = share if aggregation is token_mean else aggregation(mask=mask)
            if aggregation is not token_mean:
                check_inert(batch, "weight")
        yield batch


def whiten_advantage(batch: TensorDict, *, check: bool = True) -> None:
    """Replace ``advantage`` by one of mean 0 and variance 1 over the mask; see `algos.advantages.whiten`.

    Raises:
        InvariantError: if it has not after all, where that is checked.
    """
    raw = batch["advantage"]
    batch["advantage"] = whiten(raw, mask=batch["mask"])
    if check:
        check_whitened(batch, raw=raw)


def log_ratios(
    part: TensorDict, *, evaluation: Evaluation, policy: Policy, config: PolicyGradientConfig, first: bool
) -> Tensor:
    """`log_ratio` to the policy that acted; before the first step of an update every ratio must be 1.

    Raises:
        InvariantError: if it is not; see `check_first`.
    """
    found = log_ratio(log_prob=evaluation.log_prob, old_log_prob=part["log_prob"], mask=part["mask"])
    if first:
        dtype, tolerance = scoring_dtype(policy), config.ratio_tolerance
        check_first(found, batch=part, evaluation=evaluation, dtype=dtype, tolerance=tolerance)
    return found


def regularizers(
    part: TensorDict, *, evaluation: Evaluation, policy: Policy, penalty: Penalty | None, config: PolicyGradientConfig
) -> Terms:
    """The entropy bonus, and what a KL penalty charges in the loss."""
    entropy = torch.where(part["mask"], evaluation.entropy, 0.0)
    terms = {"policy/entropy": Term(-config.entropy_coefficient, entropy)}
    if penalty is not None:
        charged = penalty.losses(part, log_prob=evaluation.log_prob, policy=policy)
        terms |= {name: Term(1.0, entries) for name, entries in charged.items()}
    return terms


def policy_gradient(
    part: TensorDict, *, policy: Policy, penalty: Penalty | None, config: PolicyGradientConfig
) -> tuple[Tensor, Totals]:
    """Loss of a part of a rollout, by the policy that acted and without a value; and quantities for the log."""
    evaluation = policy.evaluate(part)
    ratios = log_ratios(part, evaluation=evaluation, policy=policy, config=config, first=True)
    improvement = policy_gradient_loss(log_ratio=ratios, advantage=part["advantage"], mask=part["mask"])
    terms = {"policy/loss": Term(1.0, improvement)}
    terms |= regularizers(part, evaluation=evaluation, policy=policy, penalty=penalty, config=config)
    loss, totals = add_up(terms, weight=part["weight"], share=part["share"])
    return loss, totals | sampler_gap(ratios.detach(), share=part["share"])
