"""Fast equivalents of `algos.policies.towers` for tanh; two towers of equal hidden widths are one batched product.

Small networks spend their time in many small operations and in tanh itself. So two towers that read the same
observation share every product and every tanh, and their gradient is written by hand. tanh x is computed as
2 σ(2x) - 1, because `torch.sigmoid` is faster than `torch.tanh` on a CPU. To act on a few rows, NumPy evaluates a
single tower, because NumPy's calls have less overhead than torch's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import contains
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

PlainAct = Callable[[np.ndarray, nn.Module], Tensor]
PlainValue = Callable[[Tensor, nn.Module], Tensor]
PlainPair = Callable[[Tensor, nn.Module, nn.Module], tuple[Tensor, Tensor]]
# A Python number would be converted to a tensor at every use, which costs more than the sum.
_MINUS_ONE = torch.tensor(-1.0, dtype=torch.float32, device="cpu")
LARGEST_WEIGHT = 2**13
"""Maximum number of elements of a weight that NumPy multiplies by; up to here its BLAS uses one thread."""
LARGEST_PRODUCT = 2**18
"""Maximum number of multiplications of a product that NumPy computes; up to here its BLAS uses one thread."""
MIN_SIGMOID_ELEMENTS = 2048
"""Minimum number of elements for tanh by sigmoid; below, three operations cost more than they save."""


@dataclass
class _Structure:
    """Cached structure of a tower; finding it takes as long as evaluating a layer."""

    modules: tuple[nn.Module | None, ...]
    """Modules of the tower when it was inspected."""
    linear: tuple[nn.Linear, ...]
    """Linear layers; empty if the module is not a tower."""
    hooks: tuple[Mapping[int, object], ...]
    """Hooks of the tower and its modules: the modules' own dictionaries, so they are always up to date."""
    attributes: tuple[dict[str, object], ...]
    """Attributes of the tower and its modules: the modules' own dictionaries, too."""
    memory: list[object] = field(default_factory=list)
    """Memory address, shape and strides of the weights that `arrays` reads."""
    arrays: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Transposed weight and bias of each linear layer, as views of the parameters; empty unless all are small float32
    tensors on the CPU."""
    max_rows: int = 0
    """Maximum number of rows for NumPy."""


_STRUCTURES: WeakKeyDictionary[nn.Module, _Structure] = WeakKeyDictionary()
_NOT_A_TOWER = _Structure(modules=(), linear=(), hooks=(), attributes=())


def act(plain: PlainAct, observation: np.ndarray, tower: nn.Module) -> Tensor:
    """Output of a tower, without a gradient; NumPy evaluates small batches.

    Args:
        plain: plain equivalent, for other batches and modules.
        observation: float32 ``[*, size]``.
        tower: linear layers with tanh between them.

    Returns:
        ``[*, outputs]``.
    """
    structure = _structure_of(tower)
    if observation.ndim == 2:
        arrays = _arrays_of(structure, len(observation))
        if arrays:
            return torch.from_numpy(_numpy_output(observation, arrays))
    if not structure.linear:
        return plain(observation, tower)
    weight = structure.linear[0].weight
    return _torch_output(torch.from_numpy(observation).to(weight.device), structure.linear)


def value(plain: PlainValue, observation: Tensor, tower: nn.Module) -> Tensor:
    """Output of a tower by torch: ``[*, size]`` to ``[*, outputs]``, any dtype and device; plain if differentiated."""
    linear = _structure_of(tower).linear
    if not linear or torch.is_grad_enabled():
        return plain(observation, tower)
    return _torch_output(observation, linear)


@torch.no_grad()
def _torch_output(x: Tensor, linear: Sequence[nn.Linear]) -> Tensor:
    """Output of linear layers with tanh between them, without a gradient."""
    for layer in linear[:-1]:
        x = tanh(F.linear(x, layer.weight, layer.bias))
    return F.linear(x, linear[-1].weight, linear[-1].bias)


def actor_and_critic(
    plain: PlainPair, observation: Tensor, actor: nn.Module, critic: nn.Module
) -> tuple[Tensor, Tensor]:
    """Outputs of two towers ``[*, size]`` to ``[*, outputs]``; differentiable any number of times.

    Args:
        plain: plain equivalent, for other modules and for towers of different widths.
        observation: ``[*, size]``.
        actor: linear layers with tanh between them.
        critic: the same, except for the number of outputs.
    """
    actor_layers = _weights_and_biases(actor)
    critic_layers = _weights_and_biases(critic)
    hidden_shapes = [weight.shape for weight, _ in actor_layers[:-1]]
    if not actor_layers or hidden_shapes != [weight.shape for weight, _ in critic_layers[:-1]]:
        return plain(observation, actor, critic)

    # Both weights of each layer, then both biases, as `_TwinTowers` reads them
    weights: list[Tensor] = []
    for (actor_weight, actor_bias), (critic_weight, critic_bias) in zip(actor_layers, critic_layers, strict=True):
        weights += [actor_weight, critic_weight, actor_bias, critic_bias]

    # One batch dimension inside
    batch_shape = observation.shape[:-1]
    x = observation.reshape(-1, observation.shape[-1])
    actor_output, critic_output = _TwinTowers.apply(x, *weights)
    actor_output = actor_output.view(*batch_shape, actor_output.shape[-1])
    critic_output = critic_output.view(*batch_shape, critic_output.shape[-1])
    return actor_output, critic_output


def _plain_towers(observation: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of two towers by autograd, layer by layer.

    Args:
        observation: ``[n, size]``.
        weights: for each layer, weight of the actor, weight of the critic, and the two biases.
    """
    actor_output = observation
    critic_output = observation
    for start in range(0, len(weights), 4):
        actor_weight, critic_weight, actor_bias, critic_bias = weights[start : start + 4]
        if start:
            actor_output = actor_output.tanh()
            critic_output = critic_output.tanh()
        actor_output = F.linear(actor_output, actor_weight, actor_bias)
        critic_output = F.linear(critic_output, critic_weight, critic_bias)
    return actor_output, critic_output


class _Context(Protocol):
    """What `_TwinTowers` keeps from its output for its gradient."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    layers: list[tuple[Tensor, Tensor]]
    """Input ``[2, n, before]`` and weight ``[2, after, before]`` of each hidden layer."""
    features: Tensor
    """Output of the last hidden layer, ``[2, n, width]``."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors, which `saved_tensors` returns."""

    def set_materialize_grads(self, value: bool) -> None:
        """False: an output that nothing depends on has None as its slope."""


class _TwinTowers(torch.autograd.Function):
    """Equivalent of `_plain_towers` with a gradient written by hand."""

    @staticmethod
    def forward(ctx: _Context, observation: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        # Hidden layers: one batched product for both towers
        x = observation.expand(2, *observation.shape)
        layers = []
        for start in range(0, len(weights) - 4, 4):
            weight = torch.stack(weights[start : start + 2])
            bias = torch.stack(weights[start + 2 : start + 4])
            layers.append((x, weight))
            x = tanh(torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2)))

        # Output layers, which differ in size
        actor_weight, critic_weight, actor_bias, critic_bias = weights[-4:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(observation, *weights)
        ctx.layers = layers
        ctx.features = x
        actor_output = torch.addmm(actor_bias, x[0], actor_weight.t())
        critic_output = torch.addmm(critic_bias, x[1], critic_weight.t())
        return actor_output, critic_output

    @staticmethod
    def backward(ctx: _Context, *output_slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        actor_slope, critic_slope = output_slopes
        # Use autograd if this gradient may be differentiated again, or if one tower gets no gradient.
        if torch.is_grad_enabled() or actor_slope is None or critic_slope is None:
            return _plain_gradient(inputs, output_slopes, ctx.needs_input_grad)

        # Output layers
        x = ctx.features
        actor_weight = inputs[-4]
        critic_weight = inputs[-3]
        gradients = [actor_slope.t() @ x[0], critic_slope.t() @ x[1], actor_slope.sum(0), critic_slope.sum(0)]
        slope = torch.stack((actor_slope @ actor_weight, critic_slope @ critic_weight))

        # Hidden layers, the last first
        needs_observation = ctx.needs_input_grad[0]
        for number in reversed(range(len(ctx.layers))):
            layer_input, weight = ctx.layers[number]
            torch.ops.aten.tanh_backward.grad_input(slope, x, grad_input=slope)
            weight_gradients = torch.bmm(slope.transpose(1, 2), layer_input).unbind()
            gradients = [*weight_gradients, *slope.sum(1).unbind(), *gradients]
            x = layer_input
            if number or needs_observation:
                slope = torch.bmm(slope, weight)
        observation_gradient = None
        if needs_observation:
            observation_gradient = slope.sum(0)
        return observation_gradient, *gradients


def _plain_gradient(
    inputs: Sequence[Tensor], output_slopes: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradient by autograd, with a new forward pass; None for inputs without a gradient."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        outputs = _plain_towers(*inputs)

    # Only outputs that have a slope, and inputs that need a gradient
    outputs_with_slope = []
    slopes = []
    for output, slope in zip(outputs, output_slopes, strict=True):
        if slope is not None:
            outputs_with_slope.append(output)
            slopes.append(slope)
    inputs_with_gradient = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
    gradients = iter(
        torch.autograd.grad(
            outputs_with_slope, inputs_with_gradient, slopes, create_graph=create_graph, allow_unused=True
        )
    )
    return tuple(next(gradients) if is_needed else None for is_needed in needed)


def _weights_and_biases(tower: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each linear layer of a tower; empty for any other module."""
    linear = _structure_of(tower).linear
    return [(layer._parameters["weight"], layer._parameters["bias"]) for layer in linear]  # type: ignore[misc]


def _structure_of(tower: nn.Module) -> _Structure:
    """Structure of a tower; without layers if it is none, or if a hook or another `forward` changes what it does."""
    modules = tuple(tower._modules.values())
    structure = _STRUCTURES.get(tower)
    if structure is None or structure.modules != modules:
        structure = _inspect(tower, modules)
        _STRUCTURES[tower] = structure
    # By `map`, because this runs at every step of an environment
    has_forward = any(map(contains, structure.attributes, repeat("forward")))
    if has_forward or any(structure.hooks) or _has_any_global_hook():
        return _NOT_A_TOWER
    return structure


def _inspect(tower: nn.Module, modules: tuple[nn.Module | None, ...]) -> _Structure:
    """Make the structure of a tower with these modules."""
    tower_and_modules = [tower, *(module for module in modules if module is not None)]
    hooks: list[Mapping[int, object]] = []
    for module in tower_and_modules:
        hooks += _hooks_of(module)
    return _Structure(
        modules=modules,
        linear=_linear_layers(tower, nn.Tanh),
        hooks=tuple(hooks),
        attributes=tuple(module.__dict__ for module in tower_and_modules),
    )


def _hooks_of(module: nn.Module) -> tuple[Mapping[int, object], ...]:
    return (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)


def _arrays_of(structure: _Structure, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Views of the weights for NumPy, renewed if the weights moved in memory; empty for more rows than its limit."""
    weights: list[Any] = []  # tensors, or None for a parameter that was taken away
    for layer in structure.linear:
        weights += [layer._parameters["weight"], layer._parameters["bias"]]
    memory: list[object] = [x if x is None else (x.data_ptr(), x.shape, x.stride()) for x in weights]
    if memory != structure.memory:
        structure.memory = memory
        structure.arrays = []
        if all(x is not None and x.is_cpu and x.dtype is torch.float32 for x in weights):
            largest_weight = max(x.numel() for x in weights)
            structure.max_rows = LARGEST_PRODUCT // largest_weight
            if largest_weight <= LARGEST_WEIGHT:
                views = [x.detach().numpy() for x in weights]
                structure.arrays = [(weight.T, bias) for weight, bias in zip(views[::2], views[1::2], strict=True)]
    if rows > structure.max_rows:
        return []
    return structure.arrays


def _numpy_output(x: np.ndarray, layers: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Output ``[N, outputs]`` of layers with tanh between them, from transposed weights and biases."""
    with np.errstate(all="ignore"):  # torch does not warn either
        for weight, bias in layers[:-1]:
            x = x @ weight
            x += bias
            np.tanh(x, out=x)
        weight, bias = layers[-1]
        x = x @ weight
        x += bias
    return x


def linear_layers(tower: nn.Module, activation: type[nn.Module]) -> tuple[nn.Linear, ...]:
    """Linear layers of a tower with this activation between them; empty for any other module.

    A module is no tower, either, if a hook or another `forward` changes what it or one of its modules does.
    """
    if any(map(has_hooks_or_own_forward, tower.modules())):
        return ()
    return _linear_layers(tower, activation)


def has_hooks_or_own_forward(module: nn.Module) -> bool:
    """Whether a hook, or a `forward` that was set on the object, changes what a module does."""
    return any(_hooks_of(module)) or "forward" in module.__dict__ or _has_any_global_hook()


def _linear_layers(tower: nn.Module, activation: type[nn.Module]) -> tuple[nn.Linear, ...]:
    """Like `linear_layers`, by the types of the modules alone."""
    if type(tower) is not nn.Sequential:
        return ()
    modules = tuple(tower._modules.values())
    linear = tuple(module for module in modules[::2] if type(module) is nn.Linear and module.bias is not None)
    activations = modules[1::2]
    alternate = len(linear) == len(activations) + 1 and len(modules) == len(linear) + len(activations)
    if not alternate or any(type(module) is not activation for module in activations):
        return ()
    return linear


def tanh(x: Tensor) -> Tensor:
    """Compute tanh x = 2 σ(2x) - 1, in place."""
    if x.numel() < MIN_SIGMOID_ELEMENTS:
        return x.tanh_()
    return torch.add(_MINUS_ONE, x.add_(x).sigmoid_(), alpha=2, out=x)
