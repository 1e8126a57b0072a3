"""Twin critics: two separate networks computed together; the values of a policy; what is saved."""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import RescaleAction, TransformAction
from torch import nn

from algos import SAC, TD3, MLPPolicy, SACPolicy, TD3Policy, evaluate
from algos.policies.twin_critics import TwinCritics
from tests.helpers.errors import refused


def separate(critics):
    """The two critics as networks of torch."""
    networks = []
    for number in range(2):
        layers = []
        for weight, bias in zip(critics.weights, critics.biases, strict=True):
            matrix = weight[number].reshape(weight.shape[1], -1)
            layer = nn.Linear(*matrix.shape)
            layer.weight.data.copy_(matrix.T)
            layer.bias.data.copy_(bias[number].flatten())
            layers += [layer, nn.ReLU()]
        networks.append(nn.Sequential(*layers[:-1]))
    return networks


@pytest.mark.parametrize("hidden", [(), (7,), (16, 9)], ids=str)
def test_both_critics_are_what_separate_networks_are(hidden):
    """Values, gradients of the weights, and gradients of the actions."""
    critics = TwinCritics(3, 2, hidden, torch.Generator().manual_seed(0))
    for bias in critics.biases:
        nn.init.normal_(bias, generator=torch.Generator().manual_seed(1))
    observation = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(2))
    action = torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(3)).requires_grad_()
    values = critics(observation, action)
    networks = separate(critics)
    expected = torch.stack([network(torch.cat([observation, action], -1)).squeeze(-1) for network in networks])
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(critics.first(observation, action), expected[0])
    assert not torch.allclose(expected[0], expected[1])

    slope = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(4))
    ours = torch.autograd.grad((values * slope).sum(), [action, *critics.weights])
    theirs = torch.autograd.grad((expected * slope).sum(), [action, *(x.weight for n in networks for x in n[::2])])
    torch.testing.assert_close(ours[0], theirs[0])
    layers = len(hidden) + 1
    for number, gradient in enumerate(ours[1:]):
        for critic in range(2):
            matrix = gradient[critic].reshape(gradient.shape[1], -1)
            torch.testing.assert_close(matrix.T, theirs[1 + critic * layers + number])


def test_weights_begin_as_those_of_stable_baselines3():
    """Weights and biases of each layer are uniform in ±1/√inputs, here and there."""
    env = gym.make("Pendulum-v1")
    policy = SACPolicy(env.observation_space, env.action_space, hidden=(400, 300), seed=1)
    peer = stable_baselines3.SAC("MlpPolicy", env, policy_kwargs={"net_arch": [400, 300]}, device="cpu", seed=1)
    actor_layers = (*peer.actor.latent_pi[::2], peer.actor.mu)
    layers = list(zip(policy.actor[::2], actor_layers, strict=True))
    critic_layers = zip(policy.critic.weights, policy.critic.biases, peer.critic.qf0[::2], strict=True)
    layers += [(SimpleNamespace(weight=weight, bias=bias), layer) for weight, bias, layer in critic_layers]
    for ours, theirs in layers:
        bound = 1 / math.sqrt(theirs.in_features)
        for layer in (ours, theirs):
            assert 0.9 * bound < layer.weight.abs().max() <= bound
            assert layer.bias.abs().max() <= bound
            assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


@pytest.mark.parametrize("kind", [SACPolicy, TD3Policy])
def test_a_value_is_the_lower_one_of_the_deterministic_action(kind):
    policy = kind(spaces.Box(-1, 1, (3,)), spaces.Box(0, 4, (2,)), hidden=(16,), seed=1)
    observation = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    action = policy.act(observation.numpy(), deterministic=True).action
    expected = policy.critic(observation, (action - 2) / 2).amin(0)
    torch.testing.assert_close(policy.value(observation), expected)


@pytest.mark.parametrize(("algorithm", "kind"), [(SAC, SACPolicy), (TD3, TD3Policy)])
def test_other_bounds_of_actions_are_refused(algorithm, kind):
    """A policy for ±2 can never reach ±10. Other dtypes and wider PPO policies are fine: they clip."""
    env = gym.make("Pendulum-v1")
    policy = kind(env.observation_space, env.action_space, hidden=(4,))
    wider = RescaleAction(env, np.float32(-10), np.float32(10))
    with refused(ValueError, f"the {kind.__name__} scales its actions to", "-2.0, 2.0", "-10.0, 10.0"):
        algorithm(SyncVectorEnv([lambda: wider]), policy)
    with refused(ValueError, "wrap the environment as in its training"):
        evaluate(wider, policy, num_episodes=1)

    same = TransformAction(env, lambda action: action, spaces.Box(-2, 2, (1,), np.float64))
    assert len(evaluate(same, policy, num_episodes=1).returns) == 1
    clipped = MLPPolicy(env.observation_space, env.action_space, hidden=(4,))
    assert len(evaluate(wider, clipped, num_episodes=1).returns) == 1


@pytest.mark.parametrize("kind", [SACPolicy, TD3Policy])
def test_bounds_are_not_saved_with_the_weights(kind):
    policy = kind(spaces.Box(-1, 1, (3,)), spaces.Box(0, 4, (2,)), hidden=(16,))
    assert {name.partition(".")[0] for name in policy.state_dict()} == {"actor", "critic"}
    assert policy.arguments() == {"hidden": (16,)}
    nn.init.zeros_(policy.actor[-1].weight)
    nn.init.zeros_(policy.actor[-1].bias)
    action, _ = policy.predict(np.zeros(3, np.float32), deterministic=True)
    assert action == pytest.approx([2.0, 2.0])
