"""Fast equivalent of `algos.policies.twin_critics.twin_values`: the gradient is written by hand.

Autograd makes a new slope for each ReLU; here slopes are changed in place.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

PlainValues = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]


def twin_values(plain: PlainValues, rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Values ``[2, n]``; without a gradient ``plain`` is as fast.

    Args:
        plain: plain equivalent.
        rows: observations with actions, ``[n, inputs]``.
        weights: for each hidden layer ``[2, inputs, outputs]``, and for the output ``[2, inputs]``.
        biases: for each hidden layer ``[2, 1, outputs]``, and for the output ``[2, 1]``.
    """
    if not torch.is_grad_enabled():
        return plain(rows, weights, biases)
    values: Tensor = _TwinValues.apply(plain, rows, *weights, *biases)
    return values


class _Context(Protocol):
    """What `_TwinValues` keeps from its output for its gradient."""

    plain: PlainValues
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    features: list[Tensor]
    """Input of each layer, ``[2, n, inputs]``."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors, which `saved_tensors` returns."""


class _TwinValues(torch.autograd.Function):
    """Values of both critics with a gradient written by hand."""

    @staticmethod
    def forward(ctx: _Context, plain: PlainValues, rows: Tensor, *parameters: Tensor) -> Tensor:
        layers = len(parameters) // 2
        weights = parameters[:layers]
        biases = parameters[layers:]
        x = rows.expand(2, *rows.shape)
        features = [x]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            x = torch.baddbmm(bias, x, weight).relu_()
            features.append(x)
        ctx.plain = plain
        ctx.features = features
        ctx.save_for_backward(rows, *parameters)
        return (x * weights[-1].unsqueeze(1)).sum(-1) + biases[-1]

    @staticmethod
    def backward(ctx: _Context, *output_slopes: Tensor) -> tuple[Tensor | None, ...]:
        (slope_of_values,) = output_slopes
        rows, *parameters = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient may be differentiated again
            return None, *_plain_gradient(ctx.plain, rows, parameters, slope_of_values)
        layers = len(parameters) // 2
        weights = parameters[:layers]
        needs_rows = ctx.needs_input_grad[1]
        needs_weights = any(ctx.needs_input_grad[2:])

        # Output layer
        slope_of_values = slope_of_values.unsqueeze(-1)
        weight_gradients: list[Tensor | None] = [None] * layers
        bias_gradients: list[Tensor | None] = [None] * layers
        if needs_weights:
            weight_gradients[-1] = torch.bmm(slope_of_values.transpose(1, 2), ctx.features[-1]).squeeze(1)
            bias_gradients[-1] = slope_of_values.sum(1)
        slope = slope_of_values * weights[-1].unsqueeze(1)

        # Hidden layers, the last first
        for number in reversed(range(layers - 1)):
            output = ctx.features[number + 1]
            torch.ops.aten.threshold_backward.grad_input(slope, output, 0, grad_input=slope)
            if needs_weights:
                weight_gradients[number] = torch.bmm(ctx.features[number].transpose(1, 2), slope)
                bias_gradients[number] = slope.sum(1, keepdim=True)
            if number or needs_rows:
                slope = torch.bmm(slope, weights[number].transpose(1, 2))
        rows_gradient = slope.sum(0) if needs_rows else None
        return None, rows_gradient, *weight_gradients, *bias_gradients


def _plain_gradient(
    plain: PlainValues, rows: Tensor, parameters: Sequence[Tensor], slope: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradient by autograd, with a new forward pass; None for inputs without a gradient."""
    layers = len(parameters) // 2
    inputs = [rows, *parameters]
    with_gradient = [x for x in inputs if x.requires_grad]
    values = plain(rows, parameters[:layers], parameters[layers:])
    gradients = iter(torch.autograd.grad(values, with_gradient, slope, create_graph=True))
    return tuple(next(gradients) if x.requires_grad else None for x in inputs)
