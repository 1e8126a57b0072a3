"""Towers: multilayer perceptrons that read the same observations."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from algos.policies.layers import SQRT_2, linear
from textenv.acceleration import accelerated


def tower(
    size: int,
    hidden: Sequence[int],
    outputs: int,
    *,
    gain: float,
    generator: torch.Generator,
    activation: type[nn.Module] = nn.Tanh,
) -> nn.Sequential:
    """MLP: linear layers with an activation between them; ``gain`` is that of the last layer."""
    widths = [size, *hidden]
    layers: list[nn.Module] = []
    for before, after in zip(widths[:-1], widths[1:], strict=True):
        layers += [linear(before, after, SQRT_2, generator), activation()]
    return nn.Sequential(*layers, linear(widths[-1], outputs, gain, generator))


def widths(hidden: Sequence[int]) -> tuple[int, ...]:
    """Convert the widths of hidden layers to a tuple; raises a ValueError unless they are a sequence."""
    if not isinstance(hidden, Sequence):
        raise ValueError(f"hidden is {hidden!r}, expected the width of each hidden layer, such as (64, 64)")
    return tuple(hidden)


@accelerated("algos.fast.towers:act", "f59a21aefa7c")
def act(observation: np.ndarray, tower: nn.Module) -> Tensor:
    """Output of a tower for a step in the environment: float32 ``[N, size]`` to ``[N, outputs]``, no gradient."""
    weight = next(tower.parameters())
    with torch.no_grad():
        return tower(torch.from_numpy(observation).to(weight.device))


@accelerated("algos.fast.towers:value", "48e579279637")
@torch.no_grad()
def value(observation: Tensor, tower: nn.Module) -> Tensor:
    """Output of a tower: ``[*, size]`` to ``[*, outputs]``, no gradient."""
    return tower(observation)


@accelerated("algos.fast.towers:both", "408a3789ee40")
def both(observation: Tensor, first: nn.Module, second: nn.Module) -> tuple[Tensor, Tensor]:
    """Outputs of two towers: ``[*, size]`` to ``[*, outputs]`` each, differentiable any number of times."""
    return first(observation), second(observation)
