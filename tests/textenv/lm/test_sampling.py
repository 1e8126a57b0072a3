"""Sampling from large vocabularies, and where blocks are forbidden; more is in tests/fuzz/test_properties.py."""

import pytest
import torch

from textenv.lm.sampling import BLOCK, restrict, sample


@pytest.mark.parametrize("n", [BLOCK * 4, 5000])
def test_large_vocabularies_follow_probabilities(n):
    """Chi-square of 40,000 draws over 16 classes of tokens (99.9 % point for 15 degrees of freedom: 37.7)."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(n, generator=generator)
    action, log_prob = sample(logits.expand(40_000, n), generator=generator)
    classes = torch.arange(n) * 16 // n
    expected = torch.zeros(16).scatter_add_(0, classes, logits.softmax(-1)) * 40_000
    found = torch.bincount(classes[action], minlength=16)
    assert ((found - expected) ** 2 / expected).sum() < 37.7
    torch.testing.assert_close(log_prob, logits.log_softmax(-1)[action], atol=1e-5, rtol=1e-5)
    likely = logits.topk(8).indices  # and single tokens: within 5 standard deviations
    probability = logits.softmax(-1)[likely]
    share = (action[:, None] == likely).float().mean(0)
    assert ((share - probability).abs() < 5 * (probability / 40_000).sqrt()).all()


@pytest.mark.parametrize("n", [300, 5000])
@pytest.mark.parametrize("level", [0.0, 1 - 2**-24, 0.5])
def test_no_uniform_number_draws_a_forbidden_token(n, level):
    """At both ends and where whole blocks are forbidden; at 0 the first open token, at the end the last."""
    allowed = torch.zeros(2, n, dtype=torch.bool)
    allowed[0, [7, n // 2, n - 3]] = True
    allowed[1, n - 1] = True
    logits = torch.randn(2, n, generator=torch.Generator().manual_seed(1))
    restricted = restrict(logits, temperature=1.0, allowed=allowed)
    action, log_prob = sample(restricted, uniform=torch.full((2,), level))
    assert allowed[torch.arange(2), action].all() and torch.isfinite(log_prob).all()
    if level != 0.5:
        assert action[0] == (7 if level == 0 else n - 3)
