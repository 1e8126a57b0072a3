"""Sampling of tokens by uniform numbers."""

import pytest
import torch

from textenv.lm.sampling import BLOCK, sample


@pytest.mark.parametrize("size", [3, 4 * BLOCK + 7])
def test_a_uniform_number_rounded_to_1_draws_an_action(size):
    logits = torch.zeros(1, size)
    logits[0, size // 2 :] = torch.finfo(torch.float32).min
    action, log_prob = sample(logits, uniform=torch.ones(1))
    assert 0 <= action.item() < size // 2 and log_prob.isfinite().all()
