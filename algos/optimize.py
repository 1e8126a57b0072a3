"""Shared parts of the policy-gradient algorithms: GAE advantages, the inner loop, regularizers and the optimizer."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from algos import losses, parallel
from algos.advantages import discounted_returns, gae, whiten
from algos.config import CONTROL_RATE, ActorCriticConfig, ClippedConfig, Config, PolicyGradientConfig, scheduled
from algos.losses import Aggregation, log_ratio, policy_gradient_loss, token_mean
from algos.policies.policy import Policy
from algos.policies.sharding import ShardedAdam, Shards
from algos.training.diagnose import LossOf, explain_step
from algos.training.invariants import check_advantages, check_first, check_inert, check_whitened, scoring_dtype
from algos.training.learner import Learner
from algos.training.metrics import MetricMeans, Metrics, group_metrics as group_metrics, ratio_metrics, rollout_metrics
from textenv.acceleration import accelerated
from textenv.errors import PLACE
from textenv.kl.penalty import KLPenalty
from textenv.rollout import Evaluation, masked_mean


class Term(NamedTuple):
    """A term of a loss."""

    coefficient: float
    """Factor in the loss; the log has the term without it."""
    entries: Tensor
    """One number per entry, 0 where the mask is False."""


Terms = dict[str, Term]
Sums = dict[str, Tensor]


def optimize(
    agent: Learner,
    rollout: TensorDict,
    terms_of: Callable[[TensorDict, Evaluation, Tensor], Terms],
    *,
    size: int | None = None,
    num_epochs: int = 1,
    normalize_advantage: str | bool | None = False,
    aggregation: str | Aggregation = token_mean,
    clip_range: float | None = None,
    target_kl: float | None = None,
    others: Sequence[Callable[[], tuple[Tensor, Sums]]] = (),
) -> Metrics:
    """Run the inner loop of a policy-gradient algorithm, one step per minibatch; return metrics.

    Args:
        agent: the agent whose policy is improved.
        rollout: ``[B, T]`` with advantages.
        terms_of: the algorithm's own loss terms, from a part of a minibatch, the policy's evaluation of it and the
            log-ratios; the entropy bonus and a KL in the loss are added here.
        size, num_epochs, normalize_advantage, aggregation: see `weighted_minibatches`.
        clip_range: clip range of the loss, for the log; None logs no ``approx_kl`` or ``clip_frac``.
        target_kl: end the update as soon as a minibatch's ``policy/approx_kl`` exceeds this.
        others: further losses, see `Optimizer.step`.
    """
    config, policy, means = agent.config, agent.policy, MetricMeans()
    found: Metrics = {}
    if clip_range is not None and config.max_importance_weight is not None:
        rollout, found = rescored(rollout, policy=policy, limit=config.max_importance_weight)

    def loss_of(part: TensorDict, *, first: bool) -> tuple[Tensor, Sums]:
        policy = agent.policy  # that of the shards, if there are any
        evaluation = policy.evaluate(part)
        ratios = log_ratios(part, evaluation=evaluation, policy=policy, config=config, first=first)
        terms = terms_of(part, evaluation, ratios)
        terms |= regularizers(part, evaluation=evaluation, policy=policy, penalty=agent.penalty, config=config)
        loss, totals = total_loss(terms, weight=part["weight"], share=part["share"])
        return loss, totals | ratio_metrics(ratios.detach(), share=part["share"], clip_range=clip_range, first=first)

    agent.optimizer.schedule(agent.progress)
    batches = weighted_minibatches(
        rollout,
        policy=policy,
        generator=agent.generator,
        size=size,
        num_epochs=num_epochs,
        normalize_advantage=normalize_advantage,
        aggregation=by_name(aggregation),
    )
    with nullcontext() if agent.shards is None else agent.shards.used_by(agent):
        for batch in batches:
            own = parallel.own_rows(batch)
            parts = [own] if config.micro_batch_size is None else own.split(config.micro_batch_size)
            totals = agent.optimizer.step(partial(loss_of, first=means.count == 0), parts, *others)
            means.add(totals)
            if target_kl is not None and totals and totals["policy/approx_kl"].item() > target_kl:
                break
    return means.result() | rollout_metrics(rollout) | {"update/minibatches": means.count} | found


@torch.no_grad()
def rescored(rollout: TensorDict, *, policy: Policy, limit: float) -> tuple[TensorDict, Metrics]:
    """Return the rollout with π_old's ``log_prob`` and ``importance_weight`` min(π_old/π_behaviour, limit); metrics."""
    mask, (own,) = rollout["mask"], parallel.by_rows(lambda part: [policy.evaluate(part).log_prob], rollout)
    gap = log_ratio(log_prob=own, old_log_prob=rollout["log_prob"], mask=mask)
    weight = torch.where(mask, gap.exp().clamp(max=limit), 0.0)
    found = {"policy/sampler_gap": gap.abs(), "policy/importance_weight": weight}
    rollout = rollout.copy().update({"log_prob": torch.where(mask, own, 0.0), "importance_weight": weight})
    return rollout, {name: masked_mean(x, mask=mask).item() for name, x in found.items()}


def clipped_loss(part: TensorDict, *, log_ratio: Tensor, clip_range: float, config: ClippedConfig) -> Tensor:
    """Policy loss of the config on a part of a minibatch, weighed by ``importance_weight``, if there is one."""
    further = {} if config.clip_higher is None else {"clip_higher": config.clip_higher}
    loss: Tensor = by_name(config.policy_loss)(
        log_ratio=log_ratio, advantage=part["advantage"], mask=part["mask"], clip_range=clip_range, **further
    )
    return loss * part["importance_weight"] if "importance_weight" in part.keys() else loss


def policy_gradient(part: TensorDict, evaluation: Evaluation, log_ratio: Tensor) -> Terms:
    """Policy-gradient loss of algorithms that take one step per rollout."""
    loss = policy_gradient_loss(log_ratio=log_ratio, advantage=part["advantage"], mask=part["mask"])
    return {"policy/loss": Term(1.0, loss)}


def add_advantages(agent: Learner, rollout: TensorDict) -> None:
    """Write ``value``, ``next_value``, ``advantage`` and ``value_target`` into a rollout, by GAE.

    The rollout keeps the raw rewards; the advantages use scaled ones if the config asks for it.

    Args:
        agent: its policy provides the values, its config the discount, trace decay, reward scaling, and whether to
            bootstrap at limits.
        rollout: ``[B, T]``, see `textenv.rollout`.
    """
    config, policy, normalizer = agent.config, agent.policy, agent.reward_normalizer
    reward, limit = rollout["reward"] if normalizer is None else normalizer(rollout), rollout["truncated"]
    if config.whiten_rewards:
        reward = whiten(reward, mask=rollout["mask"], shift_mean=False)
    if config.fit_value_head:
        ends = {name: rollout[name] for name in ("terminated", "truncated", "mask")}
        returns = discounted_returns(reward=reward, gamma=config.gamma, **ends)
        rollout["value"], rollout["next_value"] = policy.fit_values(rollout, returns, agent.value_fit)
    else:
        rollout["value"], rollout["next_value"] = parallel.by_rows(policy.values, rollout)
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
    """Sum of rewards of each row's episode, float32 ``[B]``, for rows of one episode; 0 for a row without a step."""
    columns = {name: rollout[name] for name in ("reward", "terminated", "truncated", "mask")}
    to_go = discounted_returns(**columns, gamma=1.0)
    return to_go.gather(1, rollout["mask"].int().argmax(1, keepdim=True)).squeeze(1)


def by_name(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Policy loss or aggregation of `algos.losses` with this name; a function is returned unchanged."""
    named = (
        losses.clipped_policy_loss, losses.dual_clipped_policy_loss, losses.gspo_policy_loss,
        losses.thresholded_policy_loss, losses.token_mean, losses.sequence_mean,
    )  # fmt: skip
    return {each.__name__: each for each in named}[function] if isinstance(function, str) else function


def weighted_minibatches(
    rollout: TensorDict,
    *,
    policy: Policy,
    generator: torch.Generator,
    size: int | None = None,
    num_epochs: int = 1,
    normalize_advantage: str | bool | None = False,
    aggregation: Aggregation = token_mean,
) -> Iterator[TensorDict]:
    """Yield minibatches with loss weights of their entries; splitting a minibatch does not change the weights.

    Args:
        rollout: ``[B, T]`` with advantages.
        policy: a sequential one gets whole rows, others single steps.
        generator, size, num_epochs: see `minibatches`.
        normalize_advantage: scale advantages to mean 0 and variance 1 over the ``"rollout"`` or each ``"minibatch"``;
            False does not. The rollout itself stays unchanged.
        aggregation: weight of each entry in the loss.

    Yields:
        As `minibatches`, with the columns ``weight`` (in the loss) and ``share`` (in the log).

    Raises:
        InvariantError: if the advantages are not finite, or one outside the mask is not 0; or if the whitened
            advantages of the rollout or first minibatch do not have mean 0 and deviation 1.
    """
    check_advantages(rollout)
    if normalize_advantage == "rollout":
        rollout = rollout.copy()
        whiten_advantage(rollout)
    by_row = aggregation is not token_mean and not policy.sequential
    if by_row:  # weighted by row before flattening into single steps, 1 on average
        rollout["weight"] = aggregation(mask=rollout["mask"]) * rollout["mask"].sum()
    cuts = minibatches(rollout, size=size, sequential=policy.sequential, generator=generator, num_epochs=num_epochs)
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
    """Scale ``advantage`` to mean 0 and variance 1 over the mask; see `algos.advantages.whiten`.

    Raises:
        InvariantError: if ``check`` finds another mean or deviation.
    """
    raw = batch["advantage"]
    batch["advantage"] = whiten(raw, mask=batch["mask"])
    if check:
        check_whitened(batch, raw=raw)


def log_ratios(
    part: TensorDict, *, evaluation: Evaluation, policy: Policy, config: PolicyGradientConfig, first: bool
) -> Tensor:
    """Return the log-ratios to the policy that acted; before the first step of an update every ratio must be 1.

    Raises:
        InvariantError: if one is not 1; see `check_first`.
    """
    found = log_ratio(log_prob=evaluation.log_prob, old_log_prob=part["log_prob"], mask=part["mask"])
    if first:
        dtype, tolerance = scoring_dtype(policy), config.ratio_tolerance
        check_first(found, batch=part, evaluation=evaluation, dtype=dtype, tolerance=tolerance)
    return found


def regularizers(
    part: TensorDict, *, evaluation: Evaluation, policy: Policy, penalty: KLPenalty | None, config: PolicyGradientConfig
) -> Terms:
    """Loss terms of the entropy bonus and of a KL penalty charged in the loss."""
    entropy = torch.where(part["mask"], evaluation.entropy, 0.0)
    terms = {"policy/entropy": Term(-config.ent_coef, entropy)}
    if penalty is not None:
        charged = penalty.losses(part, log_prob=evaluation.log_prob, policy=policy)
        terms |= {name: Term(1.0, entries) for name, entries in charged.items()}
    return terms


ADVANTAGES_ONLY = ("next_observation", "reward", "terminated", "truncated", "next_value", "group", "next_action_mask",
                   "reward_parts", "staleness")  # fmt: skip
"""Columns that only the advantages need; minibatches leave them out."""


def places(rollout: TensorDict) -> Tensor:
    """Position of each entry in the rollout, int64 ``[B, T]``, for error messages about minibatches (`PLACE`)."""
    rows, columns = (torch.arange(size, device=rollout.device) for size in rollout.batch_size)
    return (rows[:, None] << 32) | columns


def minibatches(
    rollout: TensorDict, *, size: int | None, sequential: bool, generator: torch.Generator, num_epochs: int = 1
) -> Iterator[TensorDict]:
    """Yield every True entry once per epoch, in a new random order if there is more than one minibatch.

    Args:
        rollout: ``[B, T]``.
        size: rows per minibatch if ``sequential``, else steps; None takes all.
        sequential: whole rows (True), or single True entries (False: entries outside the mask are dropped).
        generator: for the random order.
        num_epochs: passes over the rollout.

    Yields:
        ``[size, T]`` or ``[size]``; an epoch's last may be smaller. Rows without a True entry are left out. The column
        ``place`` holds each entry's position in the rollout (`textenv.errors.PLACE`).
    """
    rollout = rollout.exclude(*ADVANTAGES_ONLY)
    rollout[PLACE] = places(rollout)
    if sequential:
        units = rollout[rollout["mask"].any(dim=1)]
    else:
        units = rollout.flatten()
        if not units["mask"].all():
            units = units[units["mask"]]
    if not len(units):
        return
    for _ in range(num_epochs):
        if size is None or size >= len(units):
            yield units.clone()  # all, so order does not matter; cloned, so that writes do not affect the next epoch
            continue
        order = torch.randperm(len(units), generator=generator, device=generator.device)
        # One gather per epoch and views of it, rather than a gather per minibatch.
        yield from units[order].split(size)


@accelerated("algos.fast.adam:Adam")
class Adam(torch.optim.AdamW):
    """AdamW that clips the gradients of some groups together; weight decay 0 gives Adam."""

    def clip_grad_norm_(self, max_norm: float, groups: Sequence[int]) -> Tensor:
        """Scale the gradients of these groups to a global norm of at most ``max_norm``; return the norm before."""
        return nn.utils.clip_grad_norm_([p for i in groups for p in self.param_groups[i]["params"]], max_norm)


class Optimizer:
    """Adam with a learning-rate schedule and gradient clipping.

    Args:
        parameters: the parameters to train; those that need no gradient are left out.
        config: learning rates, warm-up, Adam's settings, maximum gradient norm, handling of non-finite steps.
        policy: owner of the parameters, used to find those that only the value depends on, and to explain a non-finite
            gradient.
        shards: whose parameters these are, if the ranks share them.

    Example:
        >>> weight, batch = nn.Parameter(torch.ones(1)), TensorDict({}, batch_size=[1])
        >>> optimizer = Optimizer([weight], Config(learning_rate=0.1))
        >>> totals = optimizer.step(lambda part: (weight.square().sum(), {}), [batch])
        >>> round(weight.item(), 3)
        0.9
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], config: Config, *, policy: Any = None, shards: Shards | None = None
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.config, self.policy, self.shards = config, policy, shards
        self._rate = CONTROL_RATE if config.learning_rate is None else config.learning_rate
        groups, self._shares = [self.parameters], [1.0]
        clips: dict[tuple[int, ...], float] = {(0,): config.max_grad_norm}
        if isinstance(config, ActorCriticConfig) and (config.value_learning_rate or config.value_max_grad_norm):
            own = {id(p) for p in policy.value_parameters()}
            groups = [[p for p in self.parameters if (id(p) in own) is value] for value in (False, True)]
            self._shares.append((config.value_learning_rate or self._rate) / self._rate)
            limit = config.value_max_grad_norm
            clips = {(0, 1): config.max_grad_norm} if limit is None else clips | {(1,): limit}
        self._clips = clips
        """Maximum norm of the gradients of each set of parameter groups."""
        self.optimizer = (Adam if shards is None else ShardedAdam)(
            [{"params": group} for group in groups],
            lr=self._rate,
            eps=config.adam_eps or 1e-5,
            betas=(config.adam_betas[0], config.adam_betas[1]),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def schedule(self, progress: float) -> None:
        """Set the learning rate for a training progress from 0 to 1.

        It rises linearly over the warm-up to its initial value, then falls linearly to its final value, if any.
        """
        config = self.config
        if progress < config.warmup_ratio:
            # The first step is taken at progress 0 and would do nothing at a rate of 0.
            rate = self._rate * max(progress / config.warmup_ratio, 0.01)
        else:
            rest = (progress - config.warmup_ratio) / max(1 - config.warmup_ratio, 1e-9)
            rate = scheduled(self._rate, config.final_learning_rate, rest)
        for group, share in zip(self.optimizer.param_groups, self._shares, strict=True):
            group["lr"] = rate * share

    def state_dict(self) -> dict[str, Any]:
        """Return the state of Adam."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.optimizer.load_state_dict(state)

    def step(self, loss_of: LossOf, parts: Sequence[TensorDict], *others: Callable[[], tuple[Tensor, Sums]]) -> Sums:
        """Take one step on the sum of some losses.

        Args:
            loss_of: returns the loss of a part, and quantities for the log.
            parts: parts of the minibatch; the backward pass of one runs before the loss of the next.
            others: further losses, which need no batch.

        Returns:
            The sum of each quantity, without gradient, and ``update/grad_norm``, before clipping. Empty if the step was
            skipped (`Config.skip_nonfinite`).

        Raises:
            NonFiniteError: if a loss or the gradient is not finite; the weights stay unchanged.
            ValueError: if no parameter has a gradient.
        """
        shards = self.shards
        for parameter in self.parameters:
            parameter.grad = None
        totals: Sums = {}
        found: list[Tensor] = []
        losses: list[Callable[[], tuple[Tensor, Sums]]] = [partial(loss_of, part) for part in parts]
        for compute in (*losses, *(parallel.divided(other) for other in others)):
            loss, terms = compute() if shards is None else shards.run(compute)
            loss.backward(inputs=self.parameters if shards is None else None)  # no others, even if in the graph
            found.append(loss.detach())
            for name, term in terms.items():
                totals[name] = totals[name] + term.detach() if name in totals else term.detach()
        if all(p.grad is None for p in self.parameters):
            raise ValueError(
                "no parameter of the optimizer has a gradient: does the policy compute with the parameters that it "
                "lists, and did you replace them after the first update?"
            )
        parallel.add_up(self.parameters if shards is None else [], [*found, *totals.values()])  # theirs are sums
        norms = [self.optimizer.clip_grad_norm_(limit, groups) for groups, limit in self._clips.items()]
        totals["update/grad_norm"] = grad_norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
        # Each is read from the device, but only the first read waits for it.
        if not all(math.isfinite(x.item()) for x in (grad_norm, *found)):
            if self.config.skip_nonfinite:
                return {}
            taken = max((int(state["step"]) for state in self.optimizer.state.values()), default=0)
            step = f"step {taken + 1} of the optimiser"
            whole, policy, parameters = parallel.gather_parts(parts), self.policy, self.parameters
            if shards is not None:
                policy = shards.leave()
                parameters = [p for p in policy.parameters() if p.requires_grad]
            raise explain_step(loss_of, whole, parameters=parameters, policy=policy, quantities=totals, step=step)
        self.optimizer.step()
        return totals


def total_loss(terms: Terms, *, weight: Tensor, share: Tensor) -> tuple[Tensor, Sums]:
    """Combine terms into a loss.

    Args:
        terms: keyed by their names in the log.
        weight: weight of each entry in the loss (`algos.losses.Aggregation`).
        share: weight of each entry in the log: 1 / (number of True entries of the whole minibatch).

    Returns:
        The loss, and each term's mean over the True entries.
    """
    # A term with coefficient 0 gets no gradient.
    columns = [term.entries if term.coefficient else term.entries.detach() for term in terms.values()]
    entries = torch.stack([column.flatten() for column in columns])
    sums = entries @ weight.flatten()
    means = sums.detach() if weight is share else entries.detach() @ share.flatten()
    loss = sums @ sums.new_tensor([term.coefficient for term in terms.values()])
    return loss, dict(zip(terms, means.unbind(), strict=True))
