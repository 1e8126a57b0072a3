"""NumPy draws the actions that torch draws."""

import inspect

import numpy as np
import pytest
import torch
from gymnasium import spaces

from algos import MLPPolicy
from algos.fast import sampling
from algos.policies import distributions
from algos.policies.distributions import Gaussian
from tests.helpers.rollouts import draws


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "best"])
def test_numpy_draws_torchs_actions_from_its_noise(deterministic):
    logits, masked = 3 * draws(40, 5, dtype=torch.float32), draws(40, 5) > -0.5
    masked[:, 2] = True
    plain = inspect.unwrap(distributions.draw)
    for some in (logits, logits.masked_fill(~masked, torch.finfo(torch.float32).min)):
        one, other = (torch.Generator().manual_seed(5) for _ in range(2))
        for _ in range(20):
            action, log_prob = sampling.draw(plain, some, one, deterministic)
            expected, expected_log_prob = plain(some, other, deterministic)
            assert torch.equal(action, expected) and action.dtype == torch.int64
            torch.testing.assert_close(log_prob, expected_log_prob, atol=1e-5, rtol=0)
        assert torch.equal(one.get_state(), other.get_state())


def test_non_finite_logits_draw_as_torch_unwarned():
    """It is found, and named, where the rollout is checked."""
    policy = MLPPolicy(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3))
    for bad in (float("nan"), float("inf"), 3e38):
        policy.actor[0].weight.data.fill_(bad)
        step = policy.act(np.ones((2, 2), dtype=np.float32))
        assert step.action.shape == (2,)
    policy.actor[-1].bias.data[1] = float("inf")
    assert policy.act(np.ones((2, 2), dtype=np.float32)).log_prob.isnan().all()


class Wide(Gaussian):
    def parametrize(self, output):
        return output, self.log_std + 1


class Scored(Gaussian):
    def score(self, output, action, action_mask=None):
        log_prob, entropy = super().score(output, action, action_mask)
        return log_prob - 5, entropy


def gaussian(kind=None, shape=(3,)):
    result = (kind or Gaussian)(spaces.Box(-1, 1, shape))
    result.log_std.data.normal_(generator=torch.Generator().manual_seed(0))
    return result


@pytest.mark.parametrize("kind", [Gaussian, Wide, Scored])
@pytest.mark.parametrize("count", [1, 4, 1_000])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "best"])
def test_a_gaussian_is_sampled_and_scored_as_by_torch(kind, count, deterministic):
    distribution = gaussian(kind)
    mean = torch.from_numpy(draws(count, 3, dtype=torch.float32).numpy())
    one, other = (torch.Generator().manual_seed(5) for _ in range(2))
    action, log_prob = distribution.sample(mean, generator=one, action_mask=None, deterministic=deterministic)
    noise = torch.zeros(count, 3) if deterministic else torch.randn(count, 3, generator=other)
    expected = mean + distribution.log_std.exp() * noise
    torch.testing.assert_close(action, expected.detach())
    torch.testing.assert_close(log_prob, distribution.score(mean, action)[0].detach(), atol=1e-5, rtol=1e-5)
    assert torch.equal(one.get_state(), other.get_state())


def test_a_changed_gaussian_scores_its_samples(monkeypatch):
    distribution, mean = gaussian(), torch.zeros(2, 3)

    def log_prob():
        generator = torch.Generator().manual_seed(1)
        return distribution.sample(mean, generator=generator, action_mask=None, deterministic=False)[1]

    before = log_prob()
    original = Gaussian.score
    distribution.score = lambda output, action: (original(distribution, output, action)[0] - 3, None)
    torch.testing.assert_close(log_prob(), before - 3)
    del distribution.score
    monkeypatch.setattr(Gaussian, "score", lambda self, output, action: (original(self, output, action)[0] - 4, None))
    torch.testing.assert_close(log_prob(), before - 4)
    monkeypatch.undo()
    torch.testing.assert_close(log_prob(), before)
    assert sampling.ORIGINALS.changed() is None


def test_a_gaussian_of_any_batch_shape_is_scored():
    distribution = gaussian()
    with torch.no_grad():
        for shape in ((3,), (0, 3), (2, 4, 3)):
            log_prob, entropy = distribution.score(torch.zeros(shape), torch.ones(shape))
            assert log_prob.shape == entropy.shape == shape[:-1]
    alone = gaussian(shape=())
    step = alone.sample(torch.zeros(2, 1), generator=torch.Generator(), action_mask=None, deterministic=False)
    assert step[0].shape == step[1].shape == (2,)
