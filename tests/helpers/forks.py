"""Functions in processes of their own that start at once: they fork from one that has loaded torch and our modules.

The process that forks is Python's ``forkserver``. It starts at the first call, which takes as long as a process alone,
and ends with the tests. For commands there is `tests.helpers.warm_start`.
"""

import multiprocessing
import os
import sys
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.helpers.processes import dies_with_the_tests

LOADED = (
    "tests.helpers.resumable_agents", "tests.helpers.lora", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.launcher.api",
)  # fmt: skip
"""What the functions need, or a module that imports it."""


class Ended(NamedTuple):
    """How a process ended."""

    returncode: int
    """Minus the number of the signal that ended it, if one did."""
    stdout: str
    stderr: str


@cache
def context():
    """Python's way to start such processes."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(list(LOADED))
    return forkserver


@contextmanager
def started(function, *arguments):
    """A process that calls a function of a module; it is killed if the block ends before it.

    Yields:
        The process, and a function that waits for its end and returns an `Ended`.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = context().Process(target=_call, args=(outputs, function, arguments))
        process.start()

        def wait():
            process.join()
            return Ended(process.exitcode, *(output.read_text() for output in outputs))

        try:
            yield process, wait
        finally:
            process.kill()
            process.join()


def run(function, *arguments, check=True):
    """Wait for a function in a process of its own."""
    with started(function, *arguments) as (_, wait):
        ended = wait()
    assert not check or ended.returncode == 0, ended.stderr[-3000:]
    return ended


def _call(outputs, function, arguments):
    """What the process does; its outputs go into files."""
    dies_with_the_tests()
    for number, output in enumerate(outputs, start=1):
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    try:
        function(*arguments)
    finally:
        sys.stdout.flush()
