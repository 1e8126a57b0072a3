"""NumPy normalizes what an environment returned as torch does, and leaves what the user has changed to torch."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from algos import MLPPolicy
from algos.policies.normalizers import ObservationNormalizer, normalized_array

SAMPLES = np.random.default_rng(0).normal(3, [1, 10, 1e-3, 100], (50, 4))


class Halved(ObservationNormalizer):
    def forward(self, observation):
        return super().forward(observation) / 2


class OwnReader(MLPPolicy):
    def read(self, observation):
        return super().read(observation).sin()


def normalizer(kind=ObservationNormalizer, columns=None):
    result = kind(4, columns)
    result.add(torch.from_numpy(SAMPLES if columns is None else SAMPLES[:, columns]))
    return result


def hooked():
    result = normalizer()
    result.register_forward_hook(lambda module, arguments, output: -output)
    return result


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("count", [1, 50, 5_000])
@pytest.mark.parametrize(
    "make", [normalizer, hooked, lambda: normalizer(Halved), lambda: normalizer(columns=torch.tensor([0, 2]))]
)
def test_an_array_is_normalized_as_a_tensor(make, count, dtype):
    ours = make()
    array = np.resize(SAMPLES, (count, 4)).astype(dtype)
    array[0] = [np.nan, np.inf, -np.inf, 0]
    expected = ours(torch.from_numpy(array).float())
    result = normalized_array(array, ours)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_act_reads_as_evaluate_does_in_a_subclass(normalize, dtype):
    space = spaces.Box(-10, 10, (4,), dtype)
    policy = OwnReader(space, spaces.Discrete(3), normalize_observations=normalize)
    with torch.no_grad():
        policy.actor[-1].weight.mul_(300)
    observation = SAMPLES[:5].astype(dtype)
    most_probable = policy.act(observation, deterministic=True)
    output = policy.actor(policy.read(torch.from_numpy(observation)))
    assert torch.equal(most_probable.action, output.argmax(-1))
    torch.testing.assert_close(most_probable.log_prob, output.log_softmax(-1).amax(-1).detach(), atol=1e-5, rtol=0)
