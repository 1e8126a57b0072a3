"""Proximal policy optimisation (Schulman et al. 2017), for control and language models alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from algos.advantages import gae, whiten
from algos.checkpoint import save
from algos.collection import Cursor
from algos.invariants import check_finite_gradient, check_range, check_ratio_is_one, coarsest_dtype
from algos.learning import Penalty, check_environment, choose_penalty, learn
from algos.losses import clipped_policy_loss, log_ratio, value_loss
from algos.metrics import Means, ratio_metrics, rollout_metrics
from algos.minibatches import minibatches
from algos.normalizers import RewardNormalizer
from algos.policy import Policy


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Hyper-parameters of PPO."""

    steps: int | None = 128
    """Steps that each environment slot takes in a rollout (control); None with episodes."""
    episodes: int | None = None
    """Whole episodes in a rollout (text); None with steps."""
    epochs: int = 4
    """Passes over each rollout."""
    minibatch_size: int = 128
    """Steps in a minibatch, or rows where the policy is sequential (text)."""
    micro_batch_size: int | None = None
    """Units evaluated at a time, to save memory; the gradient is the same. None: the whole minibatch."""
    learning_rate: float = 2.5e-4
    """Adam's step size at the start."""
    final_learning_rate: float | None = None
    """Step size at the end, reached linearly; None keeps it constant."""
    gamma: float = 0.99
    """Discount a step."""
    gae_lambda: float = 0.95
    """Trace decay of generalised advantage estimation."""
    clip_range: float = 0.2
    """The probability ratio counts between 1 - clip_range and 1 + clip_range."""
    final_clip_range: float | None = None
    """Clip range at the end, reached linearly; None keeps it constant."""
    value_clip_range: float | None = None
    """Most that a value may move in an update, in units of the return; None does not clip."""
    value_coefficient: float = 0.5
    """Weight of the value loss (half the squared error)."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus, per nat."""
    max_grad_norm: float = 0.5
    """Longest gradient; a longer one is scaled down to it."""
    whiten_rewards: bool = False
    """Scale the rewards of each rollout, penalty included, to variance 1 and keep their mean (Ziegler et al. 2019)."""
    whiten_advantages: bool = True
    """Scale the advantages of each minibatch to mean 0 and variance 1."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return; the rollout and the log keep them."""
    bootstrap_truncated: bool = True
    """Whether a time or length limit counts the value of the state it cuts at; text: no, the limit is the task's."""
    target_kl: float | None = None
    """End an update as soon as a minibatch's approximate KL to the old policy exceeds this; None never does."""
    seed: int = 1
    """Of the environment, the sampled actions and the order of minibatches."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.episodes is None):
            raise ValueError(f"steps is {self.steps} and episodes is {self.episodes}: give one, and None for the other")
        check_range(self, at_least_one=["steps", "episodes", "epochs", "minibatch_size", "micro_batch_size"])
        check_range(self, positive=["learning_rate", "clip_range", "max_grad_norm", "target_kl", "value_clip_range"])
        check_range(self, not_negative=["value_coefficient", "entropy_coefficient", "final_learning_rate"])
        check_range(self, not_negative=["final_clip_range", "seed"], unit_interval=["gamma", "gae_lambda"])


class PPO:
    """One algorithm for every environment: what differs between CartPole and text is environment and policy.

    Args:
        env: a vector environment; see `algos.collection`.
        policy: what is trained; see `algos.policy`.
        config: hyper-parameters; named presets stand in `algos.presets`.
        penalty: KL penalty to charge; by default the one that the environment carries, if any.

    Raises:
        ValueError: if the config does not fit the environment, or the KL would be charged twice.

    Example:
        >>> agent = PPO(env, policy, presets.CARTPOLE)  # doctest: +SKIP
        >>> agent.learn(100_000)  # doctest: +SKIP
    """

    def __init__(
        self, env: VectorEnv, policy: Policy, config: PPOConfig | None = None, *, penalty: Penalty | None = None
    ) -> None:
        config = PPOConfig() if config is None else config
        check_environment(env, policy, config)
        self.env, self.policy, self.config = env, policy, config
        self.penalty = choose_penalty(env, penalty)
        self.cursor = Cursor(seed=config.seed)
        self.generator = torch.Generator().manual_seed(config.seed)
        # Another stream than the one that orders the minibatches.
        self.policy.generator.manual_seed(config.seed + 2**32)
        self._parameters = [p for p in policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(self._parameters, lr=config.learning_rate, eps=1e-5, fused=True)
        self.reward_normalizer = RewardNormalizer(config.gamma) if config.normalize_rewards else None
        self.progress = 0.0
        """Share of the training that is done, 0 to 1: schedules read it."""

    def learn(self, total_steps: int, **options: Any) -> list[dict[str, float]]:
        """Train for that many steps; returns what was logged. The options are those of `algos.learning.learn`."""
        return learn(self, total_steps, **options)

    def update(self, rollout: TensorDict) -> dict[str, float]:
        """Improve the policy on a rollout, which gets its value and advantage columns; returns metrics."""
        means, target_kl = Means(), self.config.target_kl
        self._add_advantages(rollout)
        self._set_learning_rate()
        for batch in self._minibatches(rollout):
            totals = self._improve(batch, first=means.count == 0)
            means.add(totals)
            if target_kl is not None and totals["policy/approx_kl"].item() > target_kl:
                break
        return means.result() | rollout_metrics(rollout) | {"update/minibatches": means.count}

    def save(self, folder: str | Path) -> Path:
        """Write policy and config; `algos.load` gives the policy back."""
        return save(self, folder)

    def _add_advantages(self, rollout: TensorDict) -> None:
        config = self.config
        rollout["value"], rollout["next_value"] = self.policy.values(rollout)
        limit = rollout["truncated"]
        rollout["advantage"], rollout["value_target"] = gae(
            reward=self._reward(rollout),
            value=rollout["value"],
            next_value=rollout["next_value"],
            terminated=rollout["terminated"] if config.bootstrap_truncated else rollout["terminated"] | limit,
            truncated=limit,
            mask=rollout["mask"],
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )

    def _reward(self, rollout: TensorDict) -> Tensor:
        """The rewards that advantages are made from; the rollout keeps those that were paid."""
        reward = rollout["reward"] if self.reward_normalizer is None else self.reward_normalizer(rollout)
        return whiten(reward, mask=rollout["mask"], shift_mean=False) if self.config.whiten_rewards else reward

    def _minibatches(self, rollout: TensorDict) -> Iterator[TensorDict]:
        for _ in range(self.config.epochs):
            yield from minibatches(
                rollout,
                size=self.config.minibatch_size,
                sequential=self.policy.sequential,
                generator=self.generator,
            )

    def _improve(self, batch: TensorDict, *, first: bool) -> dict[str, Tensor]:
        """One optimiser step on a minibatch; returns its losses and diagnostics."""
        mask = batch["mask"]
        if self.config.whiten_advantages:
            batch["advantage"] = whiten(batch["advantage"], mask=mask)
        self.optimizer.zero_grad()
        count = mask.sum()
        micro = self.config.micro_batch_size
        totals: dict[str, Tensor] = {}
        for part in [batch] if micro is None else batch.split(micro):
            loss, terms = self._loss(part, count=count, first=first)
            loss.backward()
            totals = {name: totals.get(name, 0.0) + term.detach() for name, term in terms.items()}
        totals["update/grad_norm"] = clip_grad_norm_(self._parameters, self.config.max_grad_norm)
        check_finite_gradient(totals["update/grad_norm"])
        self.optimizer.step()
        return totals

    def _loss(self, part: TensorDict, *, count: Tensor, first: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """PPO's objective (eq. 9) on a part of a minibatch with ``count`` True entries, and its terms."""
        config, mask = self.config, part["mask"]
        clip_range = self._scheduled(config.clip_range, config.final_clip_range)
        log_prob, entropy, value = self.policy.evaluate(part)
        assert value is not None, "a policy's evaluation has a value; only a reference's has none"
        log_ratios = log_ratio(log_prob=log_prob, old_log_prob=part["log_prob"], mask=mask)
        if first:
            check_ratio_is_one(log_ratios, dtype=coarsest_dtype(self.policy.parameters()))
        policy_loss = clipped_policy_loss(
            log_ratio=log_ratios, advantage=part["advantage"], mask=mask, clip_range=clip_range
        )
        error = value_loss(
            value=value,
            value_target=part["value_target"],
            mask=mask,
            old_value=part["value"],
            clip_range=config.value_clip_range,
        )
        terms = {
            "policy/loss": policy_loss.sum() / count,
            "value/loss": error.sum() / count,
            "policy/entropy": torch.where(mask, entropy, 0.0).sum() / count,
        }
        loss = (
            terms["policy/loss"]
            + config.value_coefficient * terms["value/loss"]
            - config.entropy_coefficient * terms["policy/entropy"]
        )
        if self.penalty is not None:
            charged = self.penalty.losses(part, log_prob=log_prob, policy=self.policy)
            terms |= {name: term.sum() / count for name, term in charged.items()}
            loss = loss + sum(terms[name] for name in charged)
        return loss, terms | ratio_metrics(log_ratios.detach(), count=count, clip_range=clip_range, first=first)

    def _set_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._scheduled(self.config.learning_rate, self.config.final_learning_rate)

    def _scheduled(self, start: float, end: float | None) -> float:
        """Linear from start to end over the training; constant without an end."""
        return start if end is None else start + self.progress * (end - start)
