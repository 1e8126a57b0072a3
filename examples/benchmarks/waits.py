"""Waits for a GPU, counted by the function of the library that asks for them.

Either by torch's own warnings (`counted_on_cuda`), or by the operations that wait on CUDA (`CountedOperations`), which
also works on the device that tests simulate.
"""

import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
CUDA_WAITS = "called a synchronizing CUDA operation"
"""What torch's warning says of an operation that waits for the GPU."""


class Waits:
    """Counts of operations that wait for the device, and of bytes copied, by function of the library."""

    def __init__(self):
        self.counts = Counter()
        self.bytes = Counter()

    def add(self, size=0):
        """Count one operation, of the innermost function of the library that is running now."""
        site = site_of(sys._getframe(1))
        self.counts[site] += 1
        self.bytes[site] += size


def site_of(frame):
    """Name of the innermost function of the library in a stack, such as ``algos/optimizer.py:_finite``."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("algos", "textenv"):
            function = frame.f_code.co_qualname.split(".<locals>")[0]
            return f"{path.relative_to(ROOT).as_posix()}:{function}"
        frame = frame.f_back
    return "outside the library"


@contextmanager
def counted_on_cuda(waits):
    """Context in which the warnings of `torch.cuda.set_sync_debug_mode` are counted; others are shown as before."""
    show = warnings.showwarning

    def count(message, *where, **options):
        if CUDA_WAITS in str(message):
            waits.add()
        else:
            show(message, *where, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("always")  # else Python shows each line's warning once
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
"""Operations whose result, or its size, the CPU needs at once."""


class CountedOperations(TorchDispatchMode):
    """Context in which operations that wait for a device are counted, with the bytes that they copy.

    Args:
        waits: where they are counted.
        device_type: such as ``"cuda"``.
        only_copies: count only copies between the device and the CPU.
    """

    def __init__(self, waits, device_type, *, only_copies=False):
        super().__init__()
        self.waits = waits
        self.device_type = device_type
        self.only_copies = only_copies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        size = self._size_if_waits(func._schema.name.removeprefix("aten::"), args, kwargs)
        if size is not None:
            self.waits.add(size)
        return func(*args, **kwargs)

    def _size_if_waits(self, name, args, kwargs):
        """Return the bytes that an operation copies; None if it does not wait."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        places = {x.device.type for x in tensors}
        source = tensors[-1] if tensors else None

        # Copies between devices; a tensor of one number is a constant that kernels get as an argument
        target = kwargs.get("device")
        if name == "_to_copy" and target is not None:
            target = torch.device(target).type
            if target != source.device.type and self.device_type in (target, source.device.type):
                return None if kwargs.get("non_blocking") else source.nbytes
        if name == "copy_" and len(places) == 2 and self.device_type in places:
            return source.nbytes
        if self.device_type not in places:
            return None
        if name in ("index", "index_put_", "_index_put_impl_"):
            for index in args[1]:
                if index is not None and index.device.type != self.device_type:
                    return index.nbytes
                if index is not None and index.dtype == torch.bool and not self.only_copies:
                    return 0
        if name in READS and not (self.only_copies and name != "_local_scalar_dense"):
            return source.element_size()
        return None


@dataclass(frozen=True)
class Named:
    """A wait that must be, or that is known.

    Args:
        reason: why.
        each: at most so many times in an iteration of the loop.
        once: and so many times more for the whole call, before or after the loop.
    """

    reason: str
    each: int = 0
    once: int = 0


def judged(waits, named, iterations):
    """Sentences on waits that are not named, or more than named."""
    wrong = []
    for site, count in sorted(waits.counts.items()):
        allowed = named.get(site)
        if allowed is None:
            wrong.append(f"{site} waits {count} times in {iterations} iterations and is not named")
        elif count > allowed.each * iterations + allowed.once:
            wrong.append(
                f"{site} waits {count} times in {iterations} iterations, expected at most {allowed.each} in each "
                f"and {allowed.once} more"
            )
    return wrong


def waits_inside(waits, named, iterations):
    """Return the number of waits inside the iterations of a loop: of each function at most those named for them."""
    return sum(min(count, named[site].each * iterations) for site, count in waits.counts.items() if site in named)
