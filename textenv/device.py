"""Devices by name: the argument ``device`` of agents, policies and recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


def find_device(name: str | torch.device | None) -> torch.device | None:
    """Find a device of this machine; None stays None, and moves nothing.

    Args:
        name: ``"cpu"``, ``"cuda"`` (torch's current one), ``"cuda:1"``, ``"mps"``; ``"auto"`` is torch's accelerator
            (CUDA, MPS, ...) if there is one here, else the CPU.

    Raises:
        ValueError: if there is no such device here.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    if name is None:
        return None
    import torch

    here = {"cpu": torch.device("cpu")}
    if (fastest := torch.accelerator.current_accelerator(check_available=True)) is not None:
        kind = fastest.type
        here |= {f"{kind}:{i}": torch.device(kind, i) for i in range(torch.accelerator.device_count())}
        here[kind] = torch.device(kind, torch.accelerator.current_device_index())
    named = here | {"auto": [*here.values()][-1]}
    if str(name) not in named:
        raise ValueError(f"device is {str(name)!r:.50}, expected {', '.join(here)} (of this machine) or auto")
    return named[str(name)]


@runtime_checkable
class _Movable(Protocol):
    def to(self, device: Any) -> Any: ...


def move(holder: Any, device: torch.device) -> None:
    """Move a model, or the models that an object holds, to a device; others (such as plain functions) have none."""
    if isinstance(holder, _Movable):
        holder.to(device)
