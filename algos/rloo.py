"""RLOO: REINFORCE with a leave-one-out baseline (Kool et al. 2019; Ahmadian et al. 2024)."""

import torch
from tensordict import TensorDict

from algos.advantages import leave_one_out
from algos.agent import Agent
from algos.config import RLOOConfig
from algos.optimize import Metrics, episode_returns, group_metrics, optimize, policy_gradient


class RLOO(Agent[RLOOConfig]):
    """Policy gradient, one step per rollout; advantages are returns minus the mean of the group's others.

    Arguments: see `algos.agent.Agent`. In control the environment takes a reset seed per slot (`SyncVectorEnv`).

    Example:
        >>> RLOO(env, policy, RLOOConfig(num_episodes=64, group_size=4)).learn(100_000)  # doctest: +SKIP
    """

    config_type = RLOOConfig
    several_processes = True

    def update(self, rollout: TensorDict) -> Metrics:
        """Take one step on a rollout and add its advantage column; return metrics."""
        mask = rollout["mask"]
        advantage = leave_one_out(score=episode_returns(rollout), group=rollout["group"][:, 0], counts=mask.any(dim=1))
        rollout["advantage"] = torch.where(mask, advantage[:, None], 0.0)
        metrics = optimize(self, rollout, policy_gradient, aggregation=self.config.aggregation)
        return metrics | group_metrics(rollout)
