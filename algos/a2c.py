"""Advantage actor-critic (Mnih et al. 2016), synchronous: one policy-gradient step per rollout."""

import torch
from tensordict import TensorDict
from torch import Tensor

from algos import losses
from algos.advantages import add_advantages
from algos.agent import Agent
from algos.config import A2CConfig
from algos.minibatches import minibatches
from algos.training.invariants import check_first
from algos.training.metrics import MetricMeans, Metrics, StepMetrics, minibatch_means, sampler_gap


class A2C(Agent[A2CConfig]):
    """GAE policy gradient, one gradient step per rollout. Arguments: see `algos.agent.Agent`.

    Example:
        >>> A2C(env, policy, A2CConfig(num_steps=16, learning_rate=1e-3)).learn(500_000)  # doctest: +SKIP
    """

    config_type = A2CConfig
    several_processes = True

    def update(self, rollout: TensorDict) -> Metrics:
        """Take one step on a rollout and add its value and advantage columns; return metrics."""
        metrics = add_advantages(self, rollout)
        self.optimizer.schedule(self.progress)

        # One step: the only minibatch is the whole rollout
        means = MetricMeans()
        batches = minibatches(
            rollout,
            sequential=self.policy.sequential,
            generator=self.update_generator,
            normalize_advantage=self.config.normalize_advantage,
        )
        with self.sharded_weights():
            for batch in batches:
                means.add(self.optimizer.step(self.loss, batch))
        return means.result() | {"update/minibatches": means.count} | metrics

    def loss(self, batch: TensorDict) -> tuple[Tensor, StepMetrics]:
        """The actor-critic loss of the rollout, or of a part of it, and its metrics."""
        config = self.config
        mask = batch["mask"]

        # The policy is still the one that acted: all ratios are 1
        evaluation = self.policy.evaluate(batch)
        log_ratio = losses.log_ratio(log_prob=evaluation.log_prob, old_log_prob=batch["log_prob"], mask=mask)
        check_first(log_ratio, batch=batch, evaluation=evaluation, policy=self.policy, tolerance=config.ratio_tolerance)

        # Policy loss, -A log π up to a constant; value loss; entropy
        policy_loss = losses.policy_gradient_loss(log_ratio=log_ratio, advantage=batch["advantage"], mask=mask)
        value_loss = losses.value_loss(value=evaluation.value, value_target=batch["value_target"], mask=mask)
        entropy = torch.where(mask, evaluation.entropy, 0.0)

        # A term without weight is only logged: it needs no gradient.
        if config.vf_coef == 0:
            value_loss = value_loss.detach()
        if config.ent_coef == 0:
            entropy = entropy.detach()

        # Loss of each step
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        logged = {"policy/loss": policy_loss, "value/loss": value_loss, "policy/entropy": entropy}
        if self.penalty is not None and self.penalty.place == "loss":
            kl_loss = self.penalty.loss(batch, log_prob=evaluation.log_prob, policy=self.policy)
            loss = loss + kl_loss
            logged["reference/loss"] = kl_loss

        metrics = minibatch_means(batch, logged) | sampler_gap(batch, log_ratio)
        return (loss * batch["weight"]).sum(), metrics
