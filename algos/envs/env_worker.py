"""Worker process of one environment; only a `SubprocessVectorEnv` communicates with it.

It imports neither torch nor the caller's script. It ends with its parent, even after a crash: a thread polls for the
parent and kills this process and all its children. If a call blocks all Python threads, a watchdog outside the
interpreter ends the process after about twice the time limit.
"""

import contextlib
import copy
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypedDict, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces

from textenv.processes import end_if_forked
from textenv.rendering import printable

Returned = TypeVar("Returned")
Info = dict[str, object]
Start = tuple[object, Info]
"""First observation of an episode, and its info."""
StepAnswer = tuple[object, float, bool, bool, Info, Start | None]
"""What `Worker.step` returns."""


class Description(TypedDict):
    """What a vector environment needs to know of an environment."""

    observation_space: spaces.Space
    action_space: spaces.Space
    metadata: dict[str, object]
    render_mode: str | None


def serve(descriptor: int, parent: int, timeout: float) -> None:
    """Answer requests until the pipe is closed.

    A request is ``(number, method of Worker, arguments)``, its answer ``(number, success, result or error message)``.

    Args:
        descriptor: file descriptor of this end of the pipe.
        parent: process id of the parent.
        timeout: time limit per answer, seconds.
    """
    os.set_inheritable(descriptor, False)  # else subprocesses of the environment would keep the pipe open
    threading.Thread(target=_watch, args=(parent, timeout), daemon=True).start()
    # Ending a job sends SIGTERM to every process; only the parent should handle it.
    signal.signal(signal.SIGTERM, lambda number, frame: None)

    # Answer one request at a time
    worker = Worker()
    methods: dict[str, Callable[..., object]] = {"make": worker.make, "reset": worker.reset, "step": worker.step}
    with Connection(descriptor) as pipe, contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, method, arguments = pipe.recv()
            succeeded, content = _call(methods[method], arguments)
            _send(pipe, number, succeeded, content)  # within the time limit: the parent waits for the whole message
    worker.close()


class Worker:
    """One environment with same-step autoreset and checked return values."""

    def __init__(self) -> None:
        self.env: gymnasium.Env | None = None

    def make(self, env_fn: Callable[[], gymnasium.Env]) -> Description:
        """Make the environment; returns the spaces and metadata for the vector environment."""
        env = env_fn()
        self.env = env
        return {
            "observation_space": env.observation_space,
            "action_space": env.action_space,
            "metadata": dict(env.metadata),
            "render_mode": env.render_mode,
        }

    def reset(self, seed: int | None, options: dict[str, object] | None) -> Start:
        """Reset the environment; returns the first observation and its info."""
        assert self.env is not None
        observation, info = _check_tuple(self.env.reset(seed=seed, options=options), 2, "reset()")
        check_observation(self.env.observation_space, observation)
        _check_info(info)
        return observation, info

    def step(self, action: object) -> StepAnswer:
        """Step the environment, and reset it at the end of an episode.

        Returns:
            The five values of ``env.step``, then the next episode's observation and info, or None if none begins.
        """
        assert self.env is not None
        observation, reward, terminated, truncated, info = _check_tuple(self.env.step(action), 5, "step()")
        check_observation(self.env.observation_space, observation)
        check_paid_reward(reward)
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, (bool, np.bool_)):
                raise ValueError(f"{name} is {flag!r}, expected True or False")
        _check_info(info)
        next_episode = None
        if terminated or truncated:
            observation, info = copy.deepcopy((observation, info))  # the reset may write into the same arrays
            next_episode = self.reset(None, None)
        return observation, float(reward), bool(terminated), bool(truncated), info, next_episode

    def close(self) -> None:
        """Close the environment, if there is one."""
        if self.env is not None:
            self.env.close()


def check_observation(space: spaces.Space, observation: Any) -> None:
    """Raise a ValueError unless an observation has the space's shape and dtype kind and is finite.

    Bounds are not checked, because many environments exceed them by a rounding error.
    """
    # Numbers
    if isinstance(space, spaces.Box):
        array = np.asarray(observation)
        if array.shape != space.shape:
            raise ValueError(f"the observation has shape {array.shape}, expected {space.shape}")
        if not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise ValueError(f"the observation has dtype {array.dtype}, expected {space.dtype}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"the observation is not finite: {array}")

    # Several observations, checked one by one
    elif isinstance(space, spaces.Dict):
        if not isinstance(observation, dict) or observation.keys() != space.keys():
            raise ValueError(f"the observation is {observation!r}, expected a dictionary of {', '.join(space)}")
        for name, inner_space in space.items():
            check_observation(inner_space, observation[name])
    elif isinstance(space, spaces.Tuple):
        parts = _check_tuple(observation, len(space.spaces), "the observation")
        for inner_space, part in zip(space, parts, strict=True):
            check_observation(inner_space, part)

    elif not space.contains(observation):
        raise ValueError(f"the observation is {observation!r}, expected one of {space}")


def check_paid_reward(reward: object) -> None:
    """Raise a ValueError unless a reward is a finite number."""
    array = np.asarray(reward)
    if array.ndim or array.dtype.kind not in "biuf" or not np.isfinite(array):
        raise ValueError(f"the reward is {reward!r}, expected a finite number")


def _check_info(info: object) -> None:
    """Raise a ValueError unless an info is a dictionary."""
    if not isinstance(info, dict):
        raise ValueError(f"info is {info!r}, expected a dictionary")


def _check_tuple(returned: Returned, count: int, what: str) -> Returned:
    """Return what an environment returned, or raise a ValueError unless it is a tuple or list of ``count`` values."""
    if not isinstance(returned, (tuple, list)) or len(returned) != count:
        raise ValueError(f"{what} is {returned!r}, expected a tuple of {count}")
    return returned


def _call(method: Callable[..., object], arguments: tuple[object, ...]) -> tuple[bool, object]:
    """Call a method; returns whether it succeeded, and its result or an error message. A traceback goes to stderr."""
    process_id = os.getpid()
    try:
        return True, method(*arguments)
    except BaseException as error:  # an environment may raise anything, even SystemExit; the parent handles it
        print(printable(traceback.format_exc()), file=sys.stderr, flush=True)
        return False, f"{type(error).__name__}: {error}"
    finally:
        end_if_forked(process_id, "an environment")


def _send(pipe: Connection, number: int, succeeded: bool, content: object) -> None:
    """Send the answer to a request; if its content cannot be pickled, send an error message."""
    try:
        pipe.send((number, succeeded, content))
    except (EOFError, ConnectionError):  # the parent is gone
        raise
    except Exception as error:  # for example, an info that cannot be pickled
        pipe.send((number, False, f"the returned value cannot be sent: {error}"))


def _watch(parent: int, timeout: float) -> None:
    """Put the watchdog off while Python's threads run; when the parent is gone, kill this process and its children."""
    while os.getppid() == parent:
        faulthandler.dump_traceback_later(2 * timeout, exit=True)
        time.sleep(min(0.5, timeout / 4))
    os.killpg(0, signal.SIGKILL)
