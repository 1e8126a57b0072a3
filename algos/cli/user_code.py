"""What rewards and environments may do to a command: print, end the program, leave threads behind."""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from textenv.rendering import printable

THREAD_SECONDS = 20
"""How long threads of the user may go on after a command has ended."""


class UserExit(ValueError):  # noqa: N818  (what the user's code did)
    """The user's code ended the program."""


@contextlib.contextmanager
def output_on_stderr(on: bool) -> Iterator[None]:
    """Send what this process and its children print to stderr, so that stdout has the result only.

    Args:
        on: False changes nothing.
    """
    if not on:
        yield
        return
    stdout = sys.stdout
    stdout.flush()
    with contextlib.ExitStack() as ends:
        with contextlib.suppress(OSError):  # one of them is closed
            kept = os.dup(1)
            ends.callback(os.close, kept)
            os.dup2(2, 1)
            ends.callback(os.dup2, kept, 1)
        # What code prints that has taken sys.stdout before must not wait for a later flush.
        ends.callback(stdout.flush)
        ends.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def exits_are_errors() -> Iterator[None]:
    """Turn a SystemExit of the user's code, which would end the command without a word, into an error.

    Raises:
        UserExit: that says where.
    """
    try:
        yield
    except SystemExit as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if Path(frame.filename).parent == Path(__file__).parent:  # a command's own status
            raise
        error_with_place = UserExit(f"line {frame.lineno} of {frame.filename} called sys.exit({error.code!r})")
        for note in getattr(error, "__notes__", ()):  # what was saved
            error_with_place.add_note(note)
        raise error_with_place from error


def escaped_traceback(error: BaseException) -> str:
    """Return an error's traceback; its text can neither control the terminal nor imitate other text."""
    return printable("".join(traceback.format_exception(error)))


def end_in_spite_of_threads(status: int, *, seconds: float = THREAD_SECONDS) -> None:
    """End the program, and say so, if other threads would keep it alive for long after its end.

    Args:
        status: exit status of the program.
        seconds: how long they may go on.
    """

    def end_later() -> None:
        threading.main_thread().join()  # until the interpreter waits for the other threads
        time.sleep(seconds)
        names = ", ".join(thread.name for thread in _threads_to_wait_for() if thread.is_alive())
        advice = "a reward or an environment starts a thread with daemon=True, or ends it"
        message = f"algos: {names} still ran {seconds:g} s after the end, and was ended: {advice}"
        print(message, file=sys.stderr, flush=True)
        os._exit(status)

    if _threads_to_wait_for():
        threading.Thread(target=end_later, daemon=True).start()


def _threads_to_wait_for() -> list[threading.Thread]:
    """Return the threads that Python waits for before it ends."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
