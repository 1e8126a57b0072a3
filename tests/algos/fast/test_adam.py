"""The fast Adam equals torch's, with its own clipping."""

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
