"""Record of how a run was made: versions, commit, machine and command."""

import functools
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

from algos.storage.run_reader import Plain, Provenance

LIBRARIES = ("textenv", "torch", "transformers", "tensordict", "torchrl", "gymnasium", "numpy")
"""Packages whose versions are recorded."""
GIT_SECONDS = 10
"""Seconds that git may take."""


def provenance() -> Provenance:
    """Describe this process and the present time, for ``config.json``."""
    import torch

    gpu = None
    if torch.cuda.is_initialized():  # if the run uses one
        gpu = torch.cuda.get_device_name()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "git": commit(),
        "python": platform.python_version(),
        "versions": {**versions(), "torch": torch.__version__},  # with its build, such as +cu130
        "machine": {
            "host": platform.node(),
            "platform": platform.platform(),
            "cpu": _cpu_name(),
            "gpu": gpu,
            "threads": torch.get_num_threads(),
        },
    }


def _cpu_name() -> str:
    """Return the name of the CPU, or what Python knows of it where there is no ``/proc``."""
    file = Path("/proc/cpuinfo")
    if file.exists():
        match = re.search("model name\t: (.*)", file.read_text())
        if match is not None:
            return match[1]
    return platform.processor()


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions of this library and of those that it is built on, by name.

    A library that is not installed, but runs from its sources, is left out. They are read once: packages that are
    installed later are not those that run.
    """
    by_name = {}
    for name in LIBRARIES:
        distribution = next(iter(distributions(name=name)), None)
        if distribution is not None:
            by_name[name] = distribution.version
    return by_name


@functools.cache
def commit() -> Mapping[str, Plain] | None:
    """Return the commit of the working directory, and ``dirty``: True if a tracked file differs from it.

    None outside a repository. It is read once, when a training starts: a later commit does not change the code that
    runs.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    description = result.stdout.strip()
    return {"commit": description.removesuffix("-dirty"), "dirty": description.endswith("-dirty")}
