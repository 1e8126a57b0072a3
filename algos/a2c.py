"""Advantage actor-critic (Mnih et al. 2016), synchronous: one step of the policy gradient a rollout."""

from __future__ import annotations

from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor

from algos.agent import Agent
from algos.config import A2CConfig
from algos.descent import Term, Totals, add_up, cut
from algos.learning import Metrics, Penalty
from algos.losses import policy_gradient_loss, value_loss
from algos.metrics import Means, rollout_metrics, sampler_gap
from algos.normalizers import RewardNormalizer
from algos.objective import add_advantages, log_ratios, regularizers, weighted_minibatches
from algos.policy import Policy


class A2C(Agent[A2CConfig]):
    """GAE × policy gradient, one gradient step a rollout.

    Args:
        env: a vector environment; see `algos.collection`.
        policy: what is trained; see `algos.policy`.
        config: hyper-parameters.
        penalty: KL penalty to charge; by default the one that the environment carries, if any.

    Example:
        >>> A2C(env, policy, A2CConfig(steps=16, learning_rate=1e-3)).learn(500_000)  # doctest: +SKIP
    """

    config_type = A2CConfig

    def __init__(
        self, env: VectorEnv, policy: Policy, config: A2CConfig | None = None, *, penalty: Penalty | None = None
    ) -> None:
        super().__init__(env, policy, config, penalty=penalty)
        config = self.config
        self.reward_normalizer = RewardNormalizer(config.gamma) if config.normalize_rewards else None

    def update(self, rollout: TensorDict) -> Metrics:
        """Take one step on a rollout, which gets its value and advantage columns; returns metrics."""
        config, means = self.config, Means()
        add_advantages(rollout, policy=self.policy, config=config, normalizer=self.reward_normalizer)
        self.descent.schedule(self.progress)
        for batch in weighted_minibatches(
            rollout, policy=self.policy, generator=self.generator, normalize_advantage=config.normalize_advantage
        ):
            means.add(self.descent.step(self._loss, cut(batch, config.micro_batch_size)))
        return means.result() | rollout_metrics(rollout)

    def _loss(self, part: TensorDict) -> tuple[Tensor, Totals]:
        """The actor-critic loss on a part of the rollout, and its terms."""
        config, mask = self.config, part["mask"]
        evaluation = self.policy.evaluate(part)
        assert evaluation.value is not None, "a policy's evaluation has a value; only a reference's has none"
        ratios = log_ratios(part, evaluation=evaluation, policy=self.policy, config=config, first=True)
        improvement = policy_gradient_loss(log_ratio=ratios, advantage=part["advantage"], mask=mask)
        error = value_loss(value=evaluation.value, value_target=part["value_target"], mask=mask)
        terms = {"policy/loss": Term(1.0, improvement), "value/loss": Term(config.value_coefficient, error)}
        terms |= regularizers(part, evaluation=evaluation, policy=self.policy, penalty=self.penalty, config=config)
        loss, totals = add_up(terms, weight=part["weight"], share=part["share"])
        return loss, totals | sampler_gap(ratios.detach(), share=part["share"])
