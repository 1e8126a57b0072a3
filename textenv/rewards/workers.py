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
from typing import Any


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Start a call in a daemon thread, in a copy of this context; the future's result may be its exception."""
    future: Future[Any] = Future()

    def run() -> None:
        future.set_result(attempt(call, (BaseException,)))

    threading.Thread(target=copy_context().run, args=(run,), daemon=True).start()
    return future


def run_in_threads(calls: Sequence[Callable[[], Any]], timeout: float | None) -> list[Any]:
    """Run all calls concurrently; return the results or exceptions, in order.

    A call beyond ``timeout`` seconds becomes a `TimeoutError`; its daemon thread is abandoned.
    """
    pending = [in_thread(call) for call in calls]
    end = None if timeout is None else time.monotonic() + timeout
    return [_result(future, timeout, end) for future in pending]


def attempt(call: Callable[[], Any], kinds: tuple[type[BaseException], ...] = (Exception, SystemExit)) -> Any:
    """Return the call's result, or its exception if it is of these kinds."""
    try:
        return call()
    except kinds as error:  # a user's function may raise anything
        return error if isinstance(error, Exception) else RuntimeError(f"ended by {error!r}")


class Workers:
    """Pool of ``count`` processes, started at the first call; they end with the program, even if that is killed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def pool(self, calls: Sequence[Callable[[], Any]]) -> ProcessPoolExecutor:
        """Return the running pool; a new one imports what the calls need before their time limit starts."""
        if self._pool is None:
            # Spawn, because a forked process with PyTorch's threads can hang.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, mp_context=context, initializer=_end_with_parent)
            self._end = weakref.finalize(self, _kill, self._pool)
            for ready in [self._pool.submit(_import, calls) for _ in range(self.count)]:
                ready.exception()  # a pool that cannot start raises at the first call
        return self._pool

    def kill(self) -> None:
        """Kill all processes; the next call starts new ones."""
        if self._pool is not None:
            self._end()
            self._pool = None

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count, "_pool": None}


def run_in_processes(workers: Workers, calls: Sequence[Callable[[], Any]], timeout: float | None) -> list[Any]:
    """Like `run_in_threads`, in processes: a late call is killed, and a process that dies gives an error.

    Raises:
        TypeError: if a call cannot be sent to a process.
    """
    try:
        pickle.dumps(calls)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"a reward function that runs in processes must be importable, and its columns picklable ({error}): "
            "define it at the top of a module, or set processes=False"
        ) from error
    pool = workers.pool(calls)
    end = None if timeout is None else time.monotonic() + timeout
    outcomes: list[Any] = []
    try:
        pending = [pool.submit(_in_child, call, timeout) for call in calls]
        for future in pending:
            outcomes.append(_result(future, timeout, end))
    except BrokenProcessPool:
        dead = RuntimeError(
            "a worker process died: it was killed, ran out of memory, or the script has no `if __name__ == '__main__':`"
        )
        outcomes += [dead] * (len(calls) - len(outcomes))
    if any(isinstance(outcome, (TimeoutError, RuntimeError)) for outcome in outcomes):
        workers.kill()
    return outcomes


def _result(future: Future[Any], timeout: float | None, end: float | None) -> Any:
    try:
        return future.result(None if end is None else max(0.0, end - time.monotonic()))
    except TimeoutError:
        return TimeoutError(f"the call took longer than its time limit of {timeout} s")


class ChildError(Exception):
    """Error raised by a function in a process; only its message is returned, as an exception may not be picklable."""


def _in_child(call: Callable[[], Any], timeout: float | None) -> Any:
    if timeout is not None:  # ends the process if no thread can run and its parent does not kill it
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
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _kill(pool: ProcessPoolExecutor) -> None:
    for group, process in list((pool._processes or {}).items()):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or has not created its process group yet
            process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


def _import(calls: Sequence[Callable[[], Any]]) -> None:
    """Do nothing: unpickling the calls in this process imports what they need."""
