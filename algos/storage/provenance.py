"""Record of what made a run: versions, commit, machine and command."""

import functools
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

LIBRARIES = ("textenv", "torch", "transformers", "tensordict", "torchrl", "gymnasium", "numpy")


def made_by() -> dict[str, Any]:
    """Describe this process and the present time, for ``config.json``."""
    import torch

    file = Path("/proc/cpuinfo")  # of Linux
    names = re.findall("model name\t: (.*)", file.read_text()) if file.exists() else []
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "git": commit(),
        "python": platform.python_version(),
        "versions": versions(),
        "machine": {
            "host": platform.node(),
            "platform": platform.platform(),
            "cpu": names[0] if names else platform.processor(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,  # if the run uses one
            "threads": torch.get_num_threads(),
        },
    }


def versions() -> dict[str, str]:
    """Versions of this library and of those that it is built on, by name; without one that runs from its sources."""
    return {name: found.version for name in LIBRARIES for found in [*distributions(name=name)][:1]}


@functools.cache
def commit() -> dict[str, Any] | None:
    """Commit of the working directory, dirty if a tracked file differs from it; None outside a repository.

    Read once, when a training starts: a later commit does not change the code that is running.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": described.removesuffix("-dirty"), "dirty": described.endswith("-dirty")}
