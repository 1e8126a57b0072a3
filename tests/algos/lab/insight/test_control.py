"""Interpretation of control policies: integrated gradients, hidden units, maps."""

from collections import defaultdict
from dataclasses import replace
from functools import cache

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from algos import PPO, CNNPolicy, LSTMPolicy, MLPPolicy, collect, presets
from algos.lab.insight.control import control_run, integrated_gradients, interpret_control
from algos.policies.gsde import GSDEPolicy
from algos.recipe import Recipe
from tests.helpers.errors import refused
from tests.helpers.small_agents import cartpole
from tests.helpers.tolerances import METRIC

BOX = spaces.Box(-1, 1, (3,))
IMAGES = spaces.Box(0, 255, (6, 7, 3), np.uint8)


def test_attributions_of_known_functions():
    x, baseline = torch.tensor([[2.0, 3.0], [1.0, -1.0]]), torch.tensor([[0.0, 0.0], [0.5, 0.0]])
    weight = torch.tensor([[1.0, -2.0]])
    linear = integrated_gradients(lambda point: point @ weight.T, x, baseline)
    torch.testing.assert_close(linear[0], weight * (x - baseline))
    product = integrated_gradients(lambda point: point.prod(1, keepdim=True), x[:1], baseline[:1])
    torch.testing.assert_close(product[0], torch.tensor([[3.0, 3.0]]))  # x y from 0 on a straight path: half each


def states_of(policy_type, observation, action, rows=3, steps=4):
    """A rollout of random observations, as if collected."""
    policy = policy_type(observation, action, seed=1)

    class Random(gymnasium.Env):
        observation_space, action_space = observation, action

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            observation.seed(seed)
            self.left = steps
            return observation.sample(), {}

        def step(self, chosen):
            self.left -= 1
            return observation.sample(), 1.0, self.left == 0, False, {}

    env = gymnasium.vector.SyncVectorEnv([Random] * rows, autoreset_mode="SameStep")
    return policy, policy_type(observation, action, seed=2), collect(env, policy, num_episodes=rows, seed=0)


KINDS = {
    "mlp": (MLPPolicy, BOX, spaces.Discrete(2), ["P(0)", "P(1)", "value"]),
    "mlp, Box": (MLPPolicy, BOX, spaces.Box(-1, 1, (1,)), ["mean(0)", "value"]),
    "mlp, choices": (MLPPolicy, BOX, spaces.MultiDiscrete([2, 3]), [*(f"logit({i})" for i in range(5)), "value"]),
    "gsde": (GSDEPolicy, BOX, spaces.Box(-1, 1, (1,)), ["mean(0)", "value"]),
    "lstm": (LSTMPolicy, BOX, spaces.Discrete(2), ["P(0)", "P(1)", "value"]),
    "cnn": (CNNPolicy, IMAGES, spaces.Discrete(2), ["P(0)", "P(1)", "value"]),
}
DRAWN = ["mlp, choices", "cnn"]
"""Most outputs, and images: drawing takes longest, and sees of a policy only its outputs."""


@cache
def findings_of(kind):
    policy_type, observation, action, _ = KINDS[kind]
    return interpret_control(*states_of(policy_type, observation, action))


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_attributions_add_up_for_every_policy(kind):
    labels = KINDS[kind][-1]
    findings = findings_of(kind)
    assert [each.name for each in findings] == ["sensitivity", "hidden_units", "map"][: 2 if kind == "cnn" else 3]
    rows = findings[0].rows
    assert list(dict.fromkeys(row[0] for row in rows)) == labels
    for label in labels:
        own = [row[2:4] for row in rows if row[0] == label]
        assert np.sum(own[:-1]) > 0 and np.max(own[-1]) < 0.01 * np.sum(own[:-1]) + 1e-6, "(unexplained)"
    changes = [row[-1] for row in findings[1].rows]
    assert changes == sorted(changes, reverse=True) and changes[0] > 0


@pytest.mark.heavy
@pytest.mark.parametrize("kind", DRAWN)
def test_findings_are_drawn_and_written(kind, tmp_path):
    findings = findings_of(kind)
    for finding in findings:
        finding.write(tmp_path)
        assert (tmp_path / f"{finding.name}.png").stat().st_size > 1000
    lines = (tmp_path / "sensitivity.csv").read_text().splitlines()
    assert lines[0] == "output,observation,before,after,change" and len(lines) == 1 + len(findings[0].rows)


def test_only_the_observation_that_was_learnt_moves():
    """The trained actor reads observation 2 only, with one unit: it has all the sensitivity, and the largest change."""
    before, after, states = states_of(MLPPolicy, BOX, spaces.Discrete(2))
    after.load_state_dict(before.state_dict())
    with torch.no_grad():
        after.actor[0].weight[:, :2] = 0
        after.actor[2].bias[5] += 3.0
    sensitivity, units, maps = interpret_control(before, after, states, ("a", "b", "c"), (0, 2))
    assert [row[3] for row in sensitivity.rows if row[0] == "P(1)"][:2] == [0, 0]
    assert [row[3] for row in sensitivity.rows if row[0] == "P(1)"][2] > 0
    assert units.rows[0][:2] == ("actor.3", 5) and maps.columns[1:3] == ("a", "c")
    at_equal_c = defaultdict(list)
    for output, _, c, _, probability, *_ in maps.rows:
        if output == "P(1)":
            at_equal_c[c].append(probability)
    assert len(at_equal_c) == 25
    assert all(max(along_a) - min(along_a) < METRIC for along_a in at_equal_c.values()), "no change along a"
    assert len({along_a[0] for along_a in at_equal_c.values()}) == 25, "a change along c"
    assert all(row[-1] == 0 for row in units.rows if row[0].startswith("critic"))
    with refused(ValueError, "names"):
        interpret_control(before, after, states, ("a",))
    with refused(ValueError, r"dims \(1, 1\)"):
        interpret_control(before, after, states, dims=(1, 1))
    with refused(ValueError, "one kind"):
        interpret_control(before, MLPPolicy(BOX, spaces.Discrete(2), hidden=(8,)), states)


def test_the_unexplained_part_is_not_hidden():
    """A step between the points of the integral has no slope that they see."""
    x, baseline = torch.tensor([[1.0]]), torch.tensor([[0.0]])
    found = integrated_gradients(lambda point: (1e6 * (point - 0.5)).sigmoid(), x, baseline)
    assert found.item() < 0.1


def test_a_run_has_first_policy_states_and_names(tmp_path):
    recipe = Recipe(env="CartPole-v1", config=presets.PPOConfig(num_steps=16, minibatch_size=32), num_envs=2)
    agent = recipe.build(3)
    first = {name: x.clone() for name, x in agent.policy.state_dict().items()}
    agent.learn(32, run_dir=tmp_path / "run")
    before, after, states, names = control_run(tmp_path / "run", num_episodes=2)
    assert all(torch.equal(x, first[name]) for name, x in before.state_dict().items())
    assert all(torch.equal(x, agent.policy.state_dict()[name]) for name, x in after.state_dict().items())
    assert len(states) == 2 and names == ("position", "velocity", "angle", "angular velocity")
    maps = interpret_control(before, after, states, names)[-1]
    assert maps.columns[1:3] == ("angle", "angular velocity")
    env = cartpole()
    PPO(env, MLPPolicy(env.single_observation_space, env.single_action_space), seed=1).save(tmp_path / "by_hand")
    with refused(ValueError, "without an id"):
        control_run(tmp_path / "by_hand")


def test_a_language_model_that_plays_is_refused_in_a_sentence(tmp_path):
    recipe = replace(presets.recipe("FrozenLake-v1", "ppo", policy="words"), num_envs=1)
    recipe.build(1).save(tmp_path)
    with refused(ValueError, "holds a WordsPolicy, a language model", "expected a network", "algos evaluate --video"):
        control_run(tmp_path)
