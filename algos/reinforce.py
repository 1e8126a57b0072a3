"""REINFORCE with a baseline (Williams 1992): returns of whole episodes, one step of the policy gradient a rollout."""

from __future__ import annotations

from functools import partial

from tensordict import TensorDict

from algos.advantages import discounted_returns, subtract_mean
from algos.agent import Agent
from algos.config import REINFORCEConfig
from algos.descent import cut
from algos.learning import Metrics
from algos.metrics import Means, rollout_metrics
from algos.objective import policy_gradient, weighted_minibatches


class REINFORCE(Agent[REINFORCEConfig]):
    """Return to go minus the batch's mean × policy gradient. No value is learnt.

    Args:
        env: a vector environment; see `algos.collection`.
        policy: what is trained; see `algos.policy`.
        config: hyper-parameters.
        penalty: KL penalty to charge; by default the one that the environment carries, if any.

    Example:
        >>> REINFORCE(env, policy, REINFORCEConfig(episodes=16)).learn(500_000)  # doctest: +SKIP
    """

    config_type = REINFORCEConfig

    def update(self, rollout: TensorDict) -> Metrics:
        """Take one step on a rollout, which gets its advantage column; returns metrics."""
        config, means, mask = self.config, Means(), rollout["mask"]
        returns = discounted_returns(
            **{name: rollout[name] for name in ("reward", "terminated", "truncated", "mask")}, gamma=config.gamma
        )
        rollout["advantage"] = subtract_mean(returns, mask=mask)
        self.descent.schedule(self.progress)
        loss_of = partial(policy_gradient, policy=self.policy, penalty=self.penalty, config=config)
        scaled = "rollout" if config.normalize_advantage else False
        for batch in weighted_minibatches(
            rollout, policy=self.policy, generator=self.generator, normalize_advantage=scaled
        ):
            means.add(self.descent.step(loss_of, cut(batch, config.micro_batch_size)))
        return means.result() | rollout_metrics(rollout)
