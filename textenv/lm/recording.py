"""Recording of a function's tensor operations by `torch.fx`, to replay them without Python overhead.

A small model spends much of a decoding step in Python code of modules, configurations and caches. The tensor operations
are the same at every step, so it is enough to record them once.
"""

import logging
import operator
from collections.abc import Callable
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from textenv.acceleration import FAST

logger = logging.getLogger(__name__)
Function = Callable[..., Tensor]
RECORDED_AFTER = 512
"""Number of calls before one is recorded: a recording costs about as much as these calls."""


class RecordedStep:
    """Function that is recorded after some calls, and called directly where the recording is not valid.

    A recording is compared with the function when made; at a second value of each size, because the recording may
    hold the first as a constant; and at each new power of two, because a model may compute longer texts differently. If
    a size is 1 or two sizes are equal, the function is called, because recordings do not generalize there.

    Args:
        function: see `record`.
        model: model that the function runs; see `forget_replaced` for replaced weights or settings.
    """

    def __init__(self, function: Function, *, model: nn.Module) -> None:
        self.function, self.model, self.name = function, model, type(model).__name__
        self.recording: Function | None = None
        self.recordable, self.calls = FAST, 0
        self._compared: list[set[int]] = []
        """For each size, the values at which recording and function agreed."""
        self._recorded_of: tuple[list[Tensor], list[Any]] = [], []

    def __call__(self, *inputs: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return the function's result.

        Args:
            inputs: arguments of the function.
            sizes: dimensions that change from call to call, and constants that a recording might confuse with them.
        """
        if 1 in sizes or len(set(sizes)) < len(sizes):
            return self.function(*inputs)
        if self.recording is not None and self._agrees_at(sizes):
            return self.recording(*inputs)
        plain = self.function(*inputs)
        self.calls += 1
        if self.recording is not None:
            self._compare(self.recording, plain, inputs)
        elif self.recordable and self.calls > RECORDED_AFTER:
            self._recorded_of, self._compared = _state(self.model), [set() for _ in sizes]
            self._compare(None, plain, inputs)
        if self.recording is not None:
            for values, size in zip(self._compared, sizes, strict=True):
                values.add(size)
        return plain

    def forget_replaced(self) -> None:
        """Drop the recording if the model's weight tensors or settings (`_state`) have been replaced since."""
        if self.recording is None:
            return
        (before, switches), (now, switches_now) = self._recorded_of, _state(self.model)
        if switches != switches_now or len(now) != len(before) or any(map(operator.is_not, now, before)):
            self.forget()

    def forget(self) -> None:
        """Drop the recording and count calls from 0 again."""
        self.recording, self.calls = None, 0

    def _agrees_at(self, sizes: tuple[int, ...]) -> bool:
        for values, size in zip(self._compared, sizes, strict=True):
            if size not in values:
                bits = size.bit_length()
                if len(values) == 1 or all(value.bit_length() != bits for value in values):
                    return False
        return True

    def _compare(self, made: Function | None, plain: Tensor, inputs: tuple[Tensor, ...]) -> None:
        """Keep a recording (if ``made`` is None, a new one of this call) if it agrees with the function's result."""
        self.recording, reason = made, ""
        try:
            self.recording = record(self.function, *inputs) if made is None else made
            gap = (self.recording(*inputs) - plain).abs().max().item()
            if gap > 1e-4 * max(1.0, plain.abs().max().item()):
                reason = f"its logits differ by up to {gap:.3g}"
        except Exception as error:  # torch.fx and recordings may raise anything
            reason = str(error)
        if reason:
            logger.info("%s decodes without a recording: %s", self.name, reason)
            self.recording, self.recordable = None, False


def _state(model: nn.Module) -> tuple[list[Tensor], list[Any]]:
    """Return the model's weights and what its modules compute: modes, names (such as of adapters), hooks, `forward`."""
    switches: list[Any] = []
    for module in model.modules():
        switches += [module.__dict__.get("forward"), type(module).forward]
        switches += [*module._forward_hooks, *module._forward_pre_hooks]
        for value in module.__dict__.values():
            if isinstance(value, (bool, str)):
                switches.append(value)
            elif isinstance(value, list) and all(isinstance(x, str) for x in value):
                switches.append(tuple(value))
    return [*model.parameters(), *model.buffers()], switches


def record(function: Function, *examples: Tensor) -> Function:
    """Record the function's tensor operations, without its Python code.

    Args:
        function: function from tensors to a tensor. Other tensors that it reads (weights) are held by reference, so
            later changes inside them count; the function's in-place writes to them are repeated.
        examples: arguments of any sizes. Later calls may have other sizes where these exceed 1, unless the function
            turned a size into a number (``len``, ``int``): check the results.

    Returns:
        A function of the same arguments, without a gradient.

    Raises:
        Exception: any error of `torch.fx`, for a function whose control flow depends on tensor values.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    def plain(*arguments: Tensor) -> Tensor:  # for a method, torch.fx would count self as an argument
        return function(*arguments)

    complaints = logging.getLogger("torch._subclasses.fake_tensor")  # a traceback of an error that is also raised
    level = complaints.level
    complaints.setLevel(logging.CRITICAL)
    try:
        with torch.no_grad():
            module = make_fx(plain, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    finally:
        complaints.setLevel(level)
    # Before the targets change, because torch.fx recognizes in-place operations only as overloads.
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
    """Return the operation as torch's Python binding, which is faster to call; itself if there is none."""
    name = operation._schema.name.removeprefix("aten::")
    homes = (torch, BuiltinFunctionType), (torch._C._nn, BuiltinFunctionType), (torch.Tensor, MethodDescriptorType)
    for home, kind in homes:
        binding = getattr(home, name, None)
        if isinstance(binding, kind):
            return binding
    return operation


def _lift(graph: Graph, module: GraphModule) -> list[Tensor]:
    """Turn module attributes, read at every call, into arguments: attribute look-up on a module is slow."""
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
