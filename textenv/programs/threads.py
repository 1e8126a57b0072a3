"""Threads that call functions one after another: to start a new one for each program takes longer than a short program.

They are daemons: a program that hangs does not keep Python from ending.
"""

import contextvars
import os
import queue
import threading
from collections import deque
from collections.abc import Callable

_idle: deque["queue.SimpleQueue[Callable[[], object]]"] = deque()
"""For each thread that waits for a function: where it takes it from."""


def run_in_thread(function: Callable[[], object]) -> None:
    """Call a function in a thread that is idle, or in a new one, with the context variables of here.

    What it returns is dropped, and it must not raise.
    """
    context = contextvars.copy_context()
    try:
        functions = _idle.pop()
    except IndexError:
        functions = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(functions,), name="program", daemon=True).start()
    functions.put(lambda: context.run(function))


def _serve(functions: "queue.SimpleQueue[Callable[[], object]]") -> None:
    """Call functions, for ever."""
    while True:
        functions.get()()
        _idle.append(functions)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a forked process has no threads but one
