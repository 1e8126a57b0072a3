"""REINFORCE with a baseline (Williams 1992): returns of whole episodes, one step of the policy gradient a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tensordict import TensorDict

from algos.advantages import discounted_returns, subtract_mean
from algos.agent import Agent
from algos.config import PolicyGradientConfig, check_whole_episodes
from algos.descent import cut
from algos.invariants import check_range
from algos.learning import Metrics
from algos.metrics import Means, rollout_metrics
from algos.objective import policy_gradient, weighted_minibatches


@dataclass(frozen=True, kw_only=True)
class REINFORCEConfig(PolicyGradientConfig):
    """Hyper-parameters of REINFORCE."""

    steps: int | None = None
    """Not for this algorithm: a return needs the whole episode."""
    episodes: int | None = 32
    """Whole episodes in a rollout."""
    gamma: float = 0.99
    """Discount a step; 1 for text."""
    whiten_advantages: bool = True
    """Scale the advantages of each rollout to mean 0 and variance 1; False only subtracts the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_episodes(self)
        check_range(self, unit_interval=["gamma"])


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
        for batch in weighted_minibatches(
            rollout, policy=self.policy, generator=self.generator, whiten_advantages=config.whiten_advantages
        ):
            means.add(self.descent.step(loss_of, cut(batch, config.micro_batch_size)))
        return means.result() | rollout_metrics(rollout)
