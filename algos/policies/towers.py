"""Towers: multilayer perceptrons, such as actor and critic, that read the same observations."""

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
    """Make an MLP: linear layers with an activation between them, ``[*, size]`` to ``[*, outputs]``.

    The weights of the hidden layers have gain √2, those of the last layer ``gain``.
    """
    layers: list[nn.Module] = []
    in_features = size
    for out_features in hidden:
        layers.append(linear(in_features, out_features, SQRT_2, generator))
        layers.append(activation())
        in_features = out_features
    layers.append(linear(in_features, outputs, gain, generator))
    return nn.Sequential(*layers)


def widths(hidden: Sequence[int]) -> tuple[int, ...]:
    """Convert the widths of hidden layers to a tuple; raise a ValueError unless they are a sequence."""
    if not isinstance(hidden, Sequence):
        raise ValueError(f"hidden is {hidden!r}, expected the width of each hidden layer, such as (64, 64)")
    return tuple(hidden)


@accelerated("algos.fast.towers:act", "f59a21aefa7c")
def act(observation: np.ndarray, tower: nn.Module) -> Tensor:
    """Output of a tower for a step in the environment: float32 ``[N, size]`` to ``[N, outputs]``, no gradient."""
    weight = next(tower.parameters())
    with torch.no_grad():
        return tower(torch.from_numpy(observation).to(weight.device))


@accelerated("algos.fast.towers:value", "118540aef0c4")
def value(observation: Tensor, tower: nn.Module) -> Tensor:
    """Output of a tower: ``[*, size]`` to ``[*, outputs]``; differentiable."""
    return tower(observation)


@accelerated("algos.fast.towers:actor_and_critic", "faa3aaf65897")
def actor_and_critic(observation: Tensor, actor: nn.Module, critic: nn.Module) -> tuple[Tensor, Tensor]:
    """Outputs of two towers: ``[*, size]`` to ``[*, outputs]`` each, differentiable any number of times."""
    return actor(observation), critic(observation)
