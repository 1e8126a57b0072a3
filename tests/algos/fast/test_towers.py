"""Fast towers of actor and critic equal their modules: values and gradients."""

import inspect
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from algos import MLPPolicy
from algos.fast import towers as fast
from algos.policies import towers
from tests.helpers.rollouts import draws


def make_towers(hidden, outputs=(3, 1), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    made = [towers.tower(5, hidden, size, gain=1.0, generator=generator).to(dtype) for size in outputs]
    for layer in (layer for one in made for layer in one if isinstance(layer, nn.Linear)):
        nn.init.normal_(layer.bias, generator=generator)
    return made


act = partial(fast.act, inspect.unwrap(towers.act))
value = partial(fast.value, inspect.unwrap(towers.value))
actor_and_critic = partial(fast.actor_and_critic, inspect.unwrap(towers.actor_and_critic))


@pytest.mark.parametrize("rows", [3, 100], ids=["few", "many"])
@pytest.mark.parametrize("hidden", [(), (32,), (32, 48, 16)], ids=str)
def test_twin_towers_equal_two_in_value_and_gradient(hidden, rows):
    """Few and many rows, for tanh is computed in two ways."""
    first, second = make_towers(hidden)
    x = draws(rows, 2, 5).requires_grad_()
    inputs = [x, *first.parameters(), *second.parameters()]
    found, expected = actor_and_critic(x, first, second), (first(x), second(x))
    weights = draws(rows, 2, 3, seed=2), draws(rows, 2, 1, seed=3)
    assert [y.shape for y in found] == [y.shape for y in expected]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    gradients = [torch.autograd.grad(outputs, inputs, weights) for outputs in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(value(x, first), expected[0], atol=1e-10, rtol=0)


def test_twin_towers_agree_in_training_precision():
    first, second = make_towers((64, 64), dtype=torch.float32)
    x = draws(512, 5, dtype=torch.float32)
    inputs = [*first.parameters(), *second.parameters()]
    found, expected = actor_and_critic(x, first, second), (first(x), second(x))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    gradients = [torch.autograd.grad([y.mean() for y in outputs], inputs) for outputs in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=0)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_tower_that_is_not_asked_for_has_no_gradient(asked):
    pair = make_towers((8, 8))
    x = draws(4, 5)
    output = actor_and_critic(x, *pair)[asked]
    found = [torch.autograd.grad(output.sum(), [*one.parameters()], retain_graph=True, allow_unused=True)
             for one in pair]  # fmt: skip
    expected = torch.autograd.grad(pair[asked](x).sum(), [*pair[asked].parameters()])
    torch.testing.assert_close(found[asked], expected, atol=1e-10, rtol=0)
    assert all(gradient is None for gradient in found[1 - asked])


def test_twin_towers_are_differentiable_twice():
    first, second = make_towers((6, 7))
    x = draws(4, 5).requires_grad_()
    weights = [p for pair in zip(first, second, strict=True) if isinstance(pair[0], nn.Linear)
               for p in (pair[0].weight, pair[1].weight, pair[0].bias, pair[1].bias)]  # fmt: skip
    outcomes = []
    for outputs in (actor_and_critic(x, first, second), (first(x), second(x))):
        slopes = torch.autograd.grad([y.square().sum() for y in outputs], [x, *weights], create_graph=True)
        outcomes.append(torch.autograd.grad(sum(slope.square().sum() for slope in slopes), [x, *weights]))
    assert outcomes[0][0].abs().max() > 1e-3
    torch.testing.assert_close(*outcomes, atol=1e-8, rtol=0)


def test_modules_of_other_kinds_and_widths_are_called():
    first, second = make_towers((8, 8))
    x = draws(4, 5)
    others = [
        make_towers((8, 9))[1],
        make_towers((8,))[1],
        nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)).double(),
        nn.Sequential(nn.Linear(5, 1), nn.Tanh()).double(),
        nn.Flatten(1),
        nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 1)).double(),
    ]
    for other in others:
        torch.testing.assert_close(actor_and_critic(x, first, other), (first(x), other(x)), atol=1e-10, rtol=0)
        torch.testing.assert_close(actor_and_critic(x, other, first), (other(x), first(x)), atol=1e-10, rtol=0)
        with torch.no_grad():
            torch.testing.assert_close(value(x, other), other(x), atol=1e-10, rtol=0)


def test_a_numpy_tower_follows_its_modules_weights():
    """Written in place, moved in memory, replaced, in another precision and back: the arrays are the weights."""
    tower = make_towers((48, 64), dtype=torch.float32)[0]
    other = make_towers((48, 64), dtype=torch.float32)[0]
    nn.init.normal_(other[2].weight)

    def moved(layer):
        layer.weight.data = 2 * layer.weight.data
        layer.bias = nn.Parameter(layer.bias.detach() - 1)

    def cut():  # of the same memory
        tower[4].weight.data, tower[4].bias.data = tower[4].weight.data[:2], tower[4].bias.data[:2]

    def turned():
        tower[2].weight = nn.Parameter(tower[2].weight.detach()[:, :48].T[:, :48])
        tower[2].bias.data, tower[4].weight.data = tower[2].bias.data[:48], tower[4].weight.data[:, :48]

    changes = [
        lambda: None,
        lambda: nn.init.normal_(tower[2].weight),
        lambda: moved(tower[0]),
        lambda: tower.load_state_dict(other.state_dict(), assign=True),
        lambda: tower.share_memory(),
        lambda: tower.double().float(),
        lambda: tower.__setitem__(4, other[4]),
        cut,
        turned,
        lambda: setattr(tower[0], "bias", None),
    ]
    most = fast.LARGEST_PRODUCT // (48 * 64)
    seen = []
    for change in changes:
        change()
        for rows in (0, 1, 7, most, most + 1):  # the last by torch
            x = draws(rows, 5, dtype=torch.float32)
            with torch.no_grad():
                seen.append(tower(x))
            torch.testing.assert_close(act(x.numpy(), tower), seen[-1], atol=1e-5, rtol=1e-5)
    assert (seen[2] - seen[7]).abs().min() > 0 and (seen[7] - seen[12]).abs().min() > 0


def test_a_tower_in_another_precision_is_torchs():
    tower = make_towers((8,))[0]
    with torch.no_grad():
        torch.testing.assert_close(act(draws(3, 5).numpy(), tower), tower(draws(3, 5)), atol=1e-12, rtol=0)


def test_values_are_computed_on_the_rollouts_device():
    policy = MLPPolicy(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3)).to("meta")
    value = policy.value(torch.zeros(3, 5, 4, device="meta"))
    assert value.shape == (3, 5) and value.is_meta


@pytest.mark.parametrize("hidden", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (4,), (3, 2, 4)], ids=str)
def test_observations_of_any_batch_shape_are_acted_on(shape, hidden):
    policy = MLPPolicy(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3), hidden=hidden)
    seen = draws(*shape, dtype=torch.float32)
    step = policy.act(seen.numpy(), deterministic=True)
    with torch.no_grad():
        expected = policy.actor(seen).log_softmax(-1).max(-1)
    torch.testing.assert_close(step.log_prob, expected.values, atol=1e-6, rtol=0)
    assert torch.equal(step.action, expected.indices)


SPACES = [spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3), spaces.MultiDiscrete([2, 3])]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_the_policy_evaluates_as_its_modules_do(space):
    policy = MLPPolicy(spaces.Box(-1, 1, (2, 2), np.float32), space, seed=3)
    observation = draws(6, 4, 2, 2, dtype=torch.float32)
    output, value = policy.actor(observation.flatten(2)), policy.critic(observation.flatten(2)).squeeze(-1)
    action = (
        policy.distribution.sample(
            output.detach().flatten(0, 1), generator=policy.generator, action_mask=None, deterministic=False
        )[0]
        .detach()
        .unflatten(0, (6, 4))
    )
    rollout = TensorDict({"observation": observation, "action": action}, [6, 4])
    expected = (*policy.distribution.score(output, action), value)
    found = policy.evaluate(rollout)
    torch.testing.assert_close(tuple(found), expected, atol=1e-5, rtol=0)
    gradients = [
        torch.autograd.grad(log_prob.mean() + 0.1 * entropy.mean() + value.square().mean(), [*policy.parameters()])
        for log_prob, entropy, value in (found, expected)
    ]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=0)
