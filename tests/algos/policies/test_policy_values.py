"""`value(observation)` of control policies: the values of `evaluate`, with their gradient."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from algos import CNNPolicy, GSDEPolicy, MLPPolicy, MultiInputPolicy, collect

IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
POLICIES = {
    "mlp": (MLPPolicy, VECTOR, {}),
    "normalized": (MLPPolicy, VECTOR, {"normalize_observations": True}),
    "gsde": (GSDEPolicy, VECTOR, {}),
    "cnn": (CNNPolicy, IMAGE, {}),
    "multi_input": (MultiInputPolicy, spaces.Dict(image=IMAGE, vector=VECTOR), {}),
}


class Noise(gymnasium.Env):
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.mark.parametrize("name", POLICIES)
def test_values_have_the_gradient_of_an_evaluation(name):
    """Those of MLPPolicy and GSDEPolicy had none, so a term of an own loss that read them did nothing."""
    kind, space, options = POLICIES[name]
    env = SyncVectorEnv([lambda: Noise(space)] * 2)
    policy = kind(space, Noise.action_space, **options)
    rollout = collect(env, policy, num_steps=3)
    parameters = [*policy.value_parameters()]
    values = (policy.value(rollout["observation"]), policy.evaluate(rollout).value)
    torch.testing.assert_close(*values, atol=1e-6, rtol=0)
    gradients = [torch.autograd.grad(value.var(), parameters) for value in values]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)
    assert sum(gradient.abs().sum() for gradient in gradients[0]) > 0
    with torch.no_grad():
        torch.testing.assert_close(policy.value(rollout["observation"]), values[0].detach(), atol=1e-6, rtol=0)
