"""Fast equivalents of `algos.policies.towers` for tanh; two towers of equal hidden widths are one batched product.

Small networks spend their time in many small operations and in tanh itself. So two towers that read the same
observation share every product and every tanh, their gradient is written by hand, and tanh x is computed as
2 σ(2x) - 1, because `torch.sigmoid` is faster than `torch.tanh` on a CPU. To act on a few rows, NumPy evaluates a
single tower, because its calls have less overhead than torch's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import contains
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

Plain = Callable[..., Any]
# A Python number would be converted to a tensor at every use, which costs more than the sum.
_MINUS_ONE = torch.tensor(-1.0, dtype=torch.float32, device="cpu")
LARGEST_WEIGHT, LARGEST_PRODUCT = 2**13, 2**18
"""Limits (elements of a matrix, multiplications of a product) up to which NumPy's BLAS uses one thread."""


@dataclass
class _Layers:
    """Cached structure of a tower; finding it takes as long as evaluating a layer."""

    modules: tuple[nn.Module | None, ...]
    """Modules of the tower when it was inspected."""
    linear: tuple[nn.Linear, ...]
    """Its linear layers; empty if it is not a tower."""
    hooks: tuple[dict[int, Any], ...]
    """Hooks of the tower and its modules, as they are now: the dictionaries are the modules' own."""
    attributes: tuple[dict[str, Any], ...]
    """Attributes of the tower and its modules, as they are now."""
    places: list[Any] = field(default_factory=list)
    """Memory address, shape and strides of the weights that `arrays` reads."""
    arrays: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Transposed weight and bias of each linear layer, as views of the parameters; empty unless all are small float32
    tensors on the CPU."""
    rows: int = 0
    """Maximum number of rows for NumPy."""


_SEEN: WeakKeyDictionary[nn.Module, _Layers] = WeakKeyDictionary()


def act(plain: Plain, observation: np.ndarray, tower: nn.Module) -> Tensor:
    """Output of a tower, without a gradient; NumPy evaluates small batches.

    Args:
        plain: plain equivalent, for other batches and modules.
        observation: float32 ``[*, size]``.
        tower: linear layers with tanh between them.

    Returns:
        ``[*, outputs]``.
    """
    layers = _look_at(tower)
    if observation.ndim == 2:
        arrays = _arrays(layers, len(observation))
        if arrays:
            return torch.from_numpy(_array_output(observation, arrays))
    if not layers.linear:
        return plain(observation, tower)
    weight = layers.linear[0].weight
    return _torch_output(torch.from_numpy(observation).to(weight.device), layers.linear)


def value(plain: Plain, observation: Tensor, tower: nn.Module) -> Tensor:
    """Output of a tower, without a gradient, by torch: ``[*, size]`` to ``[*, outputs]``, any dtype and device."""
    linear = _look_at(tower).linear
    if not linear:
        return plain(observation, tower)
    return _torch_output(observation, linear)


@torch.no_grad()
def _torch_output(x: Tensor, linear: Sequence[nn.Linear]) -> Tensor:
    """Output of linear layers with tanh between them, without a gradient."""
    for layer in linear[:-1]:
        x = tanh(F.linear(x, layer.weight, layer.bias))
    return F.linear(x, linear[-1].weight, linear[-1].bias)


def both(plain: Plain, observation: Tensor, first: nn.Module, second: nn.Module) -> tuple[Tensor, Tensor]:
    """Outputs of two towers ``[*, size]`` to ``[*, outputs]``; differentiable any number of times.

    Args:
        plain: plain equivalent, for other modules and for towers of different widths.
        observation: ``[*, size]``.
        first: linear layers with tanh between them.
        second: the same, except for the number of outputs.
    """
    one, two = _weights(first), _weights(second)
    if not one or [w.shape for w, _ in one[:-1]] != [w.shape for w, _ in two[:-1]]:
        return plain(observation, first, second)
    x = observation.reshape(-1, observation.shape[-1])
    weights = [p for (w1, b1), (w2, b2) in zip(one, two, strict=True) for p in (w1, w2, b1, b2)]
    outputs = _TwinTowers.apply(x, *weights)
    output, other = (output.view(*observation.shape[:-1], output.shape[-1]) for output in outputs)
    return output, other


def _plain_towers(observation: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    """Two towers by autograd, layer by layer.

    Args:
        observation: ``[n, size]``.
        weights: for each layer, weight of the first tower, weight of the second, and the two biases.
    """
    one = two = observation
    for start in range(0, len(weights), 4):
        weight_1, weight_2, bias_1, bias_2 = weights[start : start + 4]
        if start:
            one, two = one.tanh(), two.tanh()
        one, two = F.linear(one, weight_1, bias_1), F.linear(two, weight_2, bias_2)
    return one, two


class _TwinTowers(torch.autograd.Function):
    """Equivalent of `_plain_towers` with a hand-written gradient."""

    @staticmethod
    def forward(ctx: Any, observation: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        x = observation.expand(2, *observation.shape)
        layers = []  # inputs [2, n, before] and weights [2, after, before] of each hidden layer
        for start in range(0, len(weights) - 4, 4):
            weight, bias = torch.stack(weights[start : start + 2]), torch.stack(weights[start + 2 : start + 4])
            layers.append((x, weight))
            x = tanh(torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2)))
        weight_1, weight_2, bias_1, bias_2 = weights[-4:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(observation, *weights)
        ctx.layers, ctx.features = layers, x
        return torch.addmm(bias_1, x[0], weight_1.t()), torch.addmm(bias_2, x[1], weight_2.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, one, two = ctx.saved_tensors, *gradients
        # Use autograd if this gradient may be differentiated again, or if one tower gets no gradient.
        if torch.is_grad_enabled() or one is None or two is None:
            return _plain_gradient(inputs, gradients, ctx.needs_input_grad)
        x = ctx.features
        found = [one.t() @ x[0], two.t() @ x[1], one.sum(0), two.sum(0)]
        slope = torch.stack((one @ inputs[-4], two @ inputs[-3]))
        for before, weight in reversed(ctx.layers):
            torch.ops.aten.tanh_backward.grad_input(slope, x, grad_input=slope)
            found = [*torch.bmm(slope.transpose(1, 2), before).unbind(), *slope.sum(1).unbind(), *found]
            x = before
            if before is not ctx.layers[0][0] or ctx.needs_input_grad[0]:
                slope = torch.bmm(slope, weight)
        return slope.sum(0) if ctx.needs_input_grad[0] else None, *found


def _plain_gradient(
    inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradient by autograd, with a new forward pass; None for inputs without a gradient."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        outputs = _plain_towers(*inputs)
    asked = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    chosen = [x for x, need in zip(inputs, needed, strict=True) if need]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in asked], chosen, [gradient for _, gradient in asked],
            create_graph=again, allow_unused=True,
        )
    )  # fmt: skip
    return tuple(next(found) if need else None for need in needed)


def _weights(tower: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each linear layer of a tower; empty for any other module."""
    return [(x._parameters["weight"], x._parameters["bias"]) for x in _look_at(tower).linear]  # type: ignore[misc]


_NOT_A_TOWER = _Layers(modules=(), linear=(), hooks=(), attributes=())


def _look_at(tower: nn.Module) -> _Layers:
    """Structure of a tower; without layers if it is none, or if a hook or another `forward` changes what it does."""
    modules = tuple(tower._modules.values())
    layers = _SEEN.get(tower)
    if layers is None or layers.modules != modules:
        everything = [tower, *(module for module in modules if module is not None)]
        layers = _SEEN[tower] = _Layers(
            modules=modules,
            linear=_linear_layers(tower, nn.Tanh),
            hooks=tuple(hooks for module in everything for hooks in _hooks_of(module)),
            attributes=tuple(module.__dict__ for module in everything),
        )
    if any(layers.hooks) or _has_any_global_hook() or any(map(contains, layers.attributes, repeat("forward"))):
        return _NOT_A_TOWER
    return layers


def _hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)


def _arrays(seen: _Layers, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Views of the weights for NumPy, renewed if the weights moved in memory; empty if NumPy's limit is exceeded."""
    weights: list[Any] = [layer._parameters[name] for layer in seen.linear for name in ("weight", "bias")]
    places = [x if x is None else (x.data_ptr(), x.shape, x.stride()) for x in weights]
    if places != seen.places:
        seen.places, seen.arrays = places, []
        if all(x is not None and x.is_cpu and x.dtype is torch.float32 for x in weights):
            largest = max(x.numel() for x in weights)
            seen.rows = LARGEST_PRODUCT // largest
            if largest <= LARGEST_WEIGHT:
                views = iter([x.detach().numpy() for x in weights])
                seen.arrays = [(weight.T, bias) for weight, bias in zip(views, views, strict=True)]
    return seen.arrays if rows <= seen.rows else []


def _array_output(x: np.ndarray, layers: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
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
    """Linear layers of a tower with this activation between them.

    Empty for any other module, and if a hook or another `forward` changes what the tower or one of its modules does.
    """
    if _has_any_global_hook():
        return ()
    for module in tower.modules():
        if any(_hooks_of(module)) or "forward" in module.__dict__:
            return ()
    return _linear_layers(tower, activation)


def _linear_layers(tower: nn.Module, activation: type[nn.Module]) -> tuple[nn.Linear, ...]:
    """Like `linear_layers`, by the types of the modules alone."""
    if type(tower) is not nn.Sequential:
        return ()
    layers = tuple(tower._modules.values())
    linear = tuple(layer for layer in layers[::2] if type(layer) is nn.Linear and layer.bias is not None)
    activations = layers[1::2]
    alternate = len(linear) == len(activations) + 1 and len(layers) == len(linear) + len(activations)
    if not alternate or any(type(layer) is not activation for layer in activations):
        return ()
    return linear


def tanh(x: Tensor) -> Tensor:
    """tanh x, in place."""
    if x.numel() < 2048:  # here the three operations cost more than they save
        return x.tanh_()
    return torch.add(_MINUS_ONE, x.add_(x).sigmoid_(), alpha=2, out=x)
