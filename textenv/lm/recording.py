"""A function of tensors recorded once, and replayed without the Python around its operations.

A small model spends half of a decoding step in modules, configurations and caches. What they do to tensors is the same
at every step, so `torch.fx` writes it down at one of them.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

logger = logging.getLogger(__name__)
Function = Callable[..., Tensor]
RECORDED_AFTER = 512
"""Calls before one is recorded: recording has its price, about that of so many."""


class Replayed:
    """A function that is recorded after a while, and called as it is wherever the recording would not do.

    A recording is compared with the function when it is made, at a second value of each size, for it may have taken
    the first for a constant, and whenever a size has doubled: a model may do something else with longer texts. Where a
    size is 1 or two are equal the function itself is called: to a recording these are no examples of other sizes.

    Args:
        function: see `record`.
        model: whose forward it is, for a recording to be dropped when that has other weights or takes another way.
    """

    def __init__(self, function: Function, *, model: nn.Module) -> None:
        self.function, self.model, self.name = function, model, type(model).__name__
        self.recording: Function | None = None
        self._recordable, self._calls = True, 0
        self._compared: list[set[int]] = []
        """Of each size, the values at which recording and function agreed."""
        self._recorded_of: tuple[list[Tensor], list[Any]] = [], []

    def __call__(self, *inputs: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """What the function gives.

        Args:
            inputs: its arguments.
            sizes: whatever of their shapes changes from call to call, and constants that these are not to be taken for.
        """
        if 1 in sizes or len(set(sizes)) < len(sizes):
            return self.function(*inputs)
        if self.recording is not None and self._agrees_at(sizes):
            return self.recording(*inputs)
        plain = self.function(*inputs)
        self._calls += 1
        if self.recording is not None:
            self._compare(self.recording, plain, inputs)
        elif self._recordable and self._calls > RECORDED_AFTER:
            self._recorded_of, self._compared = _state(self.model), [set() for _ in sizes]
            self._compare(None, plain, inputs)
        if self.recording is not None:
            for values, size in zip(self._compared, sizes, strict=True):
                values.add(size)
        return plain

    def forget_replaced(self) -> None:
        """Drop a recording of weights that are not the model's any more, or of switches that were turned since."""
        if self.recording is None:
            return
        (before, switches), (now, switches_now) = self._recorded_of, _state(self.model)
        if switches != switches_now or len(now) != len(before) or any(map(operator.is_not, now, before)):
            self.forget()

    def forget(self) -> None:
        """Begin to count calls again, without a recording."""
        self.recording, self._calls = None, 0

    def _agrees_at(self, sizes: tuple[int, ...]) -> bool:
        for values, size in zip(self._compared, sizes, strict=True):
            if size not in values:
                bits = size.bit_length()
                if len(values) == 1 or all(value.bit_length() != bits for value in values):
                    return False
        return True

    def _compare(self, made: Function | None, plain: Tensor, inputs: tuple[Tensor, ...]) -> None:
        """Keep a recording, by default one of this call, if it agrees with what the function gave."""
        self.recording, reason = made, ""
        try:
            self.recording = record(self.function, *inputs) if made is None else made
            gap = (self.recording(*inputs) - plain).abs().max().item()
            if gap > 1e-4 * max(1.0, plain.abs().max().item()):
                reason = f"it gives other logits, by up to {gap:.3g}"
        except Exception as error:  # torch.fx raises whatever it stumbles over, and so may a recording
            reason = str(error)
        if reason:
            logger.info("%s decodes without a recording: %s", self.name, reason)
            self.recording, self._recordable = None, False


def _state(model: nn.Module) -> tuple[list[Tensor], list[Any]]:
    """Its weights, and what else decides what its modules do: modes, names (such as of adapters), hooks."""
    switches: list[Any] = []
    for module in model.modules():
        switches += [module.__dict__.get("forward"), *module._forward_hooks, *module._forward_pre_hooks]
        for value in module.__dict__.values():
            if isinstance(value, (bool, str)):
                switches.append(value)
            elif isinstance(value, list) and all(isinstance(x, str) for x in value):
                switches.append(tuple(value))
    return [*model.parameters(), *model.buffers()], switches


def record(function: Function, *examples: Tensor) -> Function:
    """The function's operations on tensors, without its Python.

    Args:
        function: of tensors, to a tensor. What it reads beside its arguments (weights) is held as it is, so later
            changes inside those tensors count; what it writes into them is written again.
        examples: arguments, of whatever sizes. Another size may take the place of any that is above 1, unless the
            function has made a number of it (``len``, ``int``): see whether the result is right.

    Returns:
        A function of the same arguments, without a gradient.

    Raises:
        Exception: whatever `torch.fx` makes of a function that looks at values of tensors to decide what to do.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    def plain(*arguments: Tensor) -> Tensor:  # of a method torch.fx would count self as an argument
        return function(*arguments)

    with torch.no_grad():
        module = make_fx(plain, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    # Before the targets change: of an overload torch.fx knows that it writes into its arguments.
    module.graph.eliminate_dead_code()
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.target = _python_binding(node.target)
    held = _lift(module.graph, module)
    module.recompile()
    forward = module.forward
    return lambda *arguments: forward(*held, *arguments)


def _python_binding(operation: torch._ops.OpOverload) -> Callable[..., Any]:
    """The same operation by torch's Python binding, which is called in half the time; itself where there is none."""
    name = operation._schema.name.removeprefix("aten::")
    for home, kind in (
        (torch, BuiltinFunctionType),
        (torch._C._nn, BuiltinFunctionType),
        (torch.Tensor, MethodDescriptorType),
    ):
        binding = getattr(home, name, None)
        if isinstance(binding, kind):
            return binding
    return operation


def _lift(graph: Graph, module: GraphModule) -> list[Tensor]:
    """Make arguments of what is read from the module at every call: an attribute of a module is slow to find."""
    first = next(iter(graph.nodes))
    arguments: dict[str, Node] = {}
    held: list[Tensor] = []
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in arguments:
            with graph.inserting_before(first):
                arguments[node.target] = graph.placeholder(f"held_{len(held)}")
            held.append(getattr(module, node.target))
        node.replace_all_uses_with(arguments[node.target])
        graph.erase_node(node)
    return held
