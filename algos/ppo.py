"""Proximal policy optimisation (Schulman et al. 2017), for control and language models alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor

from algos.agent import Agent
from algos.config import PPOConfig
from algos.descent import Term, Totals, add_up, cut, scheduled
from algos.learning import Metrics, Penalty
from algos.losses import value_loss
from algos.metrics import Means, ratio_metrics, rollout_metrics
from algos.normalizers import RewardNormalizer
from algos.objective import add_advantages, by_name, log_ratios, regularizers, weighted_minibatches
from algos.policy import Policy


class PPO(Agent[PPOConfig]):
    """One algorithm for every environment: what differs between CartPole and text is environment and policy.

    Args:
        env: a vector environment; see `algos.collection`.
        policy: what is trained; see `algos.policy`.
        config: hyper-parameters; named presets stand in `algos.presets`.
        penalty: KL penalty to charge; by default the one that the environment carries, if any.
        auxiliary: a further loss of the policy, added at every minibatch: `algos.TextLoss` makes it PPO-ptx.

    Raises:
        ValueError: if the config does not fit the environment, or the KL would be charged twice.

    Example:
        >>> agent = PPO(env, policy, presets.CARTPOLE)  # doctest: +SKIP
        >>> agent.learn(100_000)  # doctest: +SKIP
    """

    config_type = PPOConfig

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        config: PPOConfig | None = None,
        *,
        penalty: Penalty | None = None,
        auxiliary: Callable[[Policy], Tensor] | None = None,
    ) -> None:
        super().__init__(env, policy, config, penalty=penalty)
        config = self.config
        self.auxiliary = auxiliary
        self.reward_normalizer = RewardNormalizer(config.gamma) if config.normalize_rewards else None

    def state_dict(self) -> dict[str, Any]:
        """See `Agent.state_dict`; where an auxiliary loss stands in its text, if it says so."""
        stands = getattr(self.auxiliary, "state_dict", None)
        return super().state_dict() | {"auxiliary": None if stands is None else stands()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Agent.load_state_dict`."""
        super().load_state_dict(state)
        if state["auxiliary"] is not None:
            auxiliary: Any = self.auxiliary
            auxiliary.load_state_dict(state["auxiliary"])

    def update(self, rollout: TensorDict) -> Metrics:
        """Improve the policy on a rollout, which gets its value and advantage columns; returns metrics."""
        config, means = self.config, Means()
        add_advantages(rollout, policy=self.policy, config=config, normalizer=self.reward_normalizer)
        self.descent.schedule(self.progress)
        for batch in weighted_minibatches(
            rollout,
            policy=self.policy,
            generator=self.generator,
            size=config.minibatch_size,
            epochs=config.epochs,
            normalize_advantage=config.normalize_advantage,
            aggregation=by_name(config.aggregation),
        ):
            loss_of = partial(self._loss, first=means.count == 0)
            totals = self.descent.step(loss_of, cut(batch, config.micro_batch_size), *self._auxiliary_losses())
            means.add(totals)
            if config.target_kl is not None and totals and totals["policy/approx_kl"].item() > config.target_kl:
                break
        return means.result() | rollout_metrics(rollout) | {"update/minibatches": means.count}

    def _loss(self, part: TensorDict, *, first: bool) -> tuple[Tensor, Totals]:
        """PPO's objective (eq. 9) on a part of a minibatch, and its terms."""
        config, mask = self.config, part["mask"]
        clip_range = scheduled(config.clip_range, config.final_clip_range, self.progress)
        evaluation = self.policy.evaluate(part)
        assert evaluation.value is not None, "a policy's evaluation has a value; only a reference's has none"
        ratios = log_ratios(part, evaluation=evaluation, policy=self.policy, config=config, first=first)
        improvement = by_name(config.policy_loss)(
            log_ratio=ratios, advantage=part["advantage"], mask=mask, clip_range=clip_range
        )
        error = value_loss(
            value=evaluation.value,
            value_target=part["value_target"],
            mask=mask,
            old_value=part["value"],
            clip_range=config.value_clip_range,
        )
        terms = {"policy/loss": Term(1.0, improvement), "value/loss": Term(config.value_coefficient, error)}
        terms |= regularizers(part, evaluation=evaluation, policy=self.policy, penalty=self.penalty, config=config)
        loss, totals = add_up(terms, weight=part["weight"], share=part["share"])
        return loss, totals | ratio_metrics(ratios.detach(), share=part["share"], clip_range=clip_range, first=first)

    def _auxiliary_losses(self) -> list[Callable[[], tuple[Tensor, Totals]]]:
        def loss_of() -> tuple[Tensor, Totals]:
            assert self.auxiliary is not None
            loss = self.auxiliary(self.policy)
            return loss, {"auxiliary/loss": loss}

        return [] if self.auxiliary is None else [loss_of]
