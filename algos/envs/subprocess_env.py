"""Environments in processes of their own: for slow ones, and for such as crash, hang or return rubbish."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import CloudpickleWrapper, batch_space, concatenate, create_empty_array, iterate

logger = logging.getLogger(__name__)

FAILED = "worker_failed"
"""Key of ``info``: bool ``[num_envs]``, slots whose step failed. What stands there of the step means nothing."""
CLOSING = 5.0
"""Seconds that environments have to close themselves."""
_PROGRAM = """import sys
sys.path[:] = sys.argv[1:]
del sys.argv[1:]
from algos.envs.env_worker import serve
serve({}, {}, {})"""


class SubprocessVectorEnv(VectorEnv):
    """One process for each environment; one that fails is reported and replaced, and the others go on.

    It steps as Gymnasium's ``SyncVectorEnv`` does in SAME_STEP mode. An environment fails if its process dies, it
    raises, takes longer than the limit, or returns what is no observation of its space, no finite number or no bool.
    Then its process is killed, with all that it started; a new one is reset by a seed made from the last one; a line
    in the log names the environment, the seed, the episode and the step. For whoever steps it the episode was truncated
    at its last good observation, with reward 0 and ``info["worker_failed"]`` True; `algos.collect` masks that step.
    A reset that fails is tried again with the same seed first.

    Processes end with this one, however it ends. They run nothing of the caller's script, and need no
    ``if __name__ == "__main__":``. POSIX only.

    Args:
        env_fns: make the environments; functions and classes that a process cannot import are sent there.
        timeout: seconds that making, resetting or stepping an environment may take.
        max_restarts: of each environment, in all.

    Raises:
        ValueError: on limits out of range, an environment that cannot be made, or spaces that differ.

    Example:
        >>> import gymnasium
        >>> with contextlib.closing(SubprocessVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)) as env:
        ...     env.reset(seed=0)[0].shape
        (2, 4)
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], gymnasium.Env]], *, timeout: float = 60.0, max_restarts: int = 10
    ) -> None:
        if not (math.isfinite(timeout) and timeout > 0 and max_restarts >= 0 and env_fns):
            raise ValueError(
                f"timeout is {timeout}, max_restarts {max_restarts}, with {len(env_fns)} environments: expected a time "
                "above 0, a number of at least 0, and at least one environment"
            )
        self.timeout, self.max_restarts, self.num_envs = timeout, max_restarts, len(env_fns)
        self._env_fns = list(env_fns)
        self.processes: list[_Process] = []
        self._end = weakref.finalize(self, _kill_all, self.processes)
        self._failures: list[list[str]] = [[] for _ in env_fns]
        self._seeds: list[int | None] = [None] * self.num_envs
        self._episodes, self._steps = np.zeros(self.num_envs, dtype=int), np.zeros(self.num_envs, dtype=int)
        self._last: list[Any] = [None] * self.num_envs
        for env_fn in env_fns:  # all start before one is waited for
            self.processes.append(_Process(env_fn, timeout))
        try:
            made = [process.answer() for process in self.processes]
        except WorkerError as error:
            self.close()
            raise ValueError(f"an environment cannot be made in a process of its own: {error}") from error
        self._made = made[0]
        if any(_spaces(one) != _spaces(made[0]) for one in made):
            self.close()
            raise ValueError(f"the environments' spaces differ: {', '.join(str(_spaces(one)) for one in made)}")
        self.single_observation_space, self.single_action_space = _spaces(made[0])
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = made[0]["metadata"] | {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = made[0]["render_mode"]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, by seeds counted up from one or by one for each.

        Raises:
            ValueError: on another number of seeds, or a ``reset_mask``, for each resets itself.
            RuntimeError: if one fails too often.
        """
        self._check_open()
        if options is not None and "reset_mask" in options:
            raise ValueError("options['reset_mask'] is given, but each environment resets itself (SAME_STEP)")
        seeds: Sequence[int | None]
        if seed is None or isinstance(seed, (int, np.integer)):
            seeds = [None if seed is None else int(seed) + i for i in range(self.num_envs)]
        else:
            seeds = seed
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds are given, expected one for each of {self.num_envs} environments")
        # Without a seed an environment goes on with its own random numbers: what it was seeded by still names it.
        self._episodes = np.where([own is None for own in seeds], self._episodes + 1, 1)
        self._seeds = [before if own is None else int(own) for own, before in zip(seeds, self._seeds, strict=True)]
        self._steps[:] = 0
        for own, process in zip(seeds, self.processes, strict=True):
            process.ask("reset", None if own is None else int(own), options)
        info: dict[str, Any] = {}
        for slot, process in enumerate(self.processes):
            try:
                self._last[slot], own_info = process.answer()
            except WorkerError as error:
                # A seed that was given is tried again; where its numbers had gone on, another one is made of it.
                seed_again = self._seeds[slot] if seeds[slot] is not None else _next_seed(self._seeds[slot])
                self._last[slot], own_info = self._replace(slot, error, seed=seed_again, options=options)
            info = self._add_info(info, own_info, slot)
        return self._observations(), info

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all environments; one that fails is replaced, see the class.

        Raises:
            RuntimeError: if one fails too often; all processes have ended then.
        """
        self._check_open()
        for process, action in zip(self.processes, iterate(self.action_space, actions), strict=True):
            process.ask("step", action)
        info: dict[str, Any] = {}
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, dtype=bool), np.zeros(self.num_envs, dtype=bool)
        for slot, process in enumerate(self.processes):
            before = self._last[slot]
            try:
                answer = process.answer()
            except WorkerError as error:
                following = self._replace(slot, error, seed=_next_seed(self._seeds[slot]))
                answer = before, 0.0, False, True, {}, following
                info = self._add_info(info, {FAILED: True}, slot)
            else:
                self._steps[slot] += 1
                if answer[5] is not None:
                    self._episodes[slot] += 1
                    self._steps[slot] = 0
            final, reward[slot], terminated[slot], truncated[slot], own_info, following = answer
            self._last[slot] = final
            if following is not None:
                info = self._add_info(info, {"final_obs": final, "final_info": own_info}, slot)
                self._last[slot], own_info = following
            info = self._add_info(info, own_info, slot)
        return self._observations(), reward, terminated, truncated, info

    def close_extras(self, **options: Any) -> None:
        """Let the environments close themselves, then end every process."""
        for process in self.processes:
            process.close()
        end = time.monotonic() + CLOSING
        for process in self.processes:
            process.wait(end)
        self._end()

    def _replace(
        self, slot: int, error: WorkerError, *, seed: int | None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A new process in place of one that failed; its first observation and info.

        Raises:
            RuntimeError: if it fails too often.
        """
        while True:
            self._report(slot, error, seed)
            self.processes[slot].kill()
            self._seeds[slot], self._episodes[slot], self._steps[slot] = seed, 1, 0
            try:
                self.processes[slot] = process = _Process(self._env_fns[slot], self.timeout)
                if _spaces(process.answer()) != _spaces(self._made):
                    raise WorkerError("made again, it has other spaces")
                process.ask("reset", seed, options)
                return process.answer()
            except WorkerError as again:
                error, seed = again, _next_seed(seed)

    def _report(self, slot: int, error: WorkerError, seed: int | None) -> None:
        """Log a failure.

        Raises:
            RuntimeError: if it was one too many.
        """
        where = f"seed {self._seeds[slot]}, its episode {self._episodes[slot]}, after {self._steps[slot]} steps"
        failures = self._failures[slot]
        failures.append(f"{error} ({where})")
        if len(failures) > self.max_restarts:
            self._end()
            self.closed = True
            told = "\n".join(f"{number}. {failure}" for number, failure in enumerate(failures, start=1))
            raise RuntimeError(
                f"environment {slot} failed {len(failures)} times, max_restarts is {self.max_restarts}; all processes "
                f"were ended. Raise the limits if it may, or find the cause:\n{told}"
            ) from error
        logger.warning(
            "environment %d failed: %s; restart %d of %d, seed %s, its step is left out",
            slot, failures[-1], len(failures), self.max_restarts, seed,
        )  # fmt: skip

    def _observations(self) -> Any:
        empty: Any = create_empty_array(self.single_observation_space, n=self.num_envs, fn=np.zeros)
        return concatenate(self.single_observation_space, self._last, empty)

    def _check_open(self) -> None:
        if self.closed:
            raise gymnasium.error.ClosedEnvironmentError(f"{type(self).__name__} is closed: make it again")


class WorkerError(Exception):
    """What became of an environment, in words."""


class _Process:
    """One environment's process (`algos.envs.env_worker`), which starts to make it.

    Args:
        env_fn: makes the environment.
        timeout: seconds from a question to its answer.
    """

    def __init__(self, env_fn: Callable[[], gymnasium.Env], timeout: float) -> None:
        self.timeout, self.number, self.asked, self.ended = timeout, 0, 0.0, False
        self.pipe, theirs = multiprocessing.Pipe()
        program = _PROGRAM.format(theirs.fileno(), os.getpid(), timeout)
        with theirs:
            # Neither forked, which hangs with PyTorch's threads, nor spawned by multiprocessing, which would run the
            # caller's script. A session of its own: Ctrl-C is for the parent, and what it starts can be killed with it.
            self.popen = subprocess.Popen(
                [sys.executable, "-c", program, *(path or os.getcwd() for path in sys.path)],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self.ask("make", CloudpickleWrapper(env_fn))

    def ask(self, method: str, *arguments: Any) -> None:
        """Call a method of `algos.envs.env_worker.Worker` there."""
        self.number, self.asked = self.number + 1, time.monotonic()
        with contextlib.suppress(OSError):  # whoever waits for the answer is told
            self.pipe.send((self.number, method, arguments))

    def answer(self) -> Any:
        """What the last question's answer is.

        Raises:
            WorkerError: if there is none.
        """
        try:
            works, content = self._receive()
        except TimeoutError as error:
            raise WorkerError(f"no answer within {self.timeout} s") from error
        except (EOFError, OSError) as error:
            self.kill()
            status = self.popen.returncode
            ended = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
            raise WorkerError(f"its process ended {ended}") from error
        except Exception as error:  # an object that cannot be made here, or half a message
            raise WorkerError(f"its answer cannot be read: {type(error).__name__}: {error}") from error
        if not works:
            raise WorkerError(content)
        return content

    def _receive(self) -> tuple[bool, Any]:
        while self.pipe.poll(max(0.0, self.asked + self.timeout - time.monotonic())):
            number, works, content = self.pipe.recv()
            if number == self.number:  # not one that an interrupted call has left behind
                return works, content
        raise TimeoutError

    def close(self) -> None:
        """Tell it to end."""
        self.pipe.close()

    def wait(self, end: float) -> None:
        """Wait until it has ended, or until that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(max(0.0, end - time.monotonic()))

    def kill(self) -> None:
        """End it and all that it started, once: later its number may be another's."""
        self.pipe.close()
        if not self.ended:
            self.ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()


def _kill_all(processes: list[_Process]) -> None:
    for process in processes:
        process.kill()


def _spaces(made: dict[str, Any]) -> tuple[Any, Any]:
    return made["observation_space"], made["action_space"]


def _next_seed(seed: int | None) -> int | None:
    """Another seed, made from this one."""
    return None if seed is None else int(np.random.SeedSequence(seed).generate_state(1)[0])
