"""Advantage actor-critic (Mnih et al. 2016), synchronous: one policy-gradient step per rollout."""

from tensordict import TensorDict
from torch import Tensor

from algos.agent import Agent
from algos.config import A2CConfig
from algos.losses import value_loss
from algos.optimize import Evaluation, Metrics, Term, Terms, add_advantages, optimize, policy_gradient


class A2C(Agent[A2CConfig]):
    """GAE policy gradient, one gradient step per rollout. Arguments: see `algos.agent.Agent`.

    Example:
        >>> A2C(env, policy, A2CConfig(num_steps=16, learning_rate=1e-3)).learn(500_000)  # doctest: +SKIP
    """

    config_type = A2CConfig
    several_processes = True

    def update(self, rollout: TensorDict) -> Metrics:
        """Take one step on a rollout and add its value and advantage columns; return metrics."""
        add_advantages(self, rollout)
        return optimize(self, rollout, self._terms, normalize_advantage=self.config.normalize_advantage)

    def _terms(self, part: TensorDict, evaluation: Evaluation, log_ratio: Tensor) -> Terms:
        """The actor-critic loss on a part of the rollout."""
        assert evaluation.value is not None, "a policy's evaluation has a value; only a reference's has none"
        error = value_loss(value=evaluation.value, value_target=part["value_target"], mask=part["mask"])
        return policy_gradient(part, evaluation, log_ratio) | {"value/loss": Term(self.config.vf_coef, error)}
