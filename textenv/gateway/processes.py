"""Programs in processes of their own, which are started for one episode each."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from textenv.programs.run import ProcessFailedError
from textenv.programs.threads import run_in_thread

SECONDS_TO_END = 10
"""Time that a program has to end by itself after it has sent its reward."""
SECONDS_TO_OBEY = 2
"""Time between the signals SIGTERM and SIGKILL."""
MAX_SHOWN_BYTES = 4000
"""Bytes of a program's last output that an error shows."""


class Processes:
    """Processes of one command.

    Args:
        command: program and arguments, as a text that is split like a shell's, or as a list.

    Raises:
        ValueError: if it is empty.
        FileNotFoundError: if there is no such program.
    """

    def __init__(self, command: str | Sequence[str]) -> None:
        self.words = shlex.split(command) if isinstance(command, str) else list(command)
        if not self.words or not all(isinstance(word, str) for word in self.words):
            raise ValueError(f"command is {command!r:.200}, expected a program with its arguments")
        program = self.words[0]
        if shutil.which(program) is None:
            advice = "for a line of a shell, write bash -c '...'"
            if Path(program).is_file():
                advice = (
                    f"the file is not executable, chmod +x {shlex.quote(program)}, or name the interpreter before it"
                )
            raise FileNotFoundError(f"command is {command!r:.200}, but there is no program {program!r}: {advice}")
        self._lock = threading.Lock()
        self._running: set[Process] = set()
        self._closed = False

    def start(self, variables: Mapping[str, str], *, on_end: Callable[[Exception], None]) -> Process:
        """Start a process.

        Args:
            variables: environment variables besides those of this process.
            on_end: called with an error that tells how it has ended.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the environment is closed")
            process = Process(self.words, variables)
            self._running.add(process)

        def watch() -> None:
            error = process.wait()
            with self._lock:
                self._running.discard(process)
            on_end(error)

        run_in_thread(watch)
        return process

    def close(self) -> None:
        """Kill all processes; no further ones can be started."""
        with self._lock:
            self._closed = True
            processes = list(self._running)
        for process in processes:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + SECONDS_TO_OBEY
        for process in processes:
            process.kill(seconds=max(0.0, deadline - time.monotonic()))


class Process:
    """A process, with a session of its own, so that a signal reaches the programs that it starts too."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        self._words = words
        self._ended = threading.Event()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `wait`)
        self._popen = subprocess.Popen(
            words,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> Exception:
        """Wait for its end, and return an error that tells how it has ended, with its last output.

        Programs that it has started and that still run are killed.
        """
        # While it is not collected, no other process can have its number
        os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._ended.set()
        status = self._popen.wait()
        with self._output:
            size = self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, size - MAX_SHOWN_BYTES))
            output = self._output.read().decode(errors="replace").strip()
        return ProcessFailedError(
            f"{shlex.join(self._words)} ended with status {status} and sent no reward (POST to the address in "
            f"TEXTENV_SESSION, /reward). Its output:\n{output or '(none)'}"
        )

    def let_end(self) -> None:
        """Let it end by itself; kill it if it does not do so in time."""

        def end() -> None:
            if not self._ended.wait(SECONDS_TO_END):
                self.kill()

        run_in_thread(end)

    def kill(self, *, seconds: float = SECONDS_TO_OBEY) -> None:
        """End it, and the programs that it has started: politely first, and after so many seconds by force."""
        self.signal(signal.SIGTERM)
        if not self._ended.wait(seconds):
            self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to it and to the programs that it has started, unless it has ended."""
        if not self._ended.is_set():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, number)
