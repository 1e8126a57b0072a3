"""Layers with orthogonal weights, drawn from the generator that is passed in."""

import math
from typing import TypeVar

import torch
from torch import nn

SQRT_2 = math.sqrt(2)
NATURE: tuple[tuple[int, int, int], ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel size and stride of each convolution (Mnih et al. 2015), for sides of at least 36 pixels."""
SMALL_KERNELS: tuple[tuple[int, int, int], ...] = ((32, 3, 1), (64, 3, 2))
"""Convolutions for smaller images, which the kernels of `NATURE` do not fit: 3 pixels, first stride 1 (Young & Tian
2019)."""
MIN_NATURE_PIXELS = 36
"""Minimum height and width of images for `NATURE`, pixels."""
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def linear(before: int, after: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """Linear layer with orthogonal weights of this gain and zero biases (Huang et al. 2022)."""
    if not (isinstance(before, int) and isinstance(after, int) and before > 0 and after > 0):
        raise ValueError(f"layer sizes must be positive integers, got in_features={before!r}, out_features={after!r}")
    # Created uninitialized: nn.Linear's own initialization would draw from the global generator.
    layer = nn.utils.skip_init(nn.Linear, before, after)
    return _initialize(layer, gain, generator)


def convolution(before: int, after: int, kernel: int, stride: int, generator: torch.Generator) -> nn.Conv2d:
    """Convolution without padding, with orthogonal weights of gain √2 and zero biases."""
    layer = nn.utils.skip_init(nn.Conv2d, before, after, kernel, stride)
    return _initialize(layer, SQRT_2, generator)


def image_trunk(channels: int, height: int, width: int, features: int, generator: torch.Generator) -> nn.Sequential:
    """Convolutions and a linear layer with ReLU: images ``[n, channels, height, width]`` to ``[n, features]``."""
    convolutions = NATURE
    if min(height, width) < MIN_NATURE_PIXELS:
        convolutions = SMALL_KERNELS
    layers: list[nn.Module] = []
    for out_channels, kernel, stride in convolutions:
        layers.append(convolution(channels, out_channels, kernel, stride, generator))
        layers.append(nn.ReLU())
        channels = out_channels
        height = (height - kernel) // stride + 1
        width = (width - kernel) // stride + 1
    layers.append(nn.Flatten())
    layers.append(linear(channels * height * width, features, SQRT_2, generator))
    layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def lstm(before: int, after: int, generator: torch.Generator) -> nn.LSTM:
    """One LSTM layer, batch first, with orthogonal weights of gain 1 and zero biases (Huang et al. 2022)."""
    layer = nn.LSTM(before, after, batch_first=True, device="meta").to_empty(device="cpu")
    for name, parameter in layer.named_parameters():
        if "weight" in name:
            nn.init.orthogonal_(parameter, generator=generator)
        else:
            nn.init.zeros_(parameter)
    return layer


def _initialize(layer: Layer, gain: float, generator: torch.Generator) -> Layer:
    """Write orthogonal weights of this gain and zero biases into a layer."""
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
