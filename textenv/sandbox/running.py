"""Run tests of generated code in processes of their own, and count those that pass."""

import json
import os
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from textenv.sandbox.confinement import NotConfinedError, check_system
from textenv.sandbox.program import BROKEN, PASSED, Order
from textenv.sandbox.remote import frame

_PROGRAM = (
    "import sys; sys.path.append({room!r}); from sandbox.program import main; sys.path[-1:] = {packages!r}; main()"
)
_ROOM = str(Path(__file__).parent.parent)
"""Folder in which `sandbox` is a package without parents."""
_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
_LIBRARY_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random")
_CHECK_OF_CONFINEMENT = """
import os, socket
for attempt in (lambda: os.listdir("/"), lambda: os.listdir(".."), lambda: os.chmod(".", 0), socket.socket, os.fork):
    try:
        attempt()
    except PermissionError:
        continue
    raise AssertionError
"""
"""What must fail in a closed process."""


class CodeTester:
    """Runner of tests of generated code.

    The code and the tests run in two processes, so the code can neither read the tests nor write their results.

    Args:
        seconds: CPU time of each process; twice this by the clock.
        memory_mb: address space of each process, in MiB.
        unsafe: leave files, network and other processes open to the code.

    Raises:
        TypeError: if a limit is no whole number.
        NotConfinedError: if this system cannot close them, and ``unsafe`` is not set.
        RuntimeError: if nothing runs under these limits.
    """

    def __init__(self, *, seconds: int, memory_mb: int, unsafe: bool) -> None:
        for name, value in (("seconds", seconds), ("memory_mb", memory_mb)):
            if type(value) is not int:
                raise TypeError(f"{name} is {value!r:.100}, expected a whole number")
        self._seconds = seconds
        self._memory_mb = memory_mb
        self._unsafe = unsafe
        if not hasattr(os, "fork"):
            raise NotConfinedError(f"this is {sys.platform}, which cannot fork processes")
        if not unsafe:
            check_system()

        # Try it once
        checks = ["pass"]
        if not unsafe:
            checks.append(_CHECK_OF_CONFINEMENT)
        num_passed = self.count_passed("", checks)
        if num_passed == 0:
            raise RuntimeError(f"no Python starts with {seconds} s and {memory_mb} MB: expected higher limits")
        if num_passed < len(checks):
            raise NotConfinedError("the kernel accepts Landlock and the filter of calls, but does not follow them")

    def count_passed(self, code: str, tests: Sequence[str]) -> int:
        """Return how many tests pass after the code; 0 if the code fails by itself.

        Raises:
            NotConfinedError: if the processes cannot be started or closed off any more.
        """
        with _scratch_folder() as folder:
            order = Order(
                code=code,
                folder=folder,
                readable=_readable_paths(),
                seconds=self._seconds,
                memory_bytes=self._memory_mb * 2**20,
                confined=not self._unsafe,
            )
            messages = [order, list(tests)]
            output = _run(folder, b"".join(frame(json.dumps(message).encode()) for message in messages))
        if output.startswith(BROKEN):
            raise NotConfinedError(output[len(BROKEN) :].decode(errors="replace"))
        return min(output.count(PASSED), len(tests))


@contextmanager
def _scratch_folder() -> Iterator[str]:
    """Make an empty folder, and remove it at the end, however deep it has become and whatever modes its parts have."""
    scratch = tempfile.TemporaryDirectory(prefix="textenv-tests-", ignore_cleanup_errors=True)
    # The real path: a rule of Landlock follows no links
    folder = os.path.realpath(scratch.name)
    try:
        yield folder
    finally:
        with suppress(RecursionError):
            scratch.cleanup()
        if os.path.lexists(folder):
            subprocess.run(["chmod", "-R", "u+rwx", folder], stderr=subprocess.DEVNULL, check=False)
            subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def _run(folder: str, messages: bytes) -> bytes:
    """Run the program on these messages, and return its output. Whatever happens, its processes have then ended."""
    # -S: no code of packages runs at the start (.pth files)
    command = [sys.executable, "-sPS", "-c", _PROGRAM.format(room=_ROOM, packages=_package_folders())]
    env = {"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        bufsize=0,
        cwd=folder,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches us alone
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(BrokenPipeError):  # code that fails ends before the tests are read
            remaining = memoryview(messages)
            while remaining:
                remaining = remaining[process.stdin.write(remaining) :]
        return process.stdout.read()
    finally:
        # The program ends its processes when its input is closed
        process.stdin.close()
        process.stdout.close()
        process.wait()


@cache
def _package_folders() -> list[str]:
    """Return the folders of installed packages, without the user's own and without editable installs."""
    names = ("site-packages", "dist-packages")
    folders = [path for path in sys.path if os.path.basename(path) in names]
    return [path for path in folders if not path.startswith(site.getuserbase())]


@cache
def _readable_paths() -> list[str]:
    """Return what Python reads: its library, packages, and the system's libraries."""
    library = sysconfig.get_path("stdlib")
    base_libraries = os.path.join(sys.base_prefix, "lib")
    paths = [library, base_libraries, *_package_folders(), *_LIBRARY_FOLDERS, *_LIBRARY_FILES]
    return sorted({os.path.realpath(path) for path in paths})
