"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018b, arXiv 1812.05905).

The policy maximizes the discounted sum of r + α H, where H is the entropy of the actions in a state. Actions are
scaled to [-1, 1] for critics, log-densities and entropies.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor, nn

from algos.agent import Agent
from algos.config import SACConfig
from algos.optimizer import Optimizer
from algos.policies.twin_critics import SACPolicy
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


class SAC(Agent[SACConfig]):
    """Soft actor-critic from a replay buffer.

    Arguments: see `algos.agent.Agent`. Actions are a ``Box`` of floats with bounds, the policy is a `SACPolicy`.

    Raises:
        TypeError: on a policy that is not a `SACPolicy`.
        ValueError: if the actions have no bounds.

    Example:
        >>> SAC(gymnasium.make_vec("Pendulum-v1", num_envs=1), learning_rate=1e-3).learn(10_000)  # doctest: +SKIP
    """

    config_type = SACConfig
    policy: SACPolicy
    policy_name = "sac"

    def __init__(
        self,
        env: VectorEnv,
        policy: SACPolicy | None = None,
        config: SACConfig | None = None,
        *,
        device: str | torch.device | None = None,
        **fields: Any,
    ) -> None:
        if isinstance(env, VectorEnv) and not isinstance(policy, SACPolicy | VectorEnv | None):
            raise TypeError(
                f"policy is a {type(policy).__name__}, but SAC trains only a SACPolicy or SACGSDEPolicy: omit it"
            )
        refuse_unknown(fields, [field.name for field in dataclasses.fields(SACConfig)], owner="SACConfig")
        super().__init__(env, policy, config, device=device, **fields)
        config = self.config
        policy = self.policy
        self.buffer = replay_buffer(config, self.update_generator)
        self.target_critic = copy.deepcopy(policy.critic).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.zeros((), device=policy.device))
        """log α, if the temperature is learned."""
        self.target_entropy = -float(policy.distribution.bounds.size)
        """Mean entropy that a learned temperature aims at, nats."""

        # Optimizers; the deviation of state-dependent noise is trained with the actor
        self.critic_optimizer = Optimizer(policy.critic.parameters(), config, policy=policy)
        actor_and_noise = nn.ModuleList([policy.actor, policy.distribution])
        self.actor_optimizer = Optimizer(actor_and_noise.parameters(), config, policy=policy)
        without_decay = dataclasses.replace(config, weight_decay=0.0)  # which would pull α towards 1
        self.temperature_optimizer = Optimizer([self.log_temperature], without_decay, policy=policy)
        self.updates_due = 0.0
        """Updates that the steps so far have earned, but that have not been made: a fraction of one."""

    @property
    def temperature(self) -> Tensor:
        """Temperature α, a scalar without gradient."""
        if self.config.temperature is not None:
            return torch.full_like(self.log_temperature, self.config.temperature)
        return self.log_temperature.detach().exp()

    def collect(self) -> TensorDict:
        """Collect the next rollout; its actions are drawn uniformly until learning starts."""
        self.policy.distribution.uniform = len(self.buffer) < self.config.learning_starts
        return super().collect()

    def update(self, rollout: TensorDict) -> Metrics:
        """Store a rollout in the replay buffer and learn from samples of the buffer; return metrics."""
        config = self.config
        self.stop_exploring()
        num_steps = store(rollout, self.buffer)
        for optimizer in (self.critic_optimizer, self.actor_optimizer, self.temperature_optimizer):
            optimizer.schedule(self.progress)

        # Learn from random batches of the buffer
        means = MetricMeans()
        if may_learn(self.buffer, config):
            num_updates, self.updates_due = count_updates(self.updates_due, num_steps, config.updates_per_step)
            for batch in sample_batches(self.buffer, config, num_updates):
                means.add(self.improve(self.with_noise(batch.to(self.policy.device))))
        return means.result() | {"update/remembered": len(self.buffer)}

    def stop_exploring(self) -> None:
        """See `Agent.stop_exploring`: draw actions from the policy again, not uniformly."""
        self.policy.distribution.uniform = False

    def with_noise(self, batch: TensorDict) -> TensorDict:
        """Add standard normal noise for the policy's actions in both states of each step: ``[b, numbers]`` each."""
        shape = (len(batch), self.policy.distribution.bounds.size)
        for name in ("noise", "next_noise"):
            noise = torch.randn(shape, generator=self.update_generator, device="cpu")
            batch[name] = noise.to(batch["reward"].device)
        return batch

    def improve(self, batch: TensorDict) -> StepMetrics:
        """Take a step of the critics, of the policy and of the temperature on a batch ``[b]``; return metrics.

        Returns:
            Empty if a step was skipped (`algos.config.Config.skip_nonfinite`).
        """
        # The critics, then the policy by the new critics
        critic_metrics = self.critic_optimizer.step(self.critic_loss, batch)
        if not critic_metrics:
            return {}
        actor_metrics = self.actor_optimizer.step(self.policy_loss, batch)
        if not actor_metrics:
            return {}
        critic_metrics["value/grad_norm"] = critic_metrics.pop("update/grad_norm")
        metrics = critic_metrics | actor_metrics
        metrics["policy/temperature"] = self.temperature

        # The temperature rises while the entropy is below its target. d loss / d log α is linear in the entropy, so
        # that α's own size does not change the speed
        if self.config.temperature is None:
            surplus = actor_metrics["policy/entropy"] - self.target_entropy
            self.temperature_optimizer.step(lambda _: (self.log_temperature * surplus, {}), batch)

        move_towards(self.target_critic, self.policy.critic, self.config.target_rate)
        return metrics

    def critic_loss(self, batch: TensorDict) -> tuple[Tensor, StepMetrics]:
        """Half the squared error of both critics, summed, against `soft_target`; and its metrics."""
        policy = self.policy
        with torch.no_grad():
            next_observation = policy.read(batch["next_observation"])
            next_output = policy.actor(next_observation)
            next_action, next_log_prob = policy.distribution.scaled_sample(next_output, batch["next_noise"])
            target = soft_target(
                reward=batch["reward"],
                terminated=batch["terminated"],
                next_values=self.target_critic(next_observation, next_action),
                next_log_prob=next_log_prob,
                temperature=self.temperature,
                gamma=self.config.gamma,
            )
        action = policy.distribution.bounds.scale(batch["action"]).clamp(-1, 1)
        values = policy.critic(policy.read(batch["observation"]), action)
        loss = 0.5 * (values - target).square().mean(1).sum()
        return loss, {"value/loss": loss, "value/mean": values.mean()}

    def policy_loss(self, batch: TensorDict) -> tuple[Tensor, StepMetrics]:
        """Mean of α log π(a|s) - min Q(s, a) over the policy's own actions; and its metrics."""
        policy = self.policy
        observation = policy.read(batch["observation"])
        action, log_prob = policy.distribution.scaled_sample(policy.actor(observation), batch["noise"])
        value = policy.critic(observation, action, frozen=True).amin(0)
        loss = (self.temperature * log_prob - value).mean()
        return loss, {"policy/loss": loss, "policy/entropy": -log_prob.mean()}

    def state_dict(self) -> dict[str, object]:
        """See `Agent.state_dict`; includes the replay buffer, the target network and the temperature."""
        state = super().state_dict() | buffer_state(self.buffer)
        state["target_critic"] = dict(self.target_critic.named_parameters())
        state["log_temperature"] = self.log_temperature.detach()
        state["critic_optimizer"] = self.critic_optimizer.state_dict()
        state["actor_optimizer"] = self.actor_optimizer.state_dict()
        state["temperature_optimizer"] = self.temperature_optimizer.state_dict()
        state["updates_due"] = self.updates_due
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Agent.load_state_dict`."""
        super().load_state_dict(state)
        restore_buffer(self.buffer, state, self.policy.observation_space)
        self.target_critic.load_state_dict(state["target_critic"])
        self.log_temperature.data.copy_(state["log_temperature"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.temperature_optimizer.load_state_dict(state["temperature_optimizer"])
        self.updates_due = state["updates_due"]


def soft_target(
    *, reward: Tensor, terminated: Tensor, next_values: Tensor, next_log_prob: Tensor, temperature: Tensor, gamma: float
) -> Tensor:
    """Return r + γ (min Q'(s', a') - α log π(a')), without the second term at termination (eq. 3 and 5).

    Args:
        reward: float32 ``[b]``.
        terminated: bool ``[b]``.
        next_values: Q' of both target networks, ``[2, b]``.
        next_log_prob: log-density of the next action, ``[b]``.
        temperature: α, a scalar.
        gamma: discount.

    Returns:
        float32 ``[b]``.
    """
    soft_value = next_values.amin(0) - temperature * next_log_prob
    return reward + gamma * torch.where(terminated, 0.0, soft_value)
