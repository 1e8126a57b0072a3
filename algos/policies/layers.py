"""Layers with orthogonal weights, drawn from the generator that is passed in; `draw_uniformly` draws others."""

import math
from typing import TypeVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from algos.envs.images import brightest_pixel, image_layout, is_image, leaf_spaces
from algos.policies.normalizers import ObservationNormalizer

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


def channels_first(images: Tensor, space: spaces.Space) -> Tensor:
    """Arrange images ``[n, *]`` of an image space as ``[n, channels, height, width]``."""
    shape, are_first = image_layout(space)
    if len(shape) == 2:
        return images.unsqueeze(1)
    if are_first:
        return images
    return images.movedim(-1, 1)


class CombinedEncoder(nn.Module):
    """Features of observations with images: each image through a trunk of its own, all other numbers as they are.

    The parts stand in the order of the space, as in Stable-Baselines3's ``CombinedExtractor``. Only a uint8 Box of 2 or
    3 dimensions counts as an image (`algos.envs.images`); a Box of floats is numbers, whatever its shape.

    Args:
        space: space of one observation, with at least one image.
        image_features: length of the features of each image.
        generator: draws the weights.
    """

    def __init__(self, space: spaces.Space, *, image_features: int, generator: torch.Generator) -> None:
        super().__init__()
        self.leaves = leaf_spaces(space)
        self.sizes = [spaces.flatdim(leaf) for leaf in self.leaves]
        """Columns of each part in a flat observation."""
        self.trunks = nn.ModuleList()
        self.size = 0
        """Number of features of an observation."""
        for leaf, size in zip(self.leaves, self.sizes, strict=True):
            if is_image(leaf):
                example = channels_first(torch.zeros(1, *leaf.shape, device="cpu"), leaf)
                _, channels, height, width = example.shape
                self.trunks.append(image_trunk(channels, height, width, image_features, generator))
                self.size += image_features
            else:
                self.size += size

    def normalizer(self) -> ObservationNormalizer | None:
        """Make a normalizer of flat observations that leaves the pixels as they are; None if there is nothing else."""
        is_number = []
        for leaf, size in zip(self.leaves, self.sizes, strict=True):
            is_number += [not is_image(leaf)] * size
        columns = torch.tensor(is_number, device="cpu").nonzero()[:, 0]
        if not len(columns):
            return None
        return ObservationNormalizer(sum(self.sizes), columns)

    def forward(self, flat: Tensor) -> Tensor:
        """Features ``[*batch, size]`` of flat observations, float32 ``[*batch, *]``, whose pixels are not divided."""
        features = []
        trunks = iter(self.trunks)
        for leaf, columns in zip(self.leaves, flat.split(self.sizes, dim=-1), strict=True):
            if is_image(leaf):
                images = channels_first(columns.reshape(-1, *leaf.shape), leaf)
                # Convolutions on a CPU are faster with channels last in memory.
                images = images.to(memory_format=torch.channels_last) / brightest_pixel(leaf)
                image_features = next(trunks)(images)
                columns = image_features.reshape(*flat.shape[:-1], image_features.shape[-1])
            features.append(columns)
        return torch.cat(features, dim=-1)


def lstm(before: int, after: int, generator: torch.Generator) -> nn.LSTM:
    """One LSTM layer, batch first, with orthogonal weights of gain 1 and zero biases (Huang et al. 2022)."""
    layer = nn.LSTM(before, after, batch_first=True, device="meta").to_empty(device="cpu")
    for name, parameter in layer.named_parameters():
        if "weight" in name:
            nn.init.orthogonal_(parameter, generator=generator)
        else:
            nn.init.zeros_(parameter)
    return layer


def draw_uniformly(network: nn.Module, generator: torch.Generator) -> None:
    """Draw weights and biases of linear layers and convolutions anew, uniform in ±1/√inputs (LeCun et al. 1998).

    `torch.nn` begins with these. So do SAC and TD3 in Stable-Baselines3, and TD3 in its authors' code (Fujimoto et al.
    2018). The deviation of weights is 1/√6 of that of orthogonal ones with gain √2.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            bound = 1 / math.sqrt(layer.weight[0].numel())
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=generator)


def _initialize(layer: Layer, gain: float, generator: torch.Generator) -> Layer:
    """Write orthogonal weights of this gain and zero biases into a layer."""
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
