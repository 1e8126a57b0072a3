"""Group-relative policy optimization (Shao et al. 2024): PPO's clipped ratio without a critic.

The paper adds the KL to the loss: ``KLPenalty(reference, coefficient, "k3", place="loss")``. Charging the reward works
too, with ``"k1"``, whose gradient is right there.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from algos.advantages import standardize_each_reward, standardize_in_group
from algos.agent import Agent
from algos.config import GRPOConfig
from algos.optimize import Evaluation, Metrics, Term, Terms, clipped_loss, episode_returns, group_metrics, optimize


class GRPO(Agent[GRPOConfig]):
    """Clipped policy loss; advantages are group-standardized returns.

    Arguments: see `algos.agent.Agent`. In control the environment takes a reset seed per slot (`SyncVectorEnv`).

    Example:
        >>> GRPO(env, policy, GRPOConfig(num_episodes=64, group_size=8)).learn(100_000)  # doctest: +SKIP
    """

    config_type = GRPOConfig
    several_processes = True

    def update(self, rollout: TensorDict) -> Metrics:
        """Improve the policy on a rollout and add its advantage column; return metrics."""
        config, mask = self.config, rollout["mask"]
        rows = {"group": rollout["group"][:, 0], "counts": mask.any(dim=1)}
        if config.normalize_each_reward:
            if "reward_parts" not in rollout.keys():
                several = "repeat --reward, or give textenv.Rewards({'name': function, ...}); or set it to False"
                raise ValueError(f"normalize_each_reward is True, but an episode has a single reward: {several}")
            charged, penalty = rows["counts"] * 0.0, self.penalty
            if penalty is not None and penalty.place == "reward":
                charged = -penalty.coef * rollout["kl"].sum(dim=1)
            advantage = standardize_each_reward(parts=rollout["reward_parts"][:, 0], charged=charged, **rows)
        else:
            advantage = standardize_in_group(score=episode_returns(rollout), scale=config.scale_by_std, **rows)
        rollout["advantage"] = torch.where(mask, advantage[:, None], 0.0)
        metrics = optimize(
            self,
            rollout,
            self._terms,
            size=config.minibatch_size,
            num_epochs=config.num_epochs,
            aggregation=config.aggregation,
            clip_range=config.clip_range,
        )
        return metrics | group_metrics(rollout)

    def _terms(self, part: TensorDict, evaluation: Evaluation, log_ratio: Tensor) -> Terms:
        """GRPO's objective (eq. 3) on a part of a minibatch."""
        config = self.config
        improvement = clipped_loss(part, log_ratio=log_ratio, clip_range=config.clip_range, config=config)
        return {"policy/loss": Term(1.0, improvement)}
