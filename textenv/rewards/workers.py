"""Concurrent calls in threads or processes, in order and with a time limit."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> Future[T | Exception]:
    """Start a call in a daemon thread, in a copy of this context.

    Returns:
        A future. Its result is what the call returned, or the exception that the call raised.
    """
    future: Future[T | Exception] = Future()

    def run() -> None:
        future.set_result(attempt(call, (BaseException,)))

    threading.Thread(target=copy_context().run, args=(run,), daemon=True).start()
    return future


def run_in_threads(calls: Sequence[Callable[[], T]], timeout: float | None) -> list[T | Exception]:
    """Run all calls concurrently; return the results or exceptions, in order.

    A call beyond ``timeout`` seconds becomes a `TimeoutError`; its daemon thread is abandoned.
    """
    futures = [in_thread(call) for call in calls]
    deadline = _deadline(timeout)
    return [_result(future, timeout, deadline) for future in futures]


def attempt(call: Callable[[], T], kinds: tuple[type[BaseException], ...] = (Exception, SystemExit)) -> T | Exception:
    """Return the call's result, or its exception if it is of these kinds."""
    try:
        return call()
    except kinds as error:  # a user's function may raise anything
        if isinstance(error, Exception):
            return error
        return RuntimeError(f"ended by {error!r}")


class Workers:
    """Pool of ``count`` processes, started at the first call; they end with the program, even if that is killed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def pool(self, calls: Sequence[Callable[[], object]]) -> ProcessPoolExecutor:
        """Return the running pool; a new one imports what the calls need before their time limit starts."""
        if self._pool is None:
            # Spawn, because a forked process with PyTorch's threads can hang
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, mp_context=context, initializer=_end_with_parent)
            self._kill_pool = weakref.finalize(self, _kill, self._pool)
            imports = [self._pool.submit(_import, calls) for _ in range(self.count)]
            for future in imports:
                future.exception()  # waits; a pool that cannot start raises at the first call
        return self._pool

    def kill(self) -> None:
        """Kill all processes; the next call starts new ones."""
        if self._pool is not None:
            self._kill_pool()
            self._pool = None

    def __getstate__(self) -> dict[str, int | None]:
        return {"count": self.count, "_pool": None}  # a copy starts its own processes


def run_in_processes(workers: Workers, calls: Sequence[Callable[[], T]], timeout: float | None) -> list[T | Exception]:
    """Like `run_in_threads`, in processes: a late call is killed, and a process that dies gives an error.

    Raises:
        TypeError: if a call cannot be sent to a process.
    """
    # Refuse calls that cannot be sent
    try:
        pickle.dumps(calls)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"a reward function that runs in processes must be importable, and its columns picklable ({error}): "
            "define it at the top of a module, or set processes=False"
        ) from error

    # Run them; if a process dies, so does the pool, and with it all calls that are not done
    pool = workers.pool(calls)
    deadline = _deadline(timeout)
    outcomes: list[T | Exception] = []
    try:
        futures = [pool.submit(_in_child, call, timeout) for call in calls]
        for future in futures:
            outcomes.append(_result(future, timeout, deadline))
    except BrokenProcessPool:
        death = RuntimeError(
            "a worker process died: it was killed, ran out of memory, or the script has no `if __name__ == '__main__':`"
        )
        outcomes += [death] * (len(calls) - len(outcomes))

    # A late call goes on in its process, and a pool that died is of no use
    if any(isinstance(outcome, (TimeoutError, RuntimeError)) for outcome in outcomes):
        workers.kill()
    return outcomes


def _deadline(timeout: float | None) -> float | None:
    """Return the time of `time.monotonic` at which calls that start now are late; None for no limit."""
    if timeout is None:
        return None
    return time.monotonic() + timeout


def _result(future: Future[T | Exception], timeout: float | None, deadline: float | None) -> T | Exception:
    """Wait for a call and return its result; if the call is late, return a `TimeoutError` that says the ``timeout``."""
    remaining_seconds = None
    if deadline is not None:
        remaining_seconds = max(0.0, deadline - time.monotonic())
    try:
        return future.result(remaining_seconds)
    except TimeoutError:
        return TimeoutError(f"the call took longer than its time limit of {timeout} s")


class ChildError(Exception):
    """Error raised by a function in a process; only its message is returned, as an exception may not be picklable."""


def _in_child(call: Callable[[], T], timeout: float | None) -> T | Exception:
    """Return the call's result or a `ChildError`; runs in a process."""
    if timeout is not None:
        # A last resort: it ends the process even if no thread of it can run, and its parent does not kill it
        faulthandler.dump_traceback_later(2 * timeout, exit=True)
    try:
        return call()
    except (Exception, SystemExit) as error:  # returned to the parent, which decides
        return ChildError(f"{type(error).__name__}: {error}")
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end_with_parent() -> None:
    """Make this process and all that it starts end with its parent, even if the parent is killed."""
    os.setsid()  # a new process group, killed as one
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    """Wait for the end of the parent; then kill this process's group."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _kill(pool: ProcessPoolExecutor) -> None:
    """Kill the processes of a pool, and all that they started."""
    processes = pool._processes or {}  # by process id, which is the group's id, too
    for process_id, process in list(processes.items()):
        try:
            os.killpg(process_id, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or has not created its process group yet
            process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


def _import(calls: Sequence[Callable[[], object]]) -> None:
    """Do nothing: unpickling the calls in this process imports what they need."""
