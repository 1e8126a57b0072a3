"""A pytest plugin that rounds as another processor would: ``make rounding``, or ``pytest -p tests.helpers.rounding``.

Products of matrices, convolutions, softmax, exp, tanh and layer norm are off by up to one unit in the last place:
always the same for the same shape, another for another shape, as with another kernel or another blocking. What float32
holds exactly (checked in float64) stays exact. So bits are still equal where one computation is repeated, and differ
where a batch is cut in another way. A test that fails under it depends on the machine.

A process that a test starts rounds as usual. So tests that compare bits with a new process have the marker ``bits``,
and are left out. The suite takes two to three times as long. ``ROUNDING_ULPS`` (1) is the error in such units.
"""

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten
ROUNDED = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.dot.default,
    aten.convolution.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.logsumexp.default,
    aten.native_layer_norm.default,
    aten.exp.default,
    aten.tanh.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Operations whose last bits depend on the kernel."""
UNITS = float(os.environ.get("ROUNDING_ULPS", "1"))
"""Largest error, in units in the last place."""
LARGEST = 2_000_000
"""Numbers of the largest result that is changed: larger ones would take too long."""


class Rounding(TorchDispatchMode):
    """Context in which the results of `ROUNDED` have other last bits."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        result = operation(*arguments, **options)
        if operation not in ROUNDED:
            return result
        first = result[0] if isinstance(result, tuple) else result
        if not is_plain(first):
            return result
        with _disable_current_modes():
            inexact = where_inexact(first, operation, arguments, options)
            wide = first.double()
            changed = wide * (1 + errors(tuple(first.shape)))
            first.copy_(torch.where(inexact, changed, wide).float())
        return result


def is_plain(result: Any) -> bool:
    """Return True for a float32 tensor on the CPU, of no subclass, neither empty nor too large."""
    return (
        type(result) is Tensor
        and result.dtype is torch.float32
        and result.device.type == "cpu"
        and 0 < result.numel() < LARGEST
    )


def where_inexact(result: Tensor, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Return bool of the result's shape: entries that float32 had to round, by the same operation in float64."""
    try:
        exact = operation(*map(in_float64, arguments), **options)
    except (RuntimeError, TypeError, NotImplementedError):  # there is none in float64
        return torch.ones_like(result, dtype=torch.bool)
    if isinstance(exact, tuple):
        exact = exact[0]
    return exact != result.double()


def in_float64(argument: Any) -> Any:
    """Return a floating-point tensor in float64, and anything else as it is."""
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.double()
    return argument


@cache
def errors(shape: tuple[int, ...]) -> Tensor:
    """Relative errors of a result of this shape, float64."""
    seed = sum((axis + 1) * size for axis, size in enumerate(shape)) % 2**31
    generator = torch.Generator().manual_seed(seed)
    between = torch.rand(shape, generator=generator) * 2 - 1
    return (between * UNITS * torch.finfo(torch.float32).eps).double()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Make the fixtures of each test so, with which it may compare bits."""
    with Rounding():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run each test so."""
    with Rounding():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that compare bits with a new process."""
    left_out = [item for item in items if item.get_closest_marker("bits")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("bits")]
