"""Layers with orthogonal weights, initialized from a given generator."""

import math
from typing import TypeVar

import torch
from torch import nn

SQRT_2 = math.sqrt(2)
NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel size and stride of each convolution (Mnih et al. 2015), for sides of at least 36 pixels."""
SMALL_KERNELS = ((32, 3, 1), (64, 3, 2))
"""The same for smaller images, for which NATURE is too large: kernels of 3, first stride 1 (Young & Tian 2019)."""
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


def image_trunk(channels: int, height: int, width: int, features: int, generator: torch.Generator) -> nn.Sequential:
    """Convolutions and a linear layer with ReLU: images ``[n, channels, height, width]`` to ``[n, features]``."""
    layers: list[nn.Module] = []
    for after, kernel, stride in NATURE if min(height, width) >= 36 else SMALL_KERNELS:
        layers += [convolution(channels, after, kernel, stride, generator), nn.ReLU()]
        channels = after
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    flat = linear(channels * height * width, features, SQRT_2, generator)
    return nn.Sequential(*layers, nn.Flatten(), flat, nn.ReLU())


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
