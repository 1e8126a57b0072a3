"""Fast twin critics: values and gradients are those of the plain function, to any order."""

import pytest
import torch

from algos.fast.critics import twin_values
from algos.policies.twin_critics import TwinCritics, twin_values as accelerated_values


def plain(rows, weights, biases):
    """The plain function without its fast path."""
    return getattr(accelerated_values, "__wrapped__", accelerated_values)(rows, weights, biases)


def parts(hidden, *, rows_need, weights_need):
    critics = TwinCritics(3, 2, hidden, torch.Generator().manual_seed(0)).requires_grad_(weights_need)
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(1)).requires_grad_(rows_need)
    inputs = [rows, *critics.weights, *critics.biases]
    return critics, rows, [x for x in inputs if x.requires_grad]


@pytest.mark.parametrize("hidden", [(), (7,), (16, 9)], ids=str)
@pytest.mark.parametrize(("rows_need", "weights_need"), [(True, True), (True, False), (False, True)])
def test_values_and_gradients_are_those_of_the_plain_function(hidden, rows_need, weights_need):
    critics, rows, inputs = parts(hidden, rows_need=rows_need, weights_need=weights_need)
    slope = torch.randn(2, 12, generator=torch.Generator().manual_seed(2))
    slope[0, ::2] = 0
    results = []
    for values_of in (lambda *x: twin_values(plain, *x), plain):
        values = values_of(rows, list(critics.weights), list(critics.biases))
        results.append([values, *torch.autograd.grad(values, inputs, slope)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def test_second_derivatives_are_those_of_the_plain_function():
    """The gradient of a squared gradient, as a penalty on it has."""
    critics, rows, inputs = parts((16, 9), rows_need=True, weights_need=True)
    results = []
    for values_of in (lambda *x: twin_values(plain, *x), plain):
        values = values_of(rows, list(critics.weights), list(critics.biases))
        (slope,) = torch.autograd.grad(values.square().sum(), rows, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), inputs, allow_unused=True))
    for ours, expected in zip(*results, strict=True):
        assert (ours is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(ours, expected)
