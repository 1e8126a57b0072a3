"""The fast Adam equals torch's, with its own clipping."""

import copy
import pickle

import pytest
import torch
from torch import nn

from algos.fast import adam
from tests.helpers.rollouts import draws


def test_adam_equals_torch_with_its_own_clipping():
    """Long and short gradients, a parameter without one now and then, and two dtypes."""
    generator = torch.Generator().manual_seed(0)
    first = [nn.Parameter(draws(*shape, dtype=dtype)) for shape, dtype in
             [((4, 3), torch.float32), ((7,), torch.float32), ((2, 2), torch.float64)]]  # fmt: skip
    second = [nn.Parameter(p.detach().clone()) for p in first]
    ours = adam.Adam([{"params": first}], lr=0.1, eps=1e-5, weight_decay=0.0, fused=True)
    theirs = torch.optim.Adam(second, lr=0.1, eps=1e-5)
    for step in range(12):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.1 / (1 + step)
        for place, (a, b) in enumerate(zip(first, second, strict=True)):
            gradient = torch.randn(a.shape, generator=generator).to(a) * (2.0 if step % 3 else 0.01)
            a.grad, b.grad = (None, None) if step % 4 == place else (gradient, gradient.clone())
        norm = ours.clip_grad_norm_(0.5, [0])
        torch.testing.assert_close(norm.double(), nn.utils.clip_grad_norm_(second, 0.5).double(), atol=0, rtol=1e-5)
        ours.step()
        theirs.step()
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)
    assert ours.state[first[0]]["step"] == 9


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_as_the_first(copied):
    """Its steps are those of the one that was copied."""
    weight = nn.Parameter(draws(4, 3))
    pair = (weight, adam.Adam([{"params": [weight]}], lr=0.1, fused=True))
    take_step(*pair)
    other = copied(pair)
    for one in (pair, other):
        take_step(*one)
    assert torch.equal(pair[0], other[0])


def take_step(weight, optimizer):
    weight.grad = draws(4, 3)
    optimizer.clip_grad_norm_(0.5, [0])
    optimizer.step()


@pytest.mark.heavy
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.9)])
def test_no_average_becomes_subnormal_and_no_step_changes(betas):
    """Half of the gradients are 0 from step 10 to 1,000. Torch's AdamW has the same weights, by subnormal averages."""
    weight = nn.Parameter(draws(64).float())
    plain = nn.Parameter(weight.detach().clone())
    ours = adam.Adam([{"params": [weight]}], lr=1e-3, betas=betas, weight_decay=0.0, fused=True)
    theirs = torch.optim.AdamW([plain], lr=1e-3, betas=betas, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(0)
    subnormals = []
    for number in range(1_100):
        gradient = torch.randn(64, generator=generator)
        if 10 <= number < 1_000:
            gradient[:32] = 0
        weight.grad = gradient.clone()
        plain.grad = gradient
        ours.clip_grad_norm_(1e9, [0])
        ours.step()
        theirs.step()
        subnormals.append((count_subnormals(ours), count_subnormals(theirs)))
    assert torch.equal(weight, plain)
    in_ours, in_theirs = zip(*subnormals, strict=True)
    assert max(in_ours) == 0 and max(in_theirs) >= 32


def count_subnormals(optimizer):
    """Number of averages above 0 that are smaller than float32's smallest normal number."""
    (state,) = optimizer.state.values()
    averages = torch.cat([state["exp_avg"], state["exp_avg_sq"]]).abs()
    return int(((averages > 0) & (averages < torch.finfo(torch.float32).tiny)).sum())


def test_a_mean_is_not_left_to_be_divided_by_zero():
    """Gradients of 1e-16, whose squares are negligible, with a tiny eps: each step is one of .1."""
    weight = nn.Parameter(torch.zeros(1))
    ours = adam.Adam([{"params": [weight]}], lr=0.1, eps=1e-25, weight_decay=0.0, fused=True)
    steps = 2 * adam.CLEARED_EVERY + 1
    for _ in range(steps):
        weight.grad = torch.full((1,), 1e-16)
        ours.clip_grad_norm_(1e9, [0])
        ours.step()
    assert weight.item() == pytest.approx(-0.1 * steps, rel=1e-3)
