"""REINFORCE with a baseline (Williams 1992): returns of whole episodes, one policy-gradient step per rollout."""

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor

from algos import losses
from algos.advantages import discounted_returns, subtract_mean
from algos.agent import Agent
from algos.agent_baseline import AgentBaseline
from algos.config import REINFORCEConfig, discount
from algos.minibatches import minibatches
from algos.policies.policy import Policy
from algos.storage.serialization import restore_state, saved_state
from algos.training.invariants import check_first
from algos.training.metrics import MetricMeans, Metrics, StepMetrics, minibatch_means, sampler_gap
from textenv.rollout import join_episodes, split_column


class REINFORCE(Agent[REINFORCEConfig]):
    """Policy gradient without a critic; advantages are returns to go minus a baseline, such as the batch mean.

    Arguments: see `algos.agent.Agent`.

    Example:
        >>> REINFORCE(env, policy, REINFORCEConfig(num_episodes=16)).learn(500_000)  # doctest: +SKIP
    """

    config_type = REINFORCEConfig
    several_processes = True

    def __init__(
        self, env: VectorEnv, policy: Policy | None = None, config: REINFORCEConfig | None = None, **options: Any
    ) -> None:
        super().__init__(env, policy, config, **options)
        self.agent_baseline: AgentBaseline | None = None
        if self.config.baseline == "agent":
            self.agent_baseline = AgentBaseline()

    def state_dict(self) -> dict[str, object]:
        """See `Agent.state_dict`."""
        return super().state_dict() | {"agent_baseline": saved_state(self.agent_baseline)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Agent.load_state_dict`."""
        super().load_state_dict(state)
        restore_state(self.agent_baseline, state.get("agent_baseline"))  # absent before version 0.12

    def update(self, rollout: TensorDict) -> Metrics:
        """Take one step on a rollout and add its advantage column; return metrics."""
        episodes = join_episodes(rollout)
        joined_returns = discounted_returns(
            reward=episodes["reward"],
            terminated=episodes["terminated"],
            truncated=episodes["truncated"],
            mask=episodes["mask"],
            gamma=discount(self.config.gamma),
        )
        if self.agent_baseline is None:
            rollout["advantage"] = subtract_mean(split_column(joined_returns, rollout), mask=rollout["mask"])
        else:
            baseline = self.agent_baseline(episodes)
            advantage = torch.where(episodes["mask"], joined_returns - baseline[:, None], 0.0)
            rollout["advantage"] = split_column(advantage, rollout)
        normalize_advantage = "rollout" if self.config.normalize_advantage else False
        self.optimizer.schedule(self.progress)

        # One step: the only minibatch is the whole rollout
        means = MetricMeans()
        batches = minibatches(
            rollout,
            sequential=self.policy.sequential,
            generator=self.update_generator,
            normalize_advantage=normalize_advantage,
        )
        with self.sharded_weights():
            for batch in batches:
                means.add(self.optimizer.step(self.loss, batch))
        return means.result() | {"update/minibatches": means.count}

    def loss(self, batch: TensorDict) -> tuple[Tensor, StepMetrics]:
        """The policy-gradient loss of the rollout, or of a part of it, and its metrics."""
        config = self.config
        mask = batch["mask"]

        # The policy is still the one that acted: all ratios are 1
        evaluation = self.policy.evaluate(batch)
        log_ratio = losses.log_ratio(log_prob=evaluation.log_prob, old_log_prob=batch["log_prob"], mask=mask)
        check_first(log_ratio, batch=batch, evaluation=evaluation, policy=self.policy, tolerance=config.ratio_tolerance)

        # Policy loss, -A log π up to a constant; entropy, which needs no gradient if it is only logged
        policy_loss = losses.policy_gradient_loss(log_ratio=log_ratio, advantage=batch["advantage"], mask=mask)
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

        metrics = minibatch_means(batch, logged) | sampler_gap(batch, log_ratio)
        return (loss * batch["weight"]).sum(), metrics
