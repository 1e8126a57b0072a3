"""Actions of Boxes with bounds: densities against torch.distributions, gradients near the bounds, shapes, entropies."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Independent, Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import AffineTransform, TanhTransform

from algos.policies.distributions import BoxBounds, NoisyAction, SquashedGaussian

LOW = np.array([-1.0, 0.0, -30.0])
HIGH = np.array([2.0, 0.5, -10.0])
UNEQUAL = spaces.Box(LOW.astype(np.float32), HIGH.astype(np.float32))
BOXES = [
    UNEQUAL,
    spaces.Box(LOW, HIGH, dtype=np.float64),
    spaces.Box(-2, 1, (2, 2), np.float32),
    spaces.Box(0, 1, (), np.float32),
]


def reference(mean, std):
    """The same distribution over `UNEQUAL` by torch."""
    low = torch.from_numpy(LOW)
    half_range = torch.from_numpy(HIGH - LOW) / 2
    transforms = [TanhTransform(cache_size=1), AffineTransform(low + half_range, half_range)]
    return TransformedDistribution(Independent(Normal(mean, std), 0), transforms)


def outputs(size, *, seed=0):
    """Means of about 1 and log standard deviations of about -.5."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(size, 3, generator=generator)
    log_std = 0.5 * torch.randn(size, 3, generator=generator) - 0.5
    return torch.cat([mean, log_std], dim=-1)


@pytest.mark.parametrize("kind", [SquashedGaussian, NoisyAction])
@pytest.mark.parametrize("space", BOXES, ids=str)
def test_samples_are_scored_as_they_were_drawn(space, kind):
    distribution, generator = kind(space), torch.Generator().manual_seed(0)
    if kind is NoisyAction:
        distribution.noise = 0.2
    output = 0.3 * torch.randn(50, distribution.size, generator=generator)
    options = dict(generator=generator, action_mask=None)
    for uniform in (False, True):
        distribution.uniform = uniform
        action, log_prob = distribution.sample(output.clone().requires_grad_(), deterministic=False, **options)
        assert action.shape == (50, *space.shape) and action.dtype == log_prob.dtype == torch.float32
        assert not action.requires_grad and log_prob.shape == (50,)
        scored, entropy = distribution.score(output, action)
        torch.testing.assert_close(scored, log_prob, atol=2e-2, rtol=0)  # atanh magnifies rounding
        assert entropy.shape == (50,)
        shape = (5, 10)
        wide = distribution.score(output.view(*shape, -1), action.view(*shape, *space.shape))
        torch.testing.assert_close(wide[0].flatten(), scored, atol=1e-5, rtol=0)
        if kind is SquashedGaussian or uniform:
            actions = action.numpy().astype(space.dtype)
            assert (actions >= space.low - 1e-5).all() and (actions <= space.high + 1e-5).all()
    best, _ = distribution.sample(output, deterministic=True, **options)
    again = distribution.bounds.unscale(distribution.mode(output))
    assert torch.equal(best, again)


def test_the_squashed_gaussian_is_torchs_transformed_distribution():
    """Log-density of samples, and its gradient in the network's output, in float64."""
    distribution = SquashedGaussian(UNEQUAL).double()
    output = outputs(200).double().requires_grad_()
    noise = torch.randn(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scaled_action, log_prob = distribution.scaled_sample(output, noise)
    mean, log_std = output.chunk(2, dim=-1)
    theirs = reference(mean, log_std.exp())
    action = theirs.transforms[1](theirs.transforms[0](mean + log_std.exp() * noise))
    expected = theirs.log_prob(action).sum(-1)
    torch.testing.assert_close(distribution.bounds.unscale(scaled_action), action, atol=1e-5, rtol=0)
    torch.testing.assert_close(log_prob - distribution.bounds.log_scale, expected, atol=1e-5, rtol=1e-6)
    ours = torch.autograd.grad(log_prob.sum(), output, retain_graph=True)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected.sum(), output)[0], atol=1e-6, rtol=1e-6)

    # Of given actions
    fraction = 0.998 * torch.rand(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.001
    given = torch.from_numpy(LOW) + torch.from_numpy(HIGH - LOW) * fraction
    found = distribution.score(output, given)[0]
    torch.testing.assert_close(found, reference(mean, log_std.exp()).log_prob(given).sum(-1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("size", [5.0, 20.0, 500.0])
def test_numbers_near_the_bounds_are_finite(size):
    """tanh x rounds to 1 in float32 from x = 9 on; log(1 - tanh² x) is then 2 log 2 - 2 |x|."""
    distribution = SquashedGaussian(UNEQUAL)
    output = torch.cat([torch.full((4, 3), size), torch.zeros(4, 3)], dim=-1)
    output[::2] *= -1
    output.requires_grad_()
    scaled_action, log_prob = distribution.scaled_sample(output, torch.zeros(4, 3))
    assert (scaled_action.abs() <= 1).all()
    expected = -3 * (0.5 * math.log(2 * math.pi) + 2 * math.log(2) - 2 * size - 2 * math.log1p(math.exp(-2 * size)))
    assert log_prob.tolist() == pytest.approx([expected] * 4, rel=1e-5)
    gradient = torch.autograd.grad(log_prob.sum(), output)[0]
    assert gradient.isfinite().all()
    assert gradient[:, :3].abs().flatten().tolist() == pytest.approx([2 * math.tanh(size)] * 12, rel=1e-4)

    # A stored action at the bound itself
    at_bound = torch.from_numpy(np.stack([LOW, HIGH])).float()
    output = torch.zeros(2, 6, requires_grad=True)
    log_prob, entropy = distribution.score(output, at_bound)
    assert log_prob.isfinite().all()
    assert torch.autograd.grad((log_prob + entropy).sum(), output)[0].isfinite().all()


@pytest.mark.parametrize("log_std", [-3.0, 0.0, 1.0])
def test_the_entropy_is_the_mean_of_minus_the_log_density(log_std):
    """Over 400,000 samples; the standard error of the mean is about .002."""
    distribution = SquashedGaussian(UNEQUAL)
    output = torch.tensor([[0.3, -1.0, 2.0] + [log_std] * 3])
    noise = torch.randn(400_000, 3, generator=torch.Generator().manual_seed(0))
    _, log_prob = distribution.scaled_sample(output.expand(400_000, -1), noise)
    expected = distribution.bounds.log_scale - log_prob.mean()
    _, entropy = distribution.score(output, torch.from_numpy(LOW + 0.1).float()[None])
    assert entropy.item() == pytest.approx(expected.item(), abs=0.01)


def test_squashing_keeps_the_kl_of_the_gaussians():
    distribution = SquashedGaussian(UNEQUAL)
    one, other_one = outputs(20, seed=0), outputs(20, seed=1)
    gaussians = [Normal(mean, log_std.exp()) for mean, log_std in (x.chunk(2, dim=-1) for x in (one, other_one))]
    expected = kl_divergence(*gaussians).sum(-1)
    torch.testing.assert_close(distribution.divergence(one, other_one, other=distribution), expected)


def test_bounds_are_scaled_to_one_and_back():
    bounds = BoxBounds(UNEQUAL)
    corners = torch.from_numpy(np.stack([LOW, (LOW + HIGH) / 2, HIGH])).float()
    assert bounds.scale(corners).tolist() == [[-1.0] * 3, [0.0] * 3, [1.0] * 3]
    assert torch.equal(bounds.unscale(bounds.scale(corners)), corners)
    assert bounds.log_scale == pytest.approx(math.log(1.5 * 0.25 * 10))
    assert bounds.uniform_log_prob == pytest.approx(-math.log(3 * 0.5 * 20))


@pytest.mark.parametrize(
    "space", [spaces.Box(0, 5, (2,), np.int64), spaces.Discrete(3), spaces.MultiBinary(2)], ids=str
)
def test_other_spaces_are_refused(space):
    with pytest.raises(ValueError, match="expected a Box of floats with bounds"):
        SquashedGaussian(space)
