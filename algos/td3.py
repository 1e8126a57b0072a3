"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor

from algos.agent import Agent
from algos.config import TD3Config
from algos.optimizer import Optimizer
from algos.policies.policy import frozen_copy
from algos.policies.twin_critics import TD3Policy
from algos.replay import (
    buffer_state,
    count_updates,
    may_learn,
    move_towards,
    replay_buffer,
    restore_buffer,
    sample_batches,
    store,
)
from algos.training.metrics import MetricMeans, Metrics, StepMetrics
from textenv.names import refuse_unknown


class TD3(Agent[TD3Config]):
    """Deterministic policy gradient from a replay buffer, with twin critics, smoothed targets and a delayed policy.

    Arguments: see `algos.agent.Agent`. Actions are a ``Box`` of floats with bounds, the policy is a `TD3Policy`.

    Raises:
        TypeError: on a policy that is not a `TD3Policy`.
        ValueError: if the actions have no bounds.

    Example:
        >>> TD3(gymnasium.make_vec("Pendulum-v1", num_envs=1), gamma=0.98).learn(20_000)  # doctest: +SKIP
    """

    config_type = TD3Config
    policy: TD3Policy
    policy_name = "td3"

    def __init__(
        self,
        env: VectorEnv,
        policy: TD3Policy | None = None,
        config: TD3Config | None = None,
        *,
        device: str | torch.device | None = None,
        **fields: Any,
    ) -> None:
        if isinstance(env, VectorEnv) and not isinstance(policy, TD3Policy | VectorEnv | None):
            raise TypeError(f"policy is a {type(policy).__name__}, but TD3 trains only a TD3Policy: omit it")
        refuse_unknown(fields, [field.name for field in dataclasses.fields(TD3Config)], owner="TD3Config")
        super().__init__(env, policy, config, device=device, **fields)
        config = self.config
        policy = self.policy
        self.buffer = replay_buffer(config, self.update_generator)
        self.target = frozen_copy(policy)
        self.critic_optimizer = Optimizer(policy.critic.parameters(), config, policy=policy)
        self.actor_optimizer = Optimizer(policy.actor.parameters(), config, policy=policy)
        self.gradient_steps = 0
        """Steps of the critics so far."""
        self.updates_due = 0.0
        """Updates that the steps so far have earned, but that have not been made: a fraction of one."""

    def collect(self) -> TensorDict:
        """Collect the next rollout, with noise on its actions; they are drawn uniformly until learning starts."""
        distribution = self.policy.distribution
        distribution.noise = self.config.exploration_noise
        self.policy.noise_correlation = self.config.noise_correlation
        distribution.uniform = len(self.buffer) < self.config.learning_starts
        return super().collect()

    def update(self, rollout: TensorDict) -> Metrics:
        """Store a rollout in the replay buffer and learn from samples of the buffer; return metrics."""
        config = self.config
        num_steps = store(rollout, self.buffer)
        self.critic_optimizer.schedule(self.progress)
        self.actor_optimizer.schedule(self.progress)

        # Learn from random batches of the buffer
        means = MetricMeans()
        if may_learn(self.buffer, config):
            num_updates, self.updates_due = count_updates(self.updates_due, num_steps, config.updates_per_step)
            for batch in sample_batches(self.buffer, config, num_updates):
                means.add(self.improve(self.with_noise(batch.to(self.policy.device))))
        self.stop_exploring()
        return means.result() | {"update/remembered": len(self.buffer)}

    def stop_exploring(self) -> None:
        """See `Agent.stop_exploring`: make the policy deterministic."""
        self.policy.distribution.noise = 0.0
        self.policy.distribution.uniform = False

    def with_noise(self, batch: TensorDict) -> TensorDict:
        """Add standard normal noise for the target policy's action in the next state of each step, ``[b, numbers]``."""
        shape = (len(batch), self.policy.distribution.size)
        noise = torch.randn(shape, generator=self.update_generator, device="cpu")
        batch["next_noise"] = noise.to(batch["reward"].device)
        return batch

    def improve(self, batch: TensorDict) -> StepMetrics:
        """Take a step of the critics on a batch ``[b]``, and after every ``policy_delay``-th one a step of the policy.

        Returns:
            Metrics; empty if a step was skipped (`algos.config.Config.skip_nonfinite`).
        """
        config = self.config
        metrics = self.critic_optimizer.step(self.critic_loss, batch)
        if not metrics:
            return {}
        self.gradient_steps += 1
        metrics["value/grad_norm"] = metrics.pop("update/grad_norm")
        if self.gradient_steps % config.policy_delay:
            return metrics

        # The policy, by the new critics, and the target networks
        actor_metrics = self.actor_optimizer.step(self.policy_loss, batch)
        if not actor_metrics:
            return {}
        move_towards(self.target, self.policy, config.target_rate)
        return metrics | actor_metrics

    def critic_loss(self, batch: TensorDict) -> tuple[Tensor, StepMetrics]:
        """Squared error of both critics, summed, against `clipped_double_target`; and its metrics."""
        config = self.config
        policy = self.policy
        with torch.no_grad():
            next_observation = policy.read(batch["next_observation"])
            next_action = policy.distribution.mode(self.target.actor(next_observation))
            clip = config.target_noise_clip
            noise = (config.target_noise * batch["next_noise"]).clamp(-clip, clip)
            next_values = self.target.critic(next_observation, (next_action + noise).clamp(-1, 1))
            target = clipped_double_target(
                reward=batch["reward"], terminated=batch["terminated"], next_values=next_values, gamma=config.gamma
            )
        action = policy.distribution.bounds.scale(batch["action"]).clamp(-1, 1)
        values = policy.critic(policy.read(batch["observation"]), action)
        loss = (values - target).square().mean(1).sum()
        return loss, {"value/loss": loss, "value/mean": values.mean()}

    def policy_loss(self, batch: TensorDict) -> tuple[Tensor, StepMetrics]:
        """Mean of -Q(s, π(s)) by the first critic; and its metrics."""
        policy = self.policy
        observation = policy.read(batch["observation"])
        action = policy.distribution.mode(policy.actor(observation))
        loss = -policy.critic.first(observation, action).mean()
        return loss, {"policy/loss": loss}

    def state_dict(self) -> dict[str, object]:
        """See `Agent.state_dict`; includes the replay buffer and the target networks."""
        state = super().state_dict() | buffer_state(self.buffer)
        state["target"] = dict(self.target.named_parameters())
        state["critic_optimizer"] = self.critic_optimizer.state_dict()
        state["actor_optimizer"] = self.actor_optimizer.state_dict()
        state["gradient_steps"] = self.gradient_steps
        state["updates_due"] = self.updates_due
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Agent.load_state_dict`."""
        super().load_state_dict(state)
        restore_buffer(self.buffer, state, self.policy.observation_space)
        self.target.load_state_dict(state["target"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.gradient_steps = state["gradient_steps"]
        self.updates_due = state["updates_due"]


def clipped_double_target(*, reward: Tensor, terminated: Tensor, next_values: Tensor, gamma: float) -> Tensor:
    """Return r + γ min Q'(s', a'), without the second term at termination (Fujimoto et al. 2018, eq. 10).

    Args:
        reward: float32 ``[b]``.
        terminated: bool ``[b]``.
        next_values: Q' of both target networks, ``[2, b]``.
        gamma: discount.

    Returns:
        float32 ``[b]``.
    """
    return reward + gamma * torch.where(terminated, 0.0, next_values.amin(0))
