"""Calls in threads or in processes, in order and within a time limit."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any


def run_in_threads(calls: Sequence[Callable[[], Any]], timeout: float | None) -> list[Any]:
    """Run all calls at a time; returns, in order, what each returned or the exception.

    A call beyond ``timeout`` seconds is a `TimeoutError`; its thread is left behind and cannot keep the program alive.
    """
    outcomes: list[Any] = [None] * len(calls)
    threads = [
        threading.Thread(target=_keep, args=(outcomes, index, call), daemon=True) for index, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    end = None if timeout is None else time.monotonic() + timeout
    late = []
    for thread in threads:
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
        late.append(thread.is_alive())
    return [_late(timeout) if slow else outcome for slow, outcome in zip(late, list(outcomes), strict=True)]


def _keep(outcomes: list[Any], index: int, call: Callable[[], Any]) -> None:
    try:
        outcomes[index] = call()
    except BaseException as error:  # handed to the caller, which decides
        outcomes[index] = error if isinstance(error, Exception) else RuntimeError(f"ended by {error!r}")


class Workers:
    """Processes for calls, started at the first one and killed with the program.

    Args:
        count: processes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: Any = None

    def pool(self, function: Any) -> Any:
        """The running pool; a new one has imported the function before any time is taken."""
        if self._pool is None:
            # Spawned: a fork of a process with PyTorch's threads can hang.
            self._pool = multiprocessing.get_context("spawn").Pool(self.count)
            self._end = weakref.finalize(self, self._pool.terminate)
            self._pool.map(_import, [function] * self.count, chunksize=1)
        return self._pool

    def kill(self) -> None:
        """End all processes, whatever they do; the next call starts new ones."""
        if self._pool is not None:
            self._end()
            self._pool = None

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count, "_pool": None}


def run_in_processes(workers: Workers, calls: Sequence[Callable[[], Any]], timeout: float | None) -> list[Any]:
    """As `run_in_threads`, in processes: a call beyond its time is killed.

    Raises:
        TypeError: if a call cannot be sent to a process.
    """
    try:
        pickle.dumps(calls)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"a reward function that runs in processes must be importable, and its columns picklable ({error}): "
            "define it at the top of a module, or leave processes=False"
        ) from error
    pool = workers.pool(calls)
    pending = [pool.apply_async(call) for call in calls]
    end = None if timeout is None else time.monotonic() + timeout
    outcomes = []
    for one in pending:
        try:
            outcomes.append(one.get(None if end is None else max(0.0, end - time.monotonic())))
        except multiprocessing.TimeoutError:
            outcomes.append(_late(timeout))
        except Exception as error:  # the function's own, carried over
            outcomes.append(error)
    if any(isinstance(outcome, TimeoutError) for outcome in outcomes):
        workers.kill()
    return outcomes


def _import(function: Any) -> None:
    """That it was unpickled here is all."""


def _late(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"the call took longer than its time limit of {timeout} s")
