"""Deep Q-learning (Mnih et al. 2015), by default double (van Hasselt et al. 2016), on torchrl's replay buffer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional

from algos.agent import Agent
from algos.config import DQNConfig, scheduled
from algos.policies.policy import frozen_copy
from algos.policies.q_network import QPolicy
from algos.replay import buffer_state, may_learn, replay_buffer, restore_buffer, sample_batches, store
from algos.training.metrics import MetricMeans, Metrics, StepMetrics
from textenv.names import refuse_unknown

VALUE_LOSSES = {each.__name__: each for each in (functional.mse_loss, functional.huber_loss, functional.smooth_l1_loss)}


class DQN(Agent[DQNConfig]):
    """Q-learning from a replay buffer.

    Arguments: see `algos.agent.Agent`. The environment has Discrete actions, the policy is a `QPolicy`.

    Raises:
        TypeError: on a policy that is not a `QPolicy`.

    Example:
        >>> policy = QPolicy(env.single_observation_space, env.single_action_space)  # doctest: +SKIP
        >>> DQN(env, policy, DQNConfig()).learn(50_000)  # doctest: +SKIP
    """

    config_type = DQNConfig
    policy: QPolicy
    policy_name = "q"

    def __init__(
        self,
        env: VectorEnv,
        policy: QPolicy | None = None,
        config: DQNConfig | None = None,
        *,
        device: str | torch.device | None = None,
        **fields: Any,
    ) -> None:
        if isinstance(env, VectorEnv) and not isinstance(policy, QPolicy | VectorEnv | None):
            raise TypeError(f"policy is a {type(policy).__name__}, but DQN trains only a QPolicy: omit it or pass one")
        refuse_unknown(fields, [field.name for field in dataclasses.fields(DQNConfig)], owner="DQNConfig")
        super().__init__(env, policy, config, device=device, **fields)
        config = self.config
        self.buffer = replay_buffer(config, self.update_generator)
        self.target = frozen_copy(self.policy)
        self.gradient_steps = 0
        """Optimizer steps so far."""

    def collect(self) -> TensorDict:
        """Collect the next rollout with ε-greedy actions."""
        fraction = self.config.exploration_fraction
        progress = 1.0
        if fraction:
            progress = min(self.progress / fraction, 1.0)
        self.policy.exploration = scheduled(1.0, self.config.final_exploration, progress)
        return super().collect()

    def update(self, rollout: TensorDict) -> Metrics:
        """Store a rollout in the replay buffer and learn from samples of the buffer; return metrics."""
        config = self.config

        store(rollout, self.buffer, num_actions=self.policy.num_actions)
        metrics = {"policy/exploration": self.policy.exploration, "update/remembered": len(self.buffer)}

        # Learn from random batches of the buffer
        self.optimizer.schedule(self.progress)
        means = MetricMeans()
        if may_learn(self.buffer, config):
            for batch in sample_batches(self.buffer, config, config.gradient_steps):
                if self.gradient_steps % config.target_update_gradient_steps == 0:
                    self.target.load_state_dict(self.policy.state_dict())
                means.add(self.optimizer.step(self.loss, batch.to(self.policy.device)))
                self.gradient_steps += 1
        self.stop_exploring()
        return means.result() | metrics

    def stop_exploring(self) -> None:
        """See `Agent.stop_exploring`: make the policy greedy."""
        self.policy.exploration = 0.0

    def state_dict(self) -> dict[str, object]:
        """See `Agent.state_dict`; includes the replay buffer and the target network."""
        state = super().state_dict() | buffer_state(self.buffer)
        state["target"] = dict(self.target.named_parameters())
        state["gradient_steps"] = self.gradient_steps
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Agent.load_state_dict`."""
        super().load_state_dict(state)
        policy = self.policy
        restore_buffer(self.buffer, state, policy.observation_space, num_actions=policy.num_actions)
        self.target.load_state_dict(state["target"])
        self.gradient_steps = state["gradient_steps"]

    def loss(self, batch: TensorDict) -> tuple[Tensor, StepMetrics]:
        """Loss of Q(s, a) against `q_target` on a batch ``[b]``, and its metrics."""
        config = self.config

        # Q(s, a) of the actions taken
        action = self.policy.distribution.index(batch["action"])
        q_values = self.policy.action_values(batch["observation"])
        q_value = q_values.gather(-1, action.unsqueeze(-1)).squeeze(-1)

        # Its target, from the next state
        with torch.no_grad():
            next_target = self.target.action_values(batch["next_observation"])
            next_online = next_target
            if config.double:
                next_online = self.policy.action_values(batch["next_observation"])
            target = q_target(
                reward=batch["reward"],
                terminated=batch["terminated"],
                next_target=next_target,
                next_online=next_online,
                open_actions=batch.get("next_action_mask", None),
                gamma=config.gamma,
            )

        loss_function = VALUE_LOSSES[config.loss] if isinstance(config.loss, str) else config.loss
        loss = loss_function(q_value, target)
        return loss, {"value/loss": loss, "value/mean": q_value.mean()}


def q_target(
    *, reward: Tensor, terminated: Tensor, next_target: Tensor, next_online: Tensor, gamma: float,
    open_actions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return r + γ Q'(s', argmax_a Q(s', a)), without the second term at termination (van Hasselt et al. 2016, eq. 4).

    Args:
        reward: float32 ``[b]``.
        terminated: bool ``[b]``.
        next_target: Q' of the target network, ``[b, n]``.
        next_online: Q of the network that chooses the action, ``[b, n]``; in plain DQN the target network.
        gamma: discount.
        open_actions: bool ``[b, n]``, actions available in the next state; None for all.

    Returns:
        float32 ``[b]``.
    """
    if open_actions is not None:
        next_online = next_online.masked_fill(~open_actions, torch.finfo(next_online.dtype).min)
    best = next_target.gather(-1, next_online.argmax(-1, keepdim=True)).squeeze(-1)
    return reward + gamma * torch.where(terminated, 0.0, best)
