"""Devices by name: the argument ``device`` of agents, policies and recipes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


def find_device(name: str | torch.device | None) -> torch.device | None:
    """Find a device of this machine by its name; None stays None.

    Args:
        name: ``"cpu"``, ``"cuda"`` (torch's current one), ``"cuda:1"``, ``"mps"``, …; ``"auto"`` means torch's
            accelerator (CUDA, MPS, ...) if there is one here, else the CPU.

    Raises:
        ValueError: if there is no such device here.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    if name is None:
        return None
    import torch

    cpu = torch.device("cpu")
    devices = {"cpu": cpu}
    auto = cpu
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        kind = accelerator.type
        for index in range(torch.accelerator.device_count()):
            devices[f"{kind}:{index}"] = torch.device(kind, index)
        auto = torch.device(kind, torch.accelerator.current_device_index())
        devices[kind] = auto

    if str(name) == "auto":
        return auto
    if str(name) not in devices:
        raise ValueError(f"device is {str(name)!r:.50}, expected {', '.join(devices)} (of this machine) or auto")
    return devices[str(name)]


def free_memory(device: str | torch.device | None) -> int | None:
    """Return the free bytes of a device (None: the CPU); None if they are not known."""
    import torch

    torch_device = find_device(device or "cpu")
    assert torch_device is not None
    if torch_device.type == "cuda":
        return torch.cuda.mem_get_info(torch_device)[0]
    meminfo = Path("/proc/meminfo")
    if torch_device.type == "cpu" and meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable"):
                _, kibibytes, *_ = line.split()
                return int(kibibytes) * 1024
    return None


@runtime_checkable
class _Movable(Protocol):
    def to(self, device: object) -> object: ...


def move(holder: object, device: torch.device) -> None:
    """Move a model, or an object that holds models, to a device; leave objects without ``to``, such as functions."""
    if isinstance(holder, _Movable):
        holder.to(device)
