"""REINFORCE with a baseline (Williams 1992): returns of whole episodes, one policy-gradient step per rollout."""

from tensordict import TensorDict

from algos.advantages import discounted_returns, subtract_mean
from algos.agent import Agent
from algos.config import REINFORCEConfig
from algos.optimize import Metrics, optimize, policy_gradient


class REINFORCE(Agent[REINFORCEConfig]):
    """Policy gradient without a critic; advantages are returns to go minus the batch mean.

    Arguments: see `algos.agent.Agent`.

    Example:
        >>> REINFORCE(env, policy, REINFORCEConfig(num_episodes=16)).learn(500_000)  # doctest: +SKIP
    """

    config_type = REINFORCEConfig
    several_processes = True

    def update(self, rollout: TensorDict) -> Metrics:
        """Take one step on a rollout and add its advantage column; return metrics."""
        columns = {name: rollout[name] for name in ("reward", "terminated", "truncated", "mask")}
        returns = discounted_returns(**columns, gamma=self.config.gamma)
        rollout["advantage"] = subtract_mean(returns, mask=rollout["mask"])
        scaled = "rollout" if self.config.normalize_advantage else False
        return optimize(self, rollout, policy_gradient, normalize_advantage=scaled)
