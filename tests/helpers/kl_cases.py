"""Pairs of policy and reference, for control and recurrent policies."""

import torch

from algos import LSTMPolicy, MLPPolicy
from tests.helpers.small_agents import cartpole

Kl = torch.distributions.kl_divergence


def perturbed(policy, *, seed=0):
    """A reference of the policy's kind, near it."""
    reference = policy.reference()
    generator = torch.Generator().manual_seed(seed)
    for weight in reference.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return reference


def control_case():
    env = cartpole()
    return env, MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(16,)), dict(num_steps=16)


def recurrent_case():
    env = cartpole()
    return env, LSTMPolicy(env.single_observation_space, env.single_action_space, hidden=16), dict(num_steps=16)
