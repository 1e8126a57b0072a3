"""Devices by name: the argument ``device`` of agents, policies and recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


def find_device(name: str | torch.device | None) -> torch.device | None:
    """Find a device of this machine; None stays None, and moves nothing.

    Args:
        name: ``"cpu"``, ``"cuda"`` (torch's current one), ``"cuda:1"``, ``"mps"``; or ``"auto"``: the first that there
            is of CUDA, MPS and the CPU.

    Raises:
        ValueError: if there is no such device here.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    if name is None:
        return None
    import torch

    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    try:
        found = torch.device(next(kind for kind, count in counts.items() if count) if name == "auto" else name)
    except (RuntimeError, TypeError):
        found = torch.device("meta")  # refused below
    if (found.index or 0) >= counts.get(found.type, 0):
        here = ["auto", "cpu", *(f"cuda:{i}" for i in range(counts["cuda"])), *["mps"] * counts["mps"]]
        raise ValueError(f"device is {str(name)!r:.50}, but this machine has: {', '.join(here)}")
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found


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
