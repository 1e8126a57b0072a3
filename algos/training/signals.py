"""Ctrl-C and SIGTERM during training: the current iteration is finished first."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Exception that ends the training at the end of an iteration, after a signal.

    Args:
        name: name of the signal.
        message: step count of the run and its checkpoint.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.status = 128 + signal.Signals[name]
        """Exit status of a program ended by this signal."""


class Request:
    """Name of the signal received, if any."""

    name: str | None = None


@contextmanager
def noted_signals(*, on: bool) -> Iterator[Request]:
    """Record the first of each signal; a second acts at once, as outside this context.

    Args:
        on: False, or a thread that is not the main one, leaves signals unchanged.
    """
    request = Request()
    if not on or threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        request.name = signal.Signals(number).name
        signal.signal(number, before[signal.Signals(number)])
        with suppress(OSError):  # nobody reads it: the terminal has gone
            os.write(2, b"the training ends after this iteration; the same signal once more ends it now\n")

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
