"""Ctrl-C and SIGTERM while training: the iteration under way is finished first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop and did, at the end of an iteration.

    Args:
        name: of the signal.
        message: where the run stands.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.status = 128 + signal.Signals[name]
        """Exit status of a program that a signal ended."""


class Request:
    """Which signal has asked to stop, if any."""

    name: str | None = None


@contextmanager
def noted_signals(*, on: bool) -> Iterator[Request]:
    """Within it the first signal is only noted; the second acts at once, as without this.

    Args:
        on: False, or another thread than the main one, leaves signals as they are.
    """
    request = Request()
    if not on or threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        request.name = signal.Signals(number).name
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
