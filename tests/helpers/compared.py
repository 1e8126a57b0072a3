"""Algorithms and functions for comparisons in other processes, which import this file."""

from dataclasses import dataclass
from pathlib import Path

import gymnasium

from algos import PPO, Agent
from algos.advantages import add_advantages
from algos.config import ActorCriticConfig
from algos.losses import policy_gradient_loss, value_loss
from algos.minibatches import minibatches
from algos.training.metrics import MetricMeans, minibatch_means


def short_cartpole(num_envs):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs, max_episode_steps=20)


@dataclass(frozen=True, kw_only=True)
class OnlyGoodConfig(ActorCriticConfig):
    num_steps: int | None = 16
    vf_coef: float = 0.5


class OnlyGood(Agent[OnlyGoodConfig]):
    """A2C that learns only from actions that were better than expected."""

    config_type = OnlyGoodConfig

    def update(self, rollout):
        add_advantages(self, rollout)
        rollout["advantage"] = rollout["advantage"].clamp(min=0)
        self.optimizer.schedule(self.progress)
        means = MetricMeans()
        for batch in minibatches(rollout, sequential=self.policy.sequential, generator=self.update_generator):
            means.add(self.optimizer.step(self.loss, batch))
        return means.result()

    def loss(self, batch):
        mask = batch["mask"]
        evaluation = self.policy.evaluate(batch)
        actor = policy_gradient_loss(log_ratio=evaluation.log_prob, advantage=batch["advantage"], mask=mask)
        critic = value_loss(value=evaluation.value, value_target=batch["value_target"], mask=mask)
        loss = actor + self.config.vf_coef * critic
        return (loss * batch["weight"]).sum(), minibatch_means(batch, {"policy/loss": actor, "value/loss": critic})


class NamedPPO(PPO):
    """PPO under another name."""


class FailsBeside(gymnasium.Wrapper):
    """Fails in a step as soon as a file exists."""

    def __init__(self, env, path):
        super().__init__(env)
        self.path = Path(path)

    def step(self, action):
        if self.path.exists():
            raise ArithmeticError("broken sensor")
        return self.env.step(action)
