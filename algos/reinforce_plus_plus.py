"""REINFORCE++ (Hu et al. 2025): PPO's clipped ratio without a critic, and advantages that are whitened over the batch.

A KL belongs into the reward, token by token, as k1: ``kl_coef=0.01`` of the agent. The paper's advantage (eq. 7) is the
return of a token from there on, KL included; mean and deviation are those of all tokens of the rollout (eq. 8).
"""

from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from algos import losses
from algos.advantages import discounted_returns
from algos.agent import Agent
from algos.config import REINFORCEPlusPlusConfig, discount
from algos.importance import with_importance_weights
from algos.minibatches import minibatches
from algos.training.invariants import check_first
from algos.training.metrics import (
    MetricMeans,
    Metrics,
    StepMetrics,
    minibatch_means,
    ratio_metrics,
    sampler_gap,
)
from textenv.rollout import join_episodes, split_column


class REINFORCEPlusPlus(Agent[REINFORCEPlusPlusConfig]):
    """Clipped policy loss, several steps on each rollout; advantages are whitened returns to go.

    Arguments: see `algos.agent.Agent`.

    Example:
        >>> REINFORCEPlusPlus(env, policy, kl_coef=0.01).learn(500_000)  # doctest: +SKIP
    """

    config_type = REINFORCEPlusPlusConfig
    several_processes = True

    def update(self, rollout: TensorDict) -> Metrics:
        """Improve the policy on a rollout and add its advantage column; return metrics."""
        config = self.config

        # Returns to go, which the minibatches whiten; importance weights if another engine sampled
        episodes = join_episodes(rollout)
        returns = discounted_returns(
            reward=episodes["reward"],
            terminated=episodes["terminated"],
            truncated=episodes["truncated"],
            mask=episodes["mask"],
            gamma=discount(config.gamma),
        )
        rollout["advantage"] = split_column(returns, rollout)
        rollout, sampler_metrics = with_importance_weights(rollout, policy=self.policy, config=config)
        self.optimizer.schedule(self.progress)

        # A step for each minibatch
        means = MetricMeans()
        batches = minibatches(
            rollout,
            sequential=self.policy.sequential,
            generator=self.update_generator,
            size=config.minibatch_size,
            num_epochs=config.num_epochs,
            normalize_advantage="rollout",
            aggregation=config.aggregation,
        )
        with self.sharded_weights():
            for batch in batches:
                # Losses such as Clip-Cov choose among all steps, so before the minibatch is split into parts
                losses.select_steps(policy_loss=config.policy_loss, batch=batch, generator=self.update_generator)
                is_first = means.count == 0  # the policy is still the one that acted
                loss_of = partial(self.loss, first=is_first)
                means.add(self.optimizer.step(loss_of, batch))
        return means.result() | {"update/minibatches": means.count} | sampler_metrics

    def loss(self, batch: TensorDict, *, first: bool = False) -> tuple[Tensor, StepMetrics]:
        """The objective, negated (eq. 6): the loss of a minibatch, or of a part of it, and its metrics.

        Args:
            batch: steps ``[b]`` or rows ``[B, T]``, with the columns of `algos.minibatches.minibatches`.
            first: True before the first step of an update, when the policy is the one that acted.
        """
        config = self.config
        mask = batch["mask"]
        metrics: StepMetrics = {}

        # Ratio of the action probabilities to those of the policy that acted
        evaluation = self.policy.evaluate(batch)
        log_ratio = losses.log_ratio(log_prob=evaluation.log_prob, old_log_prob=batch["log_prob"], mask=mask)
        if first:
            check_first(
                log_ratio, batch=batch, evaluation=evaluation, policy=self.policy, tolerance=config.ratio_tolerance
            )
            metrics |= sampler_gap(batch, log_ratio)

        # Policy loss
        policy_loss = losses.weighted_policy_loss(
            batch=batch,
            log_ratio=log_ratio,
            policy_loss=config.policy_loss,
            clip_range=config.clip_range,
            clip_higher=config.clip_higher,
        )

        # Entropy, which needs no gradient if it is only logged
        entropy = torch.where(mask, evaluation.entropy, 0.0)
        if config.ent_coef == 0:
            entropy = entropy.detach()

        # Loss of each step
        loss = policy_loss - config.ent_coef * entropy
        logged = {"policy/loss": policy_loss, "policy/entropy": entropy}
        if self.penalty is not None and self.penalty.place == "loss":
            kl_loss = self.penalty.loss(batch, log_prob=evaluation.log_prob, policy=self.policy)
            loss = loss + kl_loss
            logged["reference/loss"] = kl_loss

        metrics |= minibatch_means(batch, logged)
        metrics |= ratio_metrics(batch, log_ratio, clip_range=config.clip_range, clip_higher=config.clip_higher)
        return (loss * batch["weight"]).sum(), metrics
