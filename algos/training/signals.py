"""Ctrl-C, SIGTERM and SIGHUP: a training finishes its iteration first; other work ends at once, with a message."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a training."""
Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class Interrupted(KeyboardInterrupt):
    """Exception that ends the training at the end of an iteration, after a signal.

    Args:
        name: name of the signal.
        message: step count of the run and its checkpoint.
        resumable: True if the training can go on from its folder.
    """

    def __init__(self, name: str, message: str, *, resumable: bool = True) -> None:
        super().__init__(message)
        self.name = name
        self.status = 128 + signal.Signals[name]
        """Exit status of a program ended by this signal."""
        self.resumable = resumable


class Request:
    """Name of the signal received, if any."""

    name: str | None = None


@contextmanager
def deferred_signals(numbers: Sequence[signal.Signals] = SIGNALS) -> Iterator[Request]:
    """Record the first of each of these signals; a second acts at once, as outside this context.

    A second SIGHUP is ignored: when a terminal closes, the kernel and the shell both send one. A thread that is not the
    main one leaves signals unchanged.
    """
    request = Request()

    def note(number: int, frame: FrameType | None) -> None:
        request.name = signal.Signals(number).name
        if number == signal.SIGHUP:
            return
        signal.signal(number, former_handlers[signal.Signals(number)])
        with suppress(OSError):  # nobody reads it: the terminal has gone
            os.write(2, b"the training ends after this iteration; the same signal once more ends it now\n")

    with _handled(numbers, note) as former_handlers:
        yield request


@contextmanager
def interrupted_by_signals(message: str) -> Iterator[None]:
    """Context in which each signal raises an `Interrupted` at once, with this message."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise Interrupted(name, f"stopped by {name} {message}", resumable=False)

    with _handled(SIGNALS, interrupt):
        yield


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[dict[signal.Signals, Handler]]:
    """Set a handler for these signals, and yield their former handlers, which come back at the end.

    A signal that is ignored, as SIGHUP under ``nohup``, stays ignored. Only the main thread can set handlers.
    """
    former_handlers: dict[signal.Signals, Handler] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            former = signal.getsignal(number)
            if former is not signal.SIG_IGN:
                former_handlers[number] = former
    for number in former_handlers:
        signal.signal(number, handler)
    try:
        yield former_handlers
    finally:
        for number, former in former_handlers.items():
            signal.signal(number, former)
