"""Devices by name: the argument ``device`` of agents, policies and recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


def find_device(name: str | torch.device | None) -> torch.device | None:
    """Find a device of this machine; None stays None, and moves nothing.

    Args:
        name: ``"cpu"``, ``"cuda"`` (torch's current one), ``"cuda:1"``, ``"mps"``; ``"auto"`` means CUDA, MPS or what
            other accelerator torch finds here, else the CPU.

    Raises:
        ValueError: if there is no such device here.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    if name is None:
        return None
    import torch

    fastest = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if fastest is None else torch.accelerator.device_count()
    here = [torch.device("cpu"), *(torch.device(str(fastest), i) for i in range(count))]
    try:
        found = (fastest or torch.device("cpu")) if name == "auto" else torch.device(name)
    except (RuntimeError, TypeError):
        found = torch.device("meta")  # refused below
    if fastest is not None and found == torch.device(fastest.type):
        return here[1 + torch.accelerator.current_device_index()]
    if found not in here:
        raise ValueError(f"device is {str(name)!r:.50}, expected {', '.join(map(str, here))} (of this machine) or auto")
    return found


@runtime_checkable
class Movable(Protocol):
    """A model, or an object that holds some."""

    def to(self, device: Any) -> Any:
        """Move the weights to a device."""
        ...


def move(holder: Any, device: torch.device) -> None:
    """Move a model, or the models that an object holds, to a device; others (such as plain functions) have none."""
    if isinstance(holder, Movable):
        holder.to(device)
