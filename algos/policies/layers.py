"""Layers with orthogonal weights, initialized from a given generator."""

import math
from typing import TypeVar

import torch
from torch import nn

SQRT_2 = math.sqrt(2)
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def linear(before: int, after: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """Linear layer with orthogonal weights of this gain and zero biases (Huang et al. 2022)."""
    if not (isinstance(before, int) and isinstance(after, int) and before > 0 and after > 0):
        raise ValueError(f"layer sizes must be positive integers, got in_features={before!r}, out_features={after!r}")
    # Created uninitialized: nn.Linear's own initialization would draw from the global generator.
    return _orthogonal(nn.utils.skip_init(nn.Linear, before, after), gain, generator)


def convolution(before: int, after: int, kernel: int, stride: int, generator: torch.Generator) -> nn.Conv2d:
    """Convolution without padding, with orthogonal weights of gain √2 and zero biases."""
    return _orthogonal(nn.utils.skip_init(nn.Conv2d, before, after, kernel, stride), SQRT_2, generator)


def lstm(before: int, after: int, generator: torch.Generator) -> nn.LSTM:
    """One LSTM layer, batch first, with orthogonal weights of gain 1 and zero biases (Huang et al. 2022)."""
    layer = nn.LSTM(before, after, batch_first=True, device="meta").to_empty(device="cpu")
    for name, parameter in layer.named_parameters():
        if "weight" in name:
            nn.init.orthogonal_(parameter, generator=generator)
        else:
            nn.init.zeros_(parameter)
    return layer


def _orthogonal(layer: Layer, gain: float, generator: torch.Generator) -> Layer:
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
