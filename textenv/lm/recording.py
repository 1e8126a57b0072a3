"""Recording of a function's tensor operations by `torch.fx`, to replay them without Python overhead.

A small model spends much of a decoding step in Python code of modules, configurations and caches. The tensor operations
are the same at every step, so it is enough to record them once.
"""

import logging
import operator
from collections.abc import Callable
from types import BuiltinFunctionType, MethodDescriptorType

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from textenv.acceleration import FAST

logger = logging.getLogger(__name__)
Function = Callable[..., Tensor]
ModelState = tuple[list[Tensor | None], list[object]]
"""A model's weights and settings; see `state_of`."""
RECORDED_AFTER = 512
"""Number of calls before one is recorded: a recording costs about as much as these calls."""


class RecordedStep:
    """Function that is recorded after some calls, and called directly where the recording is not valid.

    A recording is compared with the function in three cases: when it is made; at a second value of each size, because
    the recording may hold the first value as a constant; at each new power of two, because a model may compute longer
    texts differently. If a size is 1 or two sizes are equal, the function is always called, because a recording at such
    sizes does not hold for others.

    Args:
        function: see `record`.
        model: model that the function runs; see `forget_replaced` for replaced weights or settings.
    """

    def __init__(self, function: Function, *, model: nn.Module) -> None:
        self.function = function
        self.model = model
        self.model_name = type(model).__name__
        self.recording: Function | None = None
        """None until the function is recorded, and after a recording was dropped."""
        self.recordable = FAST
        """False if the function is never to be recorded (again)."""
        self.calls = 0
        """Number of calls of the function itself."""
        self._compared: list[set[int]] = []
        """For each size, the values at which recording and function agreed."""
        self._recorded_state: ModelState = ([], [])
        """The model's state when the recording was made."""

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

        # Call the function, and compare or make the recording
        result = self.function(*inputs)
        self.calls += 1
        if self.recording is not None:
            self._compare(self.recording, result, inputs)
        elif self.recordable and self.calls > RECORDED_AFTER:
            self._recorded_state = state_of(self.model)
            self._compared = [set() for _ in sizes]
            self._compare(None, result, inputs)

        # The recording is valid at these sizes
        if self.recording is not None:
            for values, size in zip(self._compared, sizes, strict=True):
                values.add(size)
        return result

    def forget_replaced(self, state: ModelState) -> None:
        """Drop the recording if the model's state, which is given, is another one than when it was made."""
        if self.recording is not None and is_replaced(self._recorded_state, state):
            self.forget()

    def forget(self) -> None:
        """Drop the recording and count calls from 0 again."""
        self.recording = None
        self.calls = 0

    def _agrees_at(self, sizes: tuple[int, ...]) -> bool:
        """Return True if the recording need not be compared at these sizes; see the class."""
        for values, size in zip(self._compared, sizes, strict=True):
            if size in values:
                continue
            bits = size.bit_length()
            if len(values) == 1 or all(value.bit_length() != bits for value in values):
                return False
        return True

    def _compare(self, recording: Function | None, result: Tensor, inputs: tuple[Tensor, ...]) -> None:
        """Keep a recording (None: make one of this call) if it agrees with the function's result; else drop it."""
        reason = ""
        try:
            if recording is None:
                recording = record(self.function, *inputs)
            gap = (recording(*inputs) - result).abs().max().item()
            if gap > 1e-4 * max(1.0, result.abs().max().item()):
                reason = f"its logits differ by up to {gap:.3g}"
        except Exception as error:  # torch.fx and recordings may raise anything
            reason = str(error)

        if not reason:
            self.recording = recording
            return
        logger.info("%s decodes without a recording: %s", self.model_name, reason)
        self.recording = None
        self.recordable = False


def state_of(model: nn.Module) -> ModelState:
    """Return the model's weights, and the settings that decide what its modules compute.

    Settings are modes, names (such as those of adapters), hooks, and the functions `forward`.
    """
    weights: list[Tensor | None] = []
    settings: list[object] = []
    for module in model.modules():
        weights += [*module._parameters.values(), *module._buffers.values()]
        settings += [module.__dict__.get("forward"), type(module).forward]
        settings += [*module._forward_hooks, *module._forward_pre_hooks]
        for value in module.__dict__.values():
            if isinstance(value, (bool, str)):
                settings.append(value)
            elif isinstance(value, list) and all(isinstance(x, str) for x in value):
                settings.append(tuple(value))
    return weights, settings


def is_replaced(former: ModelState, present: ModelState) -> bool:
    """Return True if a model's weight tensors or settings (`state_of`) are others than they were."""
    former_weights, former_settings = former
    weights, settings = present
    if len(weights) != len(former_weights) or any(map(operator.is_not, weights, former_weights)):
        return True
    return settings != former_settings


def record(function: Function, *examples: Tensor) -> Function:
    """Record the function's tensor operations, without its Python code.

    Args:
        function: function from tensors to a tensor. The recording refers to other tensors that the function reads
            (weights), so later changes inside them count; in-place writes to them are repeated.
        examples: arguments of any sizes. Later calls may have other sizes where these exceed 1, unless the function
            turned a size into a number (``len``, ``int``): check the results.

    Returns:
        A function of the same arguments, without a gradient.

    Raises:
        Exception: any error of `torch.fx`, for a function whose control flow depends on tensor values.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    def plain_function(*arguments: Tensor) -> Tensor:  # for a method, torch.fx would count self as an argument
        return function(*arguments)

    # Record, without the log of an error, which is also raised
    fake_tensor_logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = fake_tensor_logger.level
    fake_tensor_logger.setLevel(logging.CRITICAL)
    try:
        with torch.no_grad():
            tracer = make_fx(plain_function, tracing_mode="symbolic", _allow_non_fake_inputs=True)
            module = tracer(*examples)
    finally:
        fake_tensor_logger.setLevel(level)

    # Drop operations without effect, before the targets change: torch.fx recognizes in-place ones only as overloads.
    module.graph.eliminate_dead_code()
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)

    # Faster calls
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.target = _python_binding(node.target)
    held_tensors = _lift_attributes(module.graph, module)
    module.recompile()
    forward = module.forward
    return lambda *arguments: forward(*held_tensors, *arguments)


def _python_binding(operation: torch._ops.OpOverload) -> Callable[..., object]:
    """Return the operation as torch's Python binding, which is faster to call; itself if there is none."""
    name = operation._schema.name.removeprefix("aten::")
    namespaces: list[tuple[object, type[BuiltinFunctionType] | type[MethodDescriptorType]]] = [
        (torch, BuiltinFunctionType),
        (torch._C._nn, BuiltinFunctionType),
        (torch.Tensor, MethodDescriptorType),
    ]
    for namespace, binding_type in namespaces:
        binding = getattr(namespace, name, None)
        if isinstance(binding, binding_type):
            return binding
    return operation


def _lift_attributes(graph: Graph, module: GraphModule) -> list[Tensor]:
    """Turn attributes of a module into the first arguments of its graph, and return their values.

    The graph reads attributes at every call, and attribute look-up on a module is slow.
    """
    first_node = next(iter(graph.nodes))
    arguments: dict[str, Node] = {}
    held_tensors: list[Tensor] = []
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in arguments:
            with graph.inserting_before(first_node):
                arguments[node.target] = graph.placeholder(f"held_{len(held_tensors)}")
            held_tensors.append(getattr(module, node.target))
        node.replace_all_uses_with(arguments[node.target])
        graph.erase_node(node)
    return held_tensors
