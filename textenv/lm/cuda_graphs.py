"""Steps on CUDA as graphs: the kernels of a step are launched at once, instead of one by one from Python.

A decoding step has hundreds of short kernels, and launching them takes longer than they run. A graph
(`torch.cuda.CUDAGraph`) repeats the kernels of one call, on the same memory and at the same sizes. So a function is
captured at each of its sizes, and the number of keys, which grows with every token, is rounded up (`rounded_up`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from textenv.acceleration import FAST
from textenv.lm.recording import ModelState, is_replaced, state_of
from textenv.rollout import rounding_tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
CAPTURED_AFTER = 4
"""Number of calls at the same sizes before these are captured."""
SMALLEST_STEP = 64
"""Numbers of keys are rounded up to multiples of this, and longer texts to coarser steps; see `rounded_up`."""


def rounded_up(width: int) -> int:
    """Round up a number of keys: to a multiple of 64, or of a quarter of the greatest power of two in it if greater.

    A text of any length then has few widths, and the keys that are read in vain are at most a quarter, but for short
    texts.
    """
    step = max(SMALLEST_STEP, 2 ** (width.bit_length() - 3))
    return -(-width // step) * step


class GraphedStep:
    """Function of tensors on CUDA that is captured after some calls at the same sizes, and then replayed.

    A graph is compared with the function when it is captured. A function that cannot be captured, because it waits for
    a number from the device, is always called.

    Args:
        function: function from tensors to a tensor, which always has the same shape; a second call with the same
            arguments must change nothing.
        model: model that the function runs; see `forget_replaced` for replaced weights or settings.
    """

    def __init__(self, function: Callable[..., Tensor], *, model: PreTrainedModel) -> None:
        self.function = function
        self.model = model
        self.recordable = FAST
        """False if the function is never to be captured (again)."""
        self.calls: Counter[tuple[int, ...]] = Counter()
        """Number of calls of the function itself, by sizes."""
        self.graphs: dict[tuple[int, ...], _Graph] = {}
        """By sizes."""
        self._pool: Any = None
        """Memory of the first graph, which all others use too: none runs while another does."""
        self._result: Tensor | None = None
        """Where all graphs write their result."""
        self._captured_state: ModelState = ([], [])
        """The model's state when the first graph was captured."""

    def __call__(self, *inputs: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return the function's result.

        Args:
            inputs: arguments of the function.
            sizes: dimensions that change from call to call.
        """
        graph = self.graphs.get(sizes)
        if graph is not None:
            return graph.replay(inputs)
        result = self.function(*inputs)
        self.calls[sizes] += 1
        if self.recordable and self.calls[sizes] > CAPTURED_AFTER:
            self._capture(inputs, result, sizes)
        return result

    def forget_replaced(self, state: ModelState) -> None:
        """Drop the graphs if the model's state, which is given, is another one than when they were captured."""
        if self.graphs and is_replaced(self._captured_state, state):
            self.forget()

    def forget(self) -> None:
        """Drop the graphs and count calls from 0 again."""
        self.graphs.clear()
        self.calls.clear()
        self._pool = None

    def _capture(self, inputs: Sequence[Tensor], result: Tensor, sizes: tuple[int, ...]) -> None:
        """Capture a graph and keep it if it agrees with the function's result."""
        if not self.graphs:
            self._captured_state = state_of(self.model)
        if self._result is None:
            self._result = torch.empty_like(result)

        # Capture and compare
        reason = ""
        try:
            graph = _Graph(self.function, inputs, result=self._result, pool=self._pool)
            self._pool = graph.graph.pool()
            gap = (graph.replay(inputs) - result).abs().max().item()
            tolerance = rounding_tolerance(self.model.dtype)  # a graph's matrix products may add up in another order
            if gap > tolerance * max(1.0, result.abs().max().item()):
                reason = f"its logits differ by up to {gap:.3g}"
        except Exception as error:  # CUDA and the model may raise anything
            reason = str(error)

        # Keep the graph, or none at all
        if not reason:
            self.graphs[sizes] = graph
            return
        logger.info("%s decodes without graphs: %s", type(self.model).__name__, reason)
        self.forget()
        self.recordable = False


class _Graph:
    """Kernels of a function at one size.

    Args:
        function: see `GraphedStep`.
        inputs: arguments; their values are those of the capture.
        result: where the graph writes the function's result.
        pool: memory of other graphs, to be used by this one too; None for memory of its own.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        *,
        result: Tensor,
        pool: Any,
    ) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        self.result = result
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(result.device):
            # On a stream of its own first, as capturing demands: libraries set themselves up there
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function(*self.inputs)
            torch.cuda.current_stream().wait_stream(stream)

            # Other threads, such as those of programs and servers, may use CUDA meanwhile
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                result.copy_(function(*self.inputs))

    def replay(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the function's result for other arguments of these sizes."""
        for held_input, new_input in zip(self.inputs, inputs, strict=True):
            held_input.copy_(new_input)
        self.graph.replay()
        return self.result.clone()
