"""Attributes of an algorithm of one's own: named when no checkpoint has them, and kept when `state_dict` does."""

import json

import pytest
import torch

import algos
from algos import A2C, DQN, PPO, SAC, TD3, TRPO, Agent, MLPPolicy
from algos.advantages import add_advantages
from algos.config import ActorCriticConfig
from algos.losses import policy_gradient_loss
from algos.minibatches import minibatches
from algos.training.metrics import MetricMeans, minibatch_means
from tests.helpers.resumable_agents import control, mlp, text

CONFIG = ActorCriticConfig(num_steps=16)


class Own(Agent[ActorCriticConfig]):
    """As docs/algorithms.md has it, with the config of all actor-critics."""

    config_type = ActorCriticConfig

    def update(self, rollout):
        add_advantages(self, rollout)
        self.optimizer.schedule(self.progress)
        means = MetricMeans()
        for batch in minibatches(rollout, sequential=self.policy.sequential, generator=self.update_generator):
            means.add(self.optimizer.step(self.loss, batch))
        return means.result()

    def loss(self, batch):
        log_prob = self.policy.evaluate(batch).log_prob
        loss = policy_gradient_loss(log_ratio=log_prob, advantage=batch["advantage"] - self.shift, mask=batch["mask"])
        return (loss * batch["weight"]).sum(), minibatch_means(batch, {"policy/loss": loss})

    shift = 0.0


class Shifted(Own):
    """Its advantages are shifted by a running mean of the rewards, which changes what it learns."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.shift = torch.zeros(1)
        self.factor = 0.9
        self.updates = 0

    def update(self, rollout):
        self.shift = self.factor * self.shift + rollout["reward"].mean()
        self.updates += 1
        return super().update(rollout)


class Saved(Shifted):
    def state_dict(self):
        return super().state_dict() | {"mine": [self.shift, self.updates]}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.shift, self.updates = state["mine"]


class WithTarget(Own):
    """A network and an optimizer of its own."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.scale = torch.nn.Linear(1, 1)
        self.second_optimizer = torch.optim.Adam(self.scale.parameters())

    def update(self, rollout):
        self.scale(torch.ones(1)).sum().backward()
        self.second_optimizer.step()
        return super().update(rollout)


def make(kind):
    env = control("CartPole-v1")
    return kind(env, mlp(env), CONFIG)


def rows(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if not name.startswith("time/")} for line in lines]


def resumed(kind, folder):
    whole = make(kind)
    whole.learn(64 * 4, run_dir=folder / "whole")
    make(kind).learn(64 * 4, run_dir=folder / "run", on_iteration=lambda metrics: metrics["iteration"] == 2)
    make(kind).learn(64 * 4, run_dir=folder / "run", resume=folder / "run")
    return rows(folder / "run") == rows(folder / "whole")


@pytest.mark.heavy
def test_an_attribute_in_no_checkpoint_is_named_once(tmp_path, caplog):
    assert not resumed(Shifted, tmp_path), "or the warning would be about nothing"
    said = (
        "the training changes Shifted.shift, Shifted.updates, which no checkpoint has: a resumed run begins without it"
    )
    assert caplog.text.count(said) == 3, "once in each of the three trainings"
    assert "factor" not in caplog.text


@pytest.mark.heavy
def test_an_attribute_in_state_dict_goes_on_unnamed(tmp_path, caplog):
    assert resumed(Saved, tmp_path)
    assert "no checkpoint has" not in caplog.text


class OwnNetwork(MLPPolicy):
    """A subclass of a policy, with nothing of its own."""


def test_a_subclass_of_a_policy_has_nothing_to_lose(tmp_path, caplog):
    env = control("CartPole-v1")
    PPO(env, OwnNetwork(env.single_observation_space, env.single_action_space), num_steps=16).learn(
        128, run_dir=tmp_path
    )
    assert "no checkpoint has" not in caplog.text


def test_own_networks_and_optimizers_are_named_too(tmp_path, caplog):
    make(WithTarget).learn(64 * 2, run_dir=tmp_path)
    assert "the training changes WithTarget.scale, WithTarget.second_optimizer, which" in caplog.text


class Policy(torch.nn.Module, algos.Policy):
    """A policy with a number that no checkpoint has; the rest is that of another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.generator, self.calls = inner, inner.generator, 0
        self.observation_space, self.action_space = inner.observation_space, inner.action_space

    def act(self, observation, **options):
        self.calls += 1
        return self.inner.act(observation, **options)

    def evaluate(self, rollout):
        return self.inner.evaluate(rollout)

    def values(self, rollout):
        return self.inner.values(rollout)

    def save(self, folder):
        return {}


def test_a_number_of_an_own_policy_is_named(tmp_path, caplog):
    env = control("CartPole-v1")
    PPO(env, Policy(mlp(env)), num_steps=16).learn(64 * 2, run_dir=tmp_path)
    assert caplog.text.count("the training changes Policy.calls, which no checkpoint has") == 1


@pytest.mark.parametrize("kind", [PPO, A2C, Own])
def test_algorithms_without_attributes_are_not_named(kind, tmp_path, caplog):
    env = control("CartPole-v1")
    kind(env, mlp(env), num_steps=16).learn(64 * 2, run_dir=tmp_path)
    assert "no checkpoint has" not in caplog.text


MINIBATCHES = {"num_steps": 16, "minibatch_size": 16}
REPLAY = {"learning_starts": 16, "batch_size": 8}


@pytest.mark.parametrize(
    ("kind", "env_id", "fields"),
    [
        (PPO, "CartPole-v1", MINIBATCHES),
        (TRPO, "CartPole-v1", MINIBATCHES),
        (DQN, "CartPole-v1", REPLAY),
        (SAC, "Pendulum-v1", REPLAY),
        (TD3, "Pendulum-v1", REPLAY),
    ],
)
def test_what_the_library_saves_is_not_named_in_a_subclass(kind, env_id, fields, tmp_path, caplog):
    """The generator that shuffles is saved as "generator", and weights of the policy with the policy."""

    class Mine(kind):
        def update(self, rollout):
            self.trained = list(self.policy.parameters())
            self.layer = next(part for part in self.policy.modules() if isinstance(part, torch.nn.Linear))
            return super().update(rollout)

    agent = Mine(control(env_id), seed=7, **fields)
    generator = agent.update_generator.get_state()
    agent.learn(64 * 2, run_dir=tmp_path)
    assert not torch.equal(agent.update_generator.get_state(), generator), "or the test is about nothing"
    assert "no checkpoint has" not in caplog.text


@pytest.mark.parametrize("place", ["control", "text"])
def test_an_actor_critic_config_is_enough(place):
    """`update` asked for max_importance_weight, which only clipped losses have."""
    if place == "control":
        agent = make(Own)
    else:
        agent = text(Own, ActorCriticConfig(num_steps=None, num_episodes=8))
    history = agent.learn(64)
    assert history and all("policy/loss" in row for row in history)
