"""Dynamics of a training: each number on a case with a known answer, and that measuring changes nothing."""

import copy

import pytest
import torch
from torch import nn

from algos import A2C, DQN, PPO, LSTMPolicy, PPOConfig
from algos.lab.insight.activations import FEATURES, activations
from algos.lab.insight.dynamics import (
    Dynamics,
    by_position,
    dead_units,
    effective_rank,
    fit_error,
    gradient_noise,
    weight_changes,
)
from tests.helpers.errors import refused
from tests.helpers.small_agents import cartpole, control_rollout, lm_policy, mlp_for
from tests.helpers.text_envs import make_env
from textenv import KLPenalty


def test_rank_of_known_features():
    rows = torch.arange(1.0, 9.0)[:, None]
    assert effective_rank(rows @ torch.ones(1, 5)) == 1
    assert effective_rank(torch.eye(8)) == 8
    assert effective_rank(torch.eye(200)) == 198, "198 of 200 equal singular values have 99 % of their sum"
    assert effective_rank(torch.diag(torch.tensor([1.0, 1e-4, 1e-4]))) == 1


def test_units_that_never_change_are_dead():
    x = torch.linspace(-1, 1, 50)[:, None]
    layers = {"relu": (x * torch.tensor([1.0, -1.0]) + torch.tensor([0.0, -5.0])).relu(), "tanh": (x + 20).tanh()}
    assert dead_units(layers) == pytest.approx(2 / 3) and dead_units({"relu": layers["relu"]}) == 0.5


def test_noise_of_known_gradients():
    mean, away = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
    noise, signal = gradient_noise([mean + away, mean - away], size=5)
    assert noise == pytest.approx(5 * 2) and signal == pytest.approx(25 - 1)  # Bessel: 2 / (2 - 1), and 2 / 2 of it
    generator = torch.Generator().manual_seed(0)  # Gaussian: covariance 4 I in 10 dimensions, |mean|^2 = 10
    samples = 1 + 2 * torch.randn(4000, 8, 10, generator=generator)
    noise, signal = gradient_noise(samples.mean(1), size=8)
    assert noise == pytest.approx(40, rel=0.05) and signal == pytest.approx(10, rel=0.05)


def test_change_of_known_weights():
    net = nn.ModuleDict({"actor": nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))})
    with torch.no_grad():
        net["actor"][0].weight.fill_(2.0)
        net["actor"][1].weight.fill_(1.0)
        before = copy.deepcopy(net)
        net["actor"][0].weight.fill_(2.2)
        net["actor"][1].weight.fill_(1.0)
    found = weight_changes(net, before)
    assert found == pytest.approx(
        {"weight_change": 0.4 / 18**0.5, "weight_change/actor.0": 0.1, "weight_change/actor.1": 0}
    )


def test_numbers_by_quarter_of_the_answer():
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    entropy = torch.tensor([[9.0, 1, 2, 3, 4, 9], [1, 1, 2, 3, 3, 4]])
    rollout = {"mask": mask, "value": entropy, "value_target": 2 * entropy}
    found = by_position(rollout, entropy)
    assert [found[f"entropy/quarter_{i}"] for i in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert [found[f"value_error/quarter_{i}"] for i in (1, 2, 3, 4)] == [1, 4, 9, 16] and len(found) == 8


def test_a_living_trunk_learns_a_dead_one_does_not():
    _, policy, rollout = control_rollout()
    part = rollout[rollout["mask"]]
    living = fit_error(policy, part, rate=1e-2)
    assert 0 < living < 0.9
    with torch.no_grad():
        policy.actor[0].bias.fill_(100.0)  # saturated
    assert fit_error(policy, part, rate=1e-2) == pytest.approx(1.0)


def test_layers_are_found_in_control_and_in_text():
    _, policy, rollout = control_rollout()
    found = activations(policy, rollout[rollout["mask"]])
    assert list(found) == ["actor.1", FEATURES, "critic.1"] and torch.equal(found["actor.1"], found[FEATURES])
    assert {len(x) for x in found.values()} == {int(rollout["mask"].sum())}
    expected = torch.tanh(policy.critic[0](rollout["observation"][rollout["mask"]]))
    torch.testing.assert_close(found["critic.1"], expected)
    with refused(TypeError, "no module actor or network"):
        activations(nn.Linear(1, 1), rollout)


def text_agent(policy):
    config = PPOConfig(num_steps=None, num_episodes=16, num_epochs=1, minibatch_size=8, learning_rate=1e-2)
    return PPO(make_env(), policy, config, penalty=KLPenalty(policy.reference(), 0.1))


def control_agent(kind):
    env = cartpole()
    if kind == "lstm":
        policy = LSTMPolicy(env.single_observation_space, env.single_action_space, hidden=8)
        return PPO(env, policy, PPOConfig(num_steps=32, minibatch_size=2, seed=1))
    if kind == "dqn":
        return DQN(env, num_steps=16, buffer_size=500, learning_starts=16, gradient_steps=2, seed=1)
    return (A2C if kind == "a2c" else PPO)(env, mlp_for(env, normalize_observations=kind == "normalized"), num_steps=32)


AGENTS = {
    "ppo": lambda: control_agent("ppo"), "a2c": lambda: control_agent("a2c"), "lstm": lambda: control_agent("lstm"),
    "normalized": lambda: control_agent("normalized"), "dqn": lambda: control_agent("dqn"),
    "text": lambda: text_agent(lm_policy()),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("kind", AGENTS)
def test_measuring_changes_no_bit_of_the_training(kind):
    plain, watched = AGENTS[kind](), AGENTS[kind]()
    steps = 60 if kind == "text" else 300
    first = plain.learn(steps)
    rows = watched.learn(steps, callbacks=[Dynamics(every=2)])
    for one, other in zip(plain.policy.state_dict().values(), watched.policy.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert len(first) == len(rows) > 1 and not [name for row in first for name in row if "dynamics" in name]
    names = {name.removeprefix("dynamics/") for name in rows[0] if name.startswith("dynamics/")}
    wanted = {"effective_rank", "dead_units", "weight_change", "fit_error"}
    wanted |= set() if kind == "dqn" else {"gradient_noise", "gradient_signal"}
    wanted |= {"kl/quarter_1", "entropy/quarter_4", "value_error/quarter_2"} if kind == "text" else set()
    assert names >= wanted and not [name for name in rows[1] if "dynamics" in name]
    assert all(torch.tensor(rows[0][f"dynamics/{name}"]).isfinite() for name in names)


def test_equal_samples_have_no_noise():
    agent = control_agent("ppo")
    noted = {}

    class Look(Dynamics):
        def on_rollout(self, run, rollout):
            for name in ("observation", "next_observation", "action", "log_prob", "terminated", "truncated", "mask"):
                rollout[name] = rollout[name][:1, :1].expand_as(rollout[name]).clone()
            rollout["mask"][:], rollout["reward"][:], rollout["is_init"][:] = True, 1.0, False
            rollout["terminated"][:], rollout["truncated"][:] = True, False
            super().on_rollout(run, rollout)

        def on_iteration(self, run, metrics):
            super().on_iteration(run, metrics)
            noted.update(metrics)
            return True

    agent.learn(32, callbacks=[Look(every=1)])
    assert noted["dynamics/gradient_noise"] <= 1e-4 * noted["dynamics/gradient_signal"]
    assert noted["dynamics/effective_rank"] == 1


def test_a_wrong_interval_is_refused():
    with refused(ValueError, "every is 0"):
        Dynamics(every=0)
