"""A second device without a GPU: its tensors have memory of their own, and no operation mixes them with the CPU's.

torch lets a backend be written in Python (`_setup_privateuseone_for_python_backend`). A tensor here holds one on the
CPU, which computes. As on CUDA, an operation raises if its tensors or its generator are on different devices, NumPy
cannot read a tensor, and a parameter that moves stays the same object. ``"auto"`` finds this device.
"""

from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "second"
MIXING = {"_to_copy", "copy_", "index", "index_put_", "_index_put_impl_"}
"""Operations that take tensors on several devices, on CUDA too; any takes a CPU tensor without dimensions."""
_LIBRARY = torch.library.Library("aten", "IMPL")


class SecondTensor(torch.Tensor):
    """A tensor on the second device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        layout = dict(strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype)
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, device=f"{NAME}:0", **layout)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo):
        copied = SecondTensor(self.held.clone())
        memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def tolist(self):
        return self.held.tolist()

    def untyped_storage(self):
        return self.held.untyped_storage()

    def data_ptr(self):
        return self.held.data_ptr()


class _Factories(TorchDispatchMode):
    """Operations on no tensor of this device may make one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Module(_DummyBackendModule):
    """What `torch.cuda` is for CUDA."""

    def synchronize(self, *_):
        """Nothing runs in the background."""

    def get_rng_state(self, *_):
        """No generator is on this device."""

    def set_rng_state(self, *_):
        """As `get_rng_state`."""


class _Signature(NamedTuple):
    """What an operation's schema says."""

    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    """Arguments that the operation writes into and, unless it returns nothing, returns."""
    num_returns: int


@cache
def _signature(func):
    schema = func._schema
    arguments = tuple(argument.name for argument in schema.arguments)
    written = [x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    if not schema.returns:
        written = []
    return _Signature(schema.name.removeprefix("aten::"), arguments, tuple(written), len(schema.returns))


def _leaves(value, kind):
    """Return the values of this kind in nested lists, tuples and dictionaries, which `torch`'s own trees do slowly."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [leaf for item in value for leaf in _leaves(item, kind)]


def _mapped(value, kind, function):
    """Return nested lists and tuples with the values of this kind replaced."""
    if isinstance(value, kind):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([_mapped(item, kind, function) for item in value])
    return value


def _held(value):
    return _mapped(value, SecondTensor, attrgetter("held"))


def _run(func, args, kwargs):
    signature = _signature(func)
    tensors = _leaves((args, kwargs), torch.Tensor)
    ours = [x for x in tensors if isinstance(x, SecondTensor)]

    # Refuse tensors of both devices
    others = [x for x in tensors if not isinstance(x, SecondTensor) and x.ndim]
    if ours and others and signature.name not in MIXING:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {NAME} and cpu")
    here, device = bool(ours), kwargs.get("device")
    if device is not None:
        here, kwargs = torch.device(device).type == NAME, kwargs | {"device": torch.device("cpu")}
    if here and _leaves((args, kwargs), torch.Generator):
        raise RuntimeError(f"{func}: expected a generator on {NAME}, but found cpu")

    # Compute with the tensors on the CPU
    held_kwargs = {name: _held(value) for name, value in kwargs.items()}
    result = _ONLY_ON_GPUS.get(signature.name, func)(*_held(args), **held_kwargs)

    # Return the arguments that were written into, or new tensors
    if signature.written:
        columns = dict(zip(signature.arguments, args, strict=False)) | kwargs
        back = [columns[name] for name in signature.written if name in columns]
        return back[0] if signature.num_returns == 1 else tuple(back)
    return _mapped(result, torch.Tensor, SecondTensor) if here else result


def _lstm_cell(input_gates, hidden_gates, before, input_bias=None, hidden_bias=None):
    """The fused cell, which torch has for GPUs only."""
    gates = input_gates + hidden_gates + (0 if input_bias is None else input_bias + hidden_bias)
    i, f, g, o = gates.chunk(4, dim=-1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell = f * before + i * g
    return o * cell.tanh(), cell, torch.cat([i, f, g, o], dim=-1)


def _lstm_cell_backward(grad_hidden, grad_cell, before, cell, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, dim=-1)
    grad_hidden, grad_cell = (torch.zeros_like(cell) if x is None else x for x in (grad_hidden, grad_cell))
    slope = grad_cell + grad_hidden * o * (1 - cell.tanh() ** 2)
    gates = [slope * g * i * (1 - i), slope * before * f * (1 - f), slope * i * (1 - g * g)]
    found = torch.cat([*gates, grad_hidden * cell.tanh() * o * (1 - o)], dim=-1)
    return found, slope * f, found.sum(0) if has_bias else None


_ONLY_ON_GPUS = {
    "_thnn_fused_lstm_cell": _lstm_cell, "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
}  # fmt: skip


def _empty_strided(size, stride, *, dtype=None, **_):
    return SecondTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source, target, non_blocking=False):
    target.held.copy_(source.held if isinstance(source, SecondTensor) else source)
    return target


@contextmanager
def second_device():
    """Context in which the device ``second`` exists; call it in a process of its own, for torch cannot forget it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    for name, kernel in (("empty_strided", _empty_strided), ("_copy_from", _copy_from)):  # for `torch.tensor`
        _LIBRARY.impl(name, kernel, "PrivateUse1")
    torch.__future__.set_swap_module_params_on_conversion(True)
    with _Factories(), torch.autograd.set_multithreading_enabled(False):
        yield torch.device(NAME, 0)
