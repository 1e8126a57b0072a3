"""RLOO: REINFORCE with a leave-one-out baseline (Kool et al. 2019; Ahmadian et al. 2024)."""

from __future__ import annotations

from functools import partial

import torch
from tensordict import TensorDict

from algos.advantages import leave_one_out
from algos.agent import Agent
from algos.config import RLOOConfig
from algos.descent import cut
from algos.learning import Metrics
from algos.metrics import Means, group_metrics, rollout_metrics
from algos.objective import by_name, episode_returns, policy_gradient, weighted_minibatches


class RLOO(Agent[RLOOConfig]):
    """Return of the episode minus the mean of its group's others × policy gradient, one step a rollout.

    Args:
        env: a vector environment; in control one that is reset by a seed for each slot (`SyncVectorEnv`).
        policy: what is trained; see `algos.policy`.
        config: hyper-parameters.
        penalty: KL penalty to charge; by default the one that the environment carries, if any.

    Example:
        >>> RLOO(env, policy, RLOOConfig(episodes=64, group_size=4)).learn(100_000)  # doctest: +SKIP
    """

    config_type = RLOOConfig

    def update(self, rollout: TensorDict) -> Metrics:
        """Take one step on a rollout, which gets its advantage column; returns metrics."""
        config, means, mask = self.config, Means(), rollout["mask"]
        advantage = leave_one_out(score=episode_returns(rollout), group=rollout["group"][:, 0], counts=mask.any(dim=1))
        rollout["advantage"] = torch.where(mask, advantage[:, None], 0.0)
        self.descent.schedule(self.progress)
        loss_of = partial(policy_gradient, policy=self.policy, penalty=self.penalty, config=config)
        for batch in weighted_minibatches(
            rollout, policy=self.policy, generator=self.generator, aggregation=by_name(config.aggregation)
        ):
            means.add(self.descent.step(loss_of, cut(batch, config.micro_batch_size)))
        return means.result() | rollout_metrics(rollout) | group_metrics(rollout)
