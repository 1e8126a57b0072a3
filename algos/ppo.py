"""Proximal policy optimization (Schulman et al. 2017), for control and language models."""

from collections.abc import Callable, Mapping
from typing import Any

from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor

from algos.agent import Agent, restore_state, saved_state
from algos.config import PPOConfig, scheduled
from algos.losses import value_loss
from algos.optimize import Evaluation, Metrics, Sums, Term, Terms, add_advantages, clipped_loss, optimize
from algos.policies.policy import Policy


class PPO(Agent[PPOConfig]):
    """GAE with a clipped policy loss; control and text differ only in the arguments.

    Args:
        env: a vector environment; see `algos.collection`.
        policy: the policy to train; see `algos.policies.policy`. None makes one for the spaces, with the config's seed.
        config: hyper-parameters; `algos.presets` has named presets.
        auxiliary: a further loss of the policy, added at every minibatch: `algos.TextLoss` gives PPO-ptx. Its state is
            saved if it has ``state_dict``.
        options: ``penalty``, ``kl_coef`` and config fields; see `algos.agent.Agent`.

    Raises:
        ValueError: if the config does not fit the environment, or the KL would be charged twice.

    Example:
        >>> env = gymnasium.make_vec("CartPole-v1", num_envs=8)  # doctest: +SKIP
        >>> PPO(env, seed=1, learning_rate=3e-3).learn(100_000)  # doctest: +SKIP
    """

    config_type = PPOConfig

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy | None = None,
        config: PPOConfig | None = None,
        *,
        auxiliary: Callable[[Policy], Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(env, policy, config, **options)
        self.auxiliary = auxiliary
        self.clip_range = self.config.clip_range

    def state_dict(self) -> dict[str, Any]:
        """See `Agent.state_dict`; includes the auxiliary loss's state, if it has one."""
        return super().state_dict() | {"auxiliary": saved_state(self.auxiliary)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Agent.load_state_dict`."""
        super().load_state_dict(state)
        restore_state(self.auxiliary, state["auxiliary"])

    def update(self, rollout: TensorDict) -> Metrics:
        """Improve the policy on a rollout and add its value and advantage columns; return metrics."""
        config = self.config
        add_advantages(self, rollout)
        self.clip_range = scheduled(config.clip_range, config.final_clip_range, self.progress)
        return optimize(
            self,
            rollout,
            self._terms,
            size=config.minibatch_size,
            num_epochs=config.num_epochs,
            normalize_advantage=config.normalize_advantage,
            aggregation=config.aggregation,
            clip_range=self.clip_range,
            target_kl=config.target_kl,
            others=[] if self.auxiliary is None else [self._auxiliary_loss],
        )

    def _terms(self, part: TensorDict, evaluation: Evaluation, log_ratio: Tensor) -> Terms:
        """PPO's objective (eq. 9) on a part of a minibatch."""
        config, mask = self.config, part["mask"]
        assert evaluation.value is not None, "a policy's evaluation has a value; only a reference's has none"
        improvement = clipped_loss(part, log_ratio=log_ratio, clip_range=self.clip_range, config=config)
        error = value_loss(
            value=evaluation.value,
            value_target=part["value_target"],
            mask=mask,
            old_value=part["value"],
            clip_range=config.clip_range_vf,
        )
        return {"policy/loss": Term(1.0, improvement), "value/loss": Term(config.vf_coef, error)}

    def _auxiliary_loss(self) -> tuple[Tensor, Sums]:
        assert self.auxiliary is not None
        loss = self.auxiliary(self.policy)
        return loss, {"auxiliary/loss": loss}
