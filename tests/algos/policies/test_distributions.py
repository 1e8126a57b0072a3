"""Distributions of every action space: sampled, scored, saved."""

import itertools
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from algos import PPO, MLPPolicy, PPOConfig, evaluate
from algos.envs.spaces import describe_space, restore_space
from algos.make import make_policy
from algos.policies.distributions import Categorical, action_distribution
from tests.helpers.errors import refused

PLANE = spaces.Box(-1, 1, (3,), np.float32)


PRODUCTS = [
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete(np.array([[2, 1], [3, 2]])),
    spaces.MultiBinary(3),
    spaces.MultiDiscrete([2, 3], start=[7, -1]),
]


ACTIONS = [
    spaces.Discrete(4),
    spaces.Discrete(4, start=3),
    *PRODUCTS,
    spaces.Box(-1, 1, (2, 2), np.float32),
    spaces.Box(-1, 1, (), np.float32),
]


@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_samples_are_scored_as_they_were_drawn(space):
    distribution, generator = action_distribution(space), torch.Generator().manual_seed(0)
    output = torch.randn(50, distribution.size, generator=generator)
    options = dict(generator=generator, action_mask=None)
    action, log_prob = distribution.sample(output.clone().requires_grad_(), deterministic=False, **options)
    assert action.shape == (50, *space.shape) and log_prob.shape == (50,)
    assert not action.requires_grad and not log_prob.requires_grad
    if not isinstance(space, spaces.Box):
        assert action.dtype == torch.int64
        assert all(space.contains(one.astype(space.dtype)) or space.contains(int(one)) for one in action.numpy())
    scored, entropy = distribution.score(output, action)
    torch.testing.assert_close(scored, log_prob, atol=1e-5, rtol=0)
    best, best_log_prob = distribution.sample(output, deterministic=True, **options)
    assert (best_log_prob >= log_prob - 1e-6).all() and entropy.shape == (50,)
    # As part of a rollout, [B, T] in front, and after saving.
    again = action_distribution(restore_space(json.loads(json.dumps(describe_space(space)))))
    wide = again.score(output.view(5, 10, -1), action.view(5, 10, *space.shape))
    torch.testing.assert_close(wide[0].flatten(), log_prob, atol=1e-5, rtol=0)


@pytest.mark.parametrize("space", PRODUCTS, ids=str)
def test_a_product_of_choices_sums_to_one(space):
    distribution = action_distribution(space)
    generator = torch.Generator().manual_seed(1)
    output = torch.randn(distribution.size, generator=generator)
    every = torch.tensor(list(itertools.product(*[range(n) for n in distribution.choices])))
    if isinstance(space, spaces.MultiDiscrete):
        every = every + torch.as_tensor(space.start).flatten()
    log_prob, entropy = distribution.score(output.expand(len(every), -1), every.view(-1, *space.shape))
    assert log_prob.exp().sum().item() == pytest.approx(1)
    assert entropy[0].item() == pytest.approx(-(log_prob.exp() * log_prob).sum().item(), abs=1e-5)
    drawn, _ = distribution.sample(
        output.expand(20_000, -1), generator=generator, action_mask=None, deterministic=False
    )
    found = (drawn.view(20_000, 1, -1) == every).all(-1).float().mean(0)
    torch.testing.assert_close(found, log_prob.exp(), atol=0.015, rtol=0)


def test_action_spaces_of_no_policy_are_refused():
    for space in (spaces.Dict({"a": spaces.Discrete(2)}), spaces.Tuple([PLANE]), spaces.Text(3)):
        with refused(ValueError, "action_space is", "Discrete, Box, MultiDiscrete or MultiBinary", "TransformAction"):
            MLPPolicy(PLANE, space)
    with refused(ValueError, "int", "expected floats"):
        MLPPolicy(PLANE, spaces.Box(0, 3, (2,), np.int64))
    with refused(ValueError, "action_mask", "Discrete"):
        MLPPolicy(PLANE, PRODUCTS[0]).act(np.zeros((2, 3)), action_mask=torch.ones(2, 5, dtype=torch.bool))


@pytest.mark.parametrize("scale", [1e-2, 10.0, 1e3])
def test_entropy_gradients_are_finite_under_a_mask(scale):
    """Against the distribution over the open actions alone."""
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    is_open, action = torch.tensor([True, False, True, True, False]), torch.tensor([0, 2, 3, 0])
    log_prob, entropy = Categorical(spaces.Discrete(5)).score(logits, action, is_open)
    alone = torch.distributions.Categorical(logits=logits[:, is_open])
    expected = alone.log_prob(torch.tensor([0, 1, 2, 0])), alone.entropy()
    for ours, theirs in zip((log_prob, entropy), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    found, plain = (torch.autograd.grad((scale * y + x).sum(), logits)[0] for x, y in ((log_prob, entropy), expected))
    torch.testing.assert_close(found, plain, atol=1e-5 * max(1, scale), rtol=1e-4)


class Match(gym.Env):
    """Pays 1 for each part of the action that equals a hidden pattern; one step long."""

    observation_space = PLANE

    def __init__(self, space, pattern):
        self.action_space, self.pattern = space, pattern

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(3, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action, dtype=self.action_space.dtype))
        return np.ones(3, np.float32), float((action == self.pattern).mean()), True, False, {}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "space, pattern", [(spaces.MultiDiscrete([3, 2]), [2, 1]), (spaces.MultiBinary(4), [0, 1, 1, 0])], ids=str
)
def test_products_of_choices_learn(space, pattern):
    env = SyncVectorEnv([lambda: Match(space, pattern)] * 8, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = make_policy(env)
    PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=64, learning_rate=3e-3)).learn(4000)
    assert np.mean(evaluate(env, policy, num_episodes=50)[0]) > 0.95
