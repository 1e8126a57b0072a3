"""NumPy reads what an environment returned as torch does, and leaves what a user has changed to torch."""

import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from algos import MLPPolicy
from algos.fast import reading
from algos.policies.normalizers import ObservationNormalizer
from algos.policies.policy import ControlPolicy

SAMPLES = np.random.default_rng(0).normal(3, [1, 10, 1e-3, 100], (50, 4))
SPACE = spaces.Box(-10, 10, (4,), np.float64)


class Halved(ObservationNormalizer):
    def forward(self, observation):
        return super().forward(observation) / 2


class Minimal(nn.Module):
    """A normalizer that shares nothing with ours."""

    def forward(self, observation):
        return observation / 7


class OwnReader(MLPPolicy):
    def read(self, observation):
        return super().read(observation).sin()


class OwnFlat(MLPPolicy):
    def _flat(self, observation):
        return super()._flat(observation).sin()


def make(kind=MLPPolicy, *, space=SPACE, normalize=True):
    policy = kind(space, spaces.Box(-1, 1, (3,)), normalize_observations=normalize)
    if normalize:
        policy.normalizer.add(torch.from_numpy(SAMPLES))
    policy.actor[-1].weight.data.mul_(100)
    return policy


def with_own_normalizer(policy, kind):
    policy.normalizer = kind() if kind is Minimal else kind(4)
    return policy


def changed(policy, change):
    change(policy)
    return policy


MAKERS = {
    "ours": make,
    "ours, without a normalizer": lambda: make(normalize=False),
    "float32": lambda: make(space=spaces.Box(-10, 10, (4,)), normalize=False),
    "own read": lambda: make(OwnReader),
    "own read, float32": lambda: make(OwnReader, space=spaces.Box(-10, 10, (4,)), normalize=False),
    "own _flat": lambda: make(OwnFlat),
    "read of an object": lambda: changed(make(), lambda p: setattr(p, "read", lambda x: x.float() / 3)),
    "subclass of the normalizer": lambda: with_own_normalizer(make(), Halved),
    "another normalizer": lambda: with_own_normalizer(make(), Minimal),
    "some columns": lambda: changed(
        make(), lambda p: setattr(p, "normalizer", ObservationNormalizer(4, torch.tensor([0, 2])))
    ),
    "a hook": lambda: changed(make(), lambda p: p.normalizer.register_forward_hook(lambda m, x, y: -y)),
    "_normalize of an object": lambda: changed(make(), lambda p: setattr(p.normalizer, "_normalize", lambda x: x / 5)),
}


def check(policy, count=5):
    """The action is the most probable one for what `read` returns."""
    dtype = policy.observation_space.dtype
    observation = np.resize(SAMPLES, (count, 4)).astype(dtype)
    action = policy.act(observation, deterministic=True).action
    with torch.no_grad():
        expected = policy.actor(policy.read(torch.from_numpy(observation)))
    torch.testing.assert_close(action, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 5, 1_000])
@pytest.mark.parametrize("name", MAKERS)
def test_act_reads_as_read_does(name, count):
    check(MAKERS[name](), count)


@pytest.mark.parametrize("owner", [ControlPolicy, ObservationNormalizer], ids=lambda x: x.__name__)
def test_a_patched_class_is_obeyed(owner, monkeypatch):
    name = "_flat" if owner is ControlPolicy else "_normalize"
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, x: original(self, x).clamp(-0.5, 0.5))
    policy = make()
    observation = SAMPLES[:5]
    action = policy.act(observation, deterministic=True).action
    with torch.no_grad():
        torch.testing.assert_close(action, policy.actor(policy.read(torch.from_numpy(observation))))
    monkeypatch.undo()
    assert (policy.act(observation, deterministic=True).action - action).abs().max() > 0.1
    check(policy)


def test_the_methods_are_those_that_were_compared():
    assert reading.ORIGINALS.changed() is None


def test_extreme_numbers_are_read_as_by_torch_without_a_warning():
    policy = make()
    observation = np.array([[np.nan, np.inf, -np.inf, 0], [1e300, -1e300, 0, 1]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers = reading.read_array(None, policy, observation)
        policy.act(observation)
    np.testing.assert_allclose(numbers, policy.read(torch.from_numpy(observation)).numpy(), rtol=1e-5, atol=1e-5)
    kept = observation.copy()
    numbers[:] = 7
    np.testing.assert_array_equal(observation, kept)
