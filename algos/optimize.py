"""What all policy-gradient algorithms share: advantages by GAE, the inner loop, and the terms beside their own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from algos import losses
from algos.advantages import discounted_returns, gae, whiten
from algos.agent import Agent
from algos.config import PolicyGradientConfig
from algos.descent import Term, Terms, Totals, add_up, cut
from algos.losses import Aggregation, log_ratio, policy_gradient_loss, token_mean
from algos.minibatches import minibatches
from algos.policies.policy import Policy
from algos.training.invariants import check_advantages, check_first, check_inert, check_whitened, scoring_dtype
from algos.training.metrics import Means, Metrics, ratio_metrics, rollout_metrics
from textenv.kl.penalty import KLPenalty
from textenv.rollout import Evaluation


def optimize(
    agent: Agent[Any],
    rollout: TensorDict,
    terms_of: Callable[[TensorDict, Evaluation, Tensor], Terms],
    *,
    size: int | None = None,
    epochs: int = 1,
    normalize_advantage: str | bool | None = False,
    aggregation: str | Aggregation = token_mean,
    clip_range: float | None = None,
    target_kl: float | None = None,
    others: Sequence[Callable[[], tuple[Tensor, Totals]]] = (),
) -> Metrics:
    """The inner loop of every algorithm that follows a policy gradient: one step for each minibatch; returns metrics.

    Args:
        agent: whose policy is improved.
        rollout: ``[B, T]`` with advantages.
        terms_of: the algorithm's own terms of the loss, from a part of a minibatch, what the policy says about it, and
            the logs of the probability ratios; the entropy bonus and a KL in the loss are added here.
        size, epochs, normalize_advantage, aggregation: see `weighted_minibatches`.
        clip_range: of the loss, for the log; None logs no movement of the policy.
        target_kl: ends the update as soon as a minibatch's ``policy/approx_kl`` exceeds it.
        others: further losses, see `Descent.step`.
    """
    config, policy, means = agent.config, agent.policy, Means()

    def loss_of(part: TensorDict, *, first: bool) -> tuple[Tensor, Totals]:
        evaluation = policy.evaluate(part)
        ratios = log_ratios(part, evaluation=evaluation, policy=policy, config=config, first=first)
        terms = terms_of(part, evaluation, ratios)
        terms |= regularizers(part, evaluation=evaluation, policy=policy, penalty=agent.penalty, config=config)
        loss, totals = add_up(terms, weight=part["weight"], share=part["share"])
        return loss, totals | ratio_metrics(ratios.detach(), share=part["share"], clip_range=clip_range, first=first)

    agent.descent.schedule(agent.progress)
    for batch in weighted_minibatches(
        rollout,
        policy=policy,
        generator=agent.generator,
        size=size,
        epochs=epochs,
        normalize_advantage=normalize_advantage,
        aggregation=by_name(aggregation),
    ):
        parts = cut(batch, config.micro_batch_size)
        totals = agent.descent.step(partial(loss_of, first=means.count == 0), parts, *others)
        means.add(totals)
        if target_kl is not None and totals and totals["policy/approx_kl"].item() > target_kl:
            break
    return means.result() | rollout_metrics(rollout) | {"update/minibatches": means.count}


def policy_gradient(part: TensorDict, evaluation: Evaluation, log_ratio: Tensor) -> Terms:
    """The loss of algorithms without a critic that take one step a rollout."""
    loss = policy_gradient_loss(log_ratio=log_ratio, advantage=part["advantage"], mask=part["mask"])
    return {"policy/loss": Term(1.0, loss)}


def add_advantages(agent: Agent[Any], rollout: TensorDict) -> None:
    """Write ``value``, ``next_value``, ``advantage`` and ``value_target`` into a rollout, by GAE.

    The rollout keeps the rewards that were paid; the advantages are made from scaled ones if the config says so.

    Args:
        agent: its policy's values; its config's discount, trace decay, scaling of rewards, and whether limits
            bootstrap.
        rollout: ``[B, T]``, see `textenv.rollout`.
    """
    config, policy, normalizer = agent.config, agent.policy, agent.reward_normalizer
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
    part: TensorDict, *, evaluation: Evaluation, policy: Policy, penalty: KLPenalty | None, config: PolicyGradientConfig
) -> Terms:
    """The entropy bonus, and what a KL penalty charges in the loss."""
    entropy = torch.where(part["mask"], evaluation.entropy, 0.0)
    terms = {"policy/entropy": Term(-config.entropy_coefficient, entropy)}
    if penalty is not None:
        charged = penalty.losses(part, log_prob=evaluation.log_prob, policy=policy)
        terms |= {name: Term(1.0, entries) for name, entries in charged.items()}
    return terms
