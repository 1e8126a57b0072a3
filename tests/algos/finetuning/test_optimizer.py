"""The supervised optimizer's steps, and batches of like lengths."""

import math

import pytest
import torch

from algos import SFTConfig
from algos.finetuning.optimizer import CosineOptimizer, length_buckets
from textenv.acceleration import FAST


def test_the_step_rises_and_falls_only_matrices_decay():
    matrix, vector = torch.nn.Parameter(torch.ones(1, 1)), torch.nn.Parameter(torch.ones(1))
    config = SFTConfig(learning_rate=0.1, warmup_ratio=1 / 3, weight_decay=0.5)
    descent = CosineOptimizer(iter([matrix, vector]), config, steps=6)
    sizes, expected = [], 1.0
    for share in (1 / 2, 1, 1, (2 + math.sqrt(2)) / 4, 1 / 2, (2 - math.sqrt(2)) / 4):
        matrix.grad, vector.grad = torch.zeros(1, 1), torch.zeros(1)
        assert descent.step() == 0
        sizes.append(descent.optimizer.param_groups[0]["lr"] / 0.1)
        expected *= 1 - 0.5 * 0.1 * share
        assert sizes[-1] == pytest.approx(share)
    assert matrix.item() == pytest.approx(expected) and vector.item() == 1


def test_a_long_gradient_is_clipped_before_the_step():
    weight = torch.nn.Parameter(torch.zeros(2))
    descent = CosineOptimizer(iter([weight]), SFTConfig(max_grad_norm=1.0), steps=1)
    weight.grad = torch.tensor([3.0, 4.0])
    assert descent.step() == 5
    assert weight.grad is None
    torch.testing.assert_close(descent.optimizer.state[weight]["exp_avg"], 0.1 * torch.tensor([0.6, 0.8]))


@pytest.mark.heavy
@pytest.mark.skipif(not FAST, reason="only the fast Adam clears averages")
def test_averages_without_a_gradient_end_at_zero():
    """And not above it, as subnormal numbers, which are slow."""
    weight = torch.nn.Parameter(torch.ones(2))
    descent = CosineOptimizer(iter([weight]), SFTConfig(), steps=1_000)
    for number in range(1_000):
        gradient_of_second = 1.0 if number < 10 else 0.0
        weight.grad = torch.tensor([1.0, gradient_of_second])
        descent.step()
    average = descent.optimizer.state[weight]["exp_avg"]
    assert average[0] > 0.5 and average[1] == 0


def test_length_buckets_have_each_index_once():
    lengths = torch.randint(1, 100, (205,), generator=torch.Generator().manual_seed(0)).tolist()
    generator = torch.Generator().manual_seed(1)
    batches, again = (length_buckets(lengths, size=4, generator=generator) for _ in range(2))
    assert sorted(i for batch in batches for i in batch) == list(range(205)) and len(batches) == 52
    assert batches != again
    padding = sum(max(lengths[i] for i in batch) - lengths[j] for batch in batches for j in batch)
    assert padding < 0.15 * sum(lengths)
