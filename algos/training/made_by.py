"""Record of what made a run: versions, commit, machine and command."""

import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LIBRARIES = ("textenv", "torch", "transformers", "tensordict", "torchrl", "gymnasium", "numpy")


def made_by() -> dict[str, Any]:
    """Describe this process and the present time, for ``config.json``."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds")} | _process()


@functools.cache
def _process() -> dict[str, Any]:
    """Read once, when a training starts: a later commit does not change the code that is running."""
    import torch

    return {
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "git": commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "machine": {
            "host": platform.node(),
            "platform": platform.platform(),
            "cpu": _processor(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,  # if the run uses one
            "threads": torch.get_num_threads(),
        },
    }


def commit() -> dict[str, Any] | None:
    """Commit of the working directory, dirty if a tracked file differs from it; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": described.removesuffix("-dirty"), "dirty": described.endswith("-dirty")}


def _version(library: str) -> str | None:
    """Version of an installed library; None if it runs from its sources."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(library)
    return None


def _processor() -> str:
    """Name of the processor; only Linux has it in a file."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
