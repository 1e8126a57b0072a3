"""Group-relative policy optimisation (Shao et al. 2024): PPO's clipped ratio without a critic.

The KL belongs to the loss in the paper: ``KLPenalty(reference, coefficient, "k3", place="loss")``. In the reward it
works too, and by ``"k1"`` has the right gradient there.
"""

from __future__ import annotations

from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from algos.advantages import standardize_in_group
from algos.agent import Agent
from algos.config import GRPOConfig
from algos.descent import Term, Totals, add_up, cut
from algos.learning import Metrics
from algos.metrics import Means, group_metrics, ratio_metrics, rollout_metrics
from algos.objective import by_name, episode_returns, log_ratios, regularizers, weighted_minibatches


class GRPO(Agent[GRPOConfig]):
    """Return of the episode, standardised in its group × clipped ratio.

    Args:
        env: a vector environment; in control one that is reset by a seed for each slot (`SyncVectorEnv`).
        policy: what is trained; see `algos.policy`.
        config: hyper-parameters.
        penalty: KL penalty to charge; by default the one that the environment carries, if any.

    Example:
        >>> GRPO(env, policy, GRPOConfig(episodes=64, group_size=8)).learn(100_000)  # doctest: +SKIP
    """

    config_type = GRPOConfig

    def update(self, rollout: TensorDict) -> Metrics:
        """Improve the policy on a rollout, which gets its advantage column; returns metrics."""
        config, means, mask = self.config, Means(), rollout["mask"]
        advantage = standardize_in_group(
            score=episode_returns(rollout), group=rollout["group"][:, 0], counts=mask.any(dim=1),
            scale=config.scale_by_std,
        )  # fmt: skip
        rollout["advantage"] = torch.where(mask, advantage[:, None], 0.0)
        self.descent.schedule(self.progress)
        for batch in weighted_minibatches(
            rollout,
            policy=self.policy,
            generator=self.generator,
            size=config.minibatch_size,
            epochs=config.epochs,
            aggregation=by_name(config.aggregation),
        ):
            loss_of = partial(self._loss, first=means.count == 0)
            means.add(self.descent.step(loss_of, cut(batch, config.micro_batch_size)))
        metrics = rollout_metrics(rollout) | group_metrics(rollout)
        return means.result() | metrics | {"update/minibatches": means.count}

    def _loss(self, part: TensorDict, *, first: bool) -> tuple[Tensor, Totals]:
        """GRPO's objective (eq. 3) on a part of a minibatch, and its terms."""
        config, policy = self.config, self.policy
        evaluation = policy.evaluate(part)
        ratios = log_ratios(part, evaluation=evaluation, policy=policy, config=config, first=first)
        improvement = by_name(config.policy_loss)(
            log_ratio=ratios, advantage=part["advantage"], mask=part["mask"], clip_range=config.clip_range
        )
        terms = {"policy/loss": Term(1.0, improvement)}
        terms |= regularizers(part, evaluation=evaluation, policy=policy, penalty=self.penalty, config=config)
        loss, totals = add_up(terms, weight=part["weight"], share=part["share"])
        metrics = ratio_metrics(ratios.detach(), share=part["share"], clip_range=config.clip_range, first=first)
        return loss, totals | metrics
