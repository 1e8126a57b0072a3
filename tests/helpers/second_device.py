"""A second device without a GPU: its tensors have memory of their own, and no operation mixes them with the CPU's.

torch lets a backend be written in Python (`_setup_privateuseone_for_python_backend`). A tensor here holds one on the
CPU, which computes. As on CUDA, an operation raises if its tensors or its generator are on different devices, NumPy
cannot read a tensor, and a parameter that moves stays the same object. ``"auto"`` finds this device.
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
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


def _run(func, args, kwargs):
    name = func._schema.name.removeprefix("aten::")
    given, _ = tree_flatten((args, kwargs))
    ours = [x for x in given if isinstance(x, SecondTensor)]
    others = [x for x in given if isinstance(x, torch.Tensor) and not isinstance(x, SecondTensor) and x.ndim]
    if ours and others and name not in MIXING:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {NAME} and cpu")
    here, device = bool(ours), kwargs.get("device")
    if device is not None:
        here, kwargs = torch.device(device).type == NAME, kwargs | {"device": torch.device("cpu")}
    if here and any(isinstance(x, torch.Generator) for x in given):
        raise RuntimeError(f"{func}: expected a generator on {NAME}, but found cpu")
    held_args, held_kwargs = tree_map_only(SecondTensor, lambda x: x.held, (args, kwargs))
    found = _ONLY_ON_GPUS.get(name, func)(*held_args, **held_kwargs)
    columns = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    written = [x.name for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    if written and func._schema.returns:
        back = [columns[name] for name in written if name in columns]
        return back[0] if len(func._schema.returns) == 1 else tuple(back)
    return tree_map_only(torch.Tensor, SecondTensor, found) if here else found


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
