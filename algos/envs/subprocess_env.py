"""One process per environment: for slow environments, and for ones that crash, hang or return invalid values."""

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
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import CloudpickleWrapper, batch_space, concatenate, create_empty_array, iterate

from algos.envs.env_worker import Description, Info, Start, StepAnswer
from textenv.rendering import printable

FAILED = "worker_failed"
"""Key of ``info``: bool ``[num_envs]``, True for slots whose step failed and must not be learnt from."""

_SECONDS_TO_CLOSE = 5.0
"""Time for all environments to close themselves, before their processes are killed."""

_PROGRAM = """import sys
sys.path[:] = sys.argv[1:]
del sys.argv[1:]
from algos.envs.env_worker import serve
serve({}, {}, {})"""
"""Program of an environment's process; its arguments are the paths to import from."""


class WorkerError(Exception):
    """Failure of an environment, with its cause as message."""


class EnvironmentFailure(RuntimeError):  # noqa: N818  (what happened, as `WorkerError` is its cause)
    """Failure of an environment more often than it is restarted."""


class SubprocessVectorEnv(VectorEnv):
    """Vector environment with one process per environment; a failed one is logged and replaced, the others continue.

    It steps like Gymnasium's ``SyncVectorEnv`` in SAME_STEP mode. An environment fails if its process dies, it raises,
    it exceeds the time limit, or it returns an invalid observation, a reward that is not finite, or a flag that is not
    a bool. Its process is then killed with all children, and a new environment is reset with a seed derived from the
    last one. The log names the environment, the seed, the episode and the step. To the caller, the episode is truncated
    at its last good observation, with reward 0 and ``info["worker_failed"]`` True; `algos.collect` masks that step. A
    failed reset with a seed is first tried again with the same seed.

    The processes end with the parent, even after a crash. They do not run the caller's script, so no
    ``if __name__ == "__main__":`` is needed. POSIX only.

    Args:
        env_fns: constructors of the environments; functions and classes that a process cannot import are pickled.
        timeout: time limit for making, resetting or stepping an environment, seconds.
        max_restarts: maximum restarts of each environment in total.

    Raises:
        ValueError: if a limit is out of range, an environment cannot be made, or the spaces differ.

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
                f"timeout is {timeout}, max_restarts is {max_restarts}, with {len(env_fns)} environments: expected a "
                "timeout above 0, max_restarts of at least 0, and at least one environment"
            )
        self.timeout = timeout
        self.max_restarts = max_restarts
        self.num_envs = len(env_fns)
        self._env_fns = list(env_fns)
        self._folder = os.getcwd()  # kept for processes that replace others, as the program may change it
        self.processes: list[_Process] = []
        self._kill_processes = weakref.finalize(self, _kill_all, self.processes)

        # For each slot: causes of failures, where it is, for the log, and the latest observation
        self._failures: list[list[str]] = [[] for _ in env_fns]
        self._seeds: list[int | None] = [None] * self.num_envs
        self._episodes = np.zeros(self.num_envs, dtype=int)
        self._steps = np.zeros(self.num_envs, dtype=int)
        self._latest: list[object] = [None] * self.num_envs

        # Start all processes before waiting for the first
        for env_fn in env_fns:
            self.processes.append(_Process(env_fn, timeout, self._folder))
        try:
            descriptions = [process.answer() for process in self.processes]
        except WorkerError as error:
            self.close()
            raise ValueError(f"an environment cannot be made in its own process: {error}") from error

        spaces = [_spaces(description) for description in descriptions]
        if any(pair != spaces[0] for pair in spaces):
            self.close()
            raise ValueError(f"the environments' spaces differ: {', '.join(map(str, spaces))}")
        self.single_observation_space, self.single_action_space = spaces[0]
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = descriptions[0]["metadata"] | {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = descriptions[0]["render_mode"]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, object] | None = None
    ) -> Start:
        """Reset all environments, with seeds counted up from one seed or with one seed each.

        Raises:
            ValueError: if the number of seeds is wrong, or a ``reset_mask`` is given (environments autoreset).
            EnvironmentFailure: if an environment fails more than ``max_restarts`` times.
        """
        self._check_open()
        if options is not None and "reset_mask" in options:
            raise ValueError("options['reset_mask'] is given, but each environment resets itself (SAME_STEP)")
        if seed is None:
            seed = [None] * self.num_envs
        elif isinstance(seed, (int, np.integer)):
            seed = range(int(seed), int(seed) + self.num_envs)
        new_seeds = [None if slot_seed is None else int(slot_seed) for slot_seed in seed]
        if len(new_seeds) != self.num_envs:
            raise ValueError(f"{len(new_seeds)} seeds are given, expected one for each of {self.num_envs} environments")

        # Without a new seed an environment keeps its random state, so its last seed still identifies it in the log.
        for slot, new_seed in enumerate(new_seeds):
            if new_seed is None:
                self._episodes[slot] += 1
            else:
                self._seeds[slot] = new_seed
                self._episodes[slot] = 1
            self._steps[slot] = 0

        # Ask all before waiting for the first
        for new_seed, process in zip(new_seeds, self.processes, strict=True):
            process.ask("reset", new_seed, options)
        info: Info = {}
        for slot, process in enumerate(self.processes):
            try:
                observation, slot_info = process.answer()
            except WorkerError as error:
                # Try a given seed again; otherwise the random state is lost, so derive a new seed from the last one.
                seed_again = self._seeds[slot]
                if new_seeds[slot] is None:
                    seed_again = _next_seed(seed_again)
                observation, slot_info = self._replace(slot, error, seed=seed_again, options=options)
            self._latest[slot] = observation
            info = self._add_info(info, slot_info, slot)
        return self._observations(), info

    def step(self, actions: object) -> tuple[object, np.ndarray, np.ndarray, np.ndarray, Info]:
        """Step all environments; a failed one is replaced, see the class.

        Raises:
            EnvironmentFailure: if an environment fails more than ``max_restarts`` times; all processes have ended then.
        """
        self._check_open()
        for process, action in zip(self.processes, iterate(self.action_space, actions), strict=True):
            process.ask("step", action)
        info: Info = {}
        reward = np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, dtype=bool)
        truncated = np.zeros(self.num_envs, dtype=bool)
        for slot, process in enumerate(self.processes):
            try:
                answer = process.answer()
                self._count_step(slot, answer)
            except WorkerError as error:
                answer = self._truncate(slot, error)
                info = self._add_info(info, {FAILED: True}, slot)
            observation, reward[slot], terminated[slot], truncated[slot], slot_info, next_episode = answer

            # At the end of an episode, the next one's first observation and info take their place
            if next_episode is not None:
                info = self._add_info(info, {"final_obs": observation, "final_info": slot_info}, slot)
                observation, slot_info = next_episode
            self._latest[slot] = observation
            info = self._add_info(info, slot_info, slot)
        return self._observations(), reward, terminated, truncated, info

    def close_extras(self, **options: object) -> None:
        """Let the environments close themselves, for up to 5 seconds, then end all processes."""
        for process in self.processes:
            process.pipe.close()
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline - time.monotonic()))
        self._kill_processes()

    def _count_step(self, slot: int, answer: StepAnswer) -> None:
        """Count a slot's step, and its episode if that has ended."""
        self._steps[slot] += 1
        next_episode = answer[-1]
        if next_episode is not None:
            self._episodes[slot] += 1
            self._steps[slot] = 0

    def _truncate(self, slot: int, error: WorkerError) -> StepAnswer:
        """Replace a failed process; returns a step that truncates the episode at its last good observation."""
        last_good = self._latest[slot]
        next_episode = self._replace(slot, error, seed=_next_seed(self._seeds[slot]))
        return last_good, 0.0, False, True, {}, next_episode

    def _replace(
        self, slot: int, error: WorkerError, *, seed: int | None, options: dict[str, object] | None = None
    ) -> Start:
        """Replace a failed process; returns the new environment's first observation and info."""
        while True:
            self._report(slot, error, seed)
            self.processes[slot].kill()
            self._seeds[slot] = seed
            self._episodes[slot] = 1
            self._steps[slot] = 0
            try:
                process = _Process(self._env_fns[slot], self.timeout, self._folder)
                self.processes[slot] = process
                if _spaces(process.answer()) != (self.single_observation_space, self.single_action_space):
                    raise WorkerError("after a restart, its spaces differ")
                process.ask("reset", seed, options)
                return process.answer()
            except WorkerError as restart_error:
                error = restart_error
                seed = _next_seed(seed)

    def _report(self, slot: int, error: WorkerError, seed: int | None) -> None:
        """Log a failure and the seed of the restart.

        Raises:
            EnvironmentFailure: if the environment failed more than ``max_restarts`` times; all processes have ended.
        """
        where = f"seed {self._seeds[slot]}, episode {self._episodes[slot]}, after {self._steps[slot]} steps"
        failures = self._failures[slot]
        failures.append(" ".join(str(error).split()))

        # Too many failures end the training
        if len(failures) > self.max_restarts:
            self._kill_processes()
            self.closed = True
            causes = ", ".join(f"{cause} ({count} times)" for cause, count in Counter(failures).most_common())
            raise EnvironmentFailure(
                f"environment {slot} failed {len(failures)} times, max_restarts is {self.max_restarts}, and all "
                f"processes were ended: {causes}, the last time with {where}; mend it, or raise max_restarts or the "
                f"time limit of {self.timeout} s"
            ) from error
        logging.getLogger(__name__).warning(
            "environment %d failed: %s (%s); restart %d of %d, seed %s, the failed step is masked out",
            slot,
            failures[-1],
            where,
            len(failures),
            self.max_restarts,
            seed,
        )

    def _observations(self) -> object:
        """Batch the latest observation of each slot, as new arrays."""
        empty = create_empty_array(self.single_observation_space, n=self.num_envs, fn=np.zeros)
        assert empty is not None  # it is, for a space that Gymnasium does not know
        return concatenate(self.single_observation_space, self._latest, empty)

    def _check_open(self) -> None:
        if self.closed:
            raise gymnasium.error.ClosedEnvironmentError(f"{type(self).__name__} is closed: make a new one")


class _Process:
    """Process of one environment (`algos.envs.env_worker`); starts to make the environment at once.

    Args:
        env_fn: constructor of the environment.
        timeout: time limit from a request to its answer, seconds.
        folder: working folder, from which modules can be imported.
    """

    def __init__(self, env_fn: Callable[[], gymnasium.Env], timeout: float, folder: str) -> None:
        self.timeout = timeout
        self.number = 0
        """Number of the last request."""
        self.asked = 0.0
        """Time of the last request, seconds of the monotonic clock."""
        self.ended = False
        """Whether the process was killed."""
        self.pipe, worker_pipe = multiprocessing.Pipe()
        program = _PROGRAM.format(worker_pipe.fileno(), os.getpid(), timeout)
        import_paths = [path or folder for path in sys.path]
        with worker_pipe:
            # A fork would hang with PyTorch's threads, and a process spawned by multiprocessing would run the caller's
            # script. In its own session, the process gets no Ctrl-C and can be killed with all its children.
            self.popen = subprocess.Popen(
                [sys.executable, "-c", program, *import_paths, folder],
                stdin=subprocess.DEVNULL,
                pass_fds=[worker_pipe.fileno()],
                start_new_session=True,
                cwd=folder,
            )
        self.ask("make", CloudpickleWrapper(env_fn))

    def ask(self, method: str, *arguments: object) -> None:
        """Request a call of a method of `algos.envs.env_worker.Worker`."""
        self.number += 1
        self.asked = time.monotonic()
        with contextlib.suppress(OSError):  # `answer` raises the error
            self.pipe.send((self.number, method, arguments))

    def answer(self) -> Any:
        """Return the result of the last request.

        Raises:
            WorkerError: if the call failed or no answer arrived.
        """
        try:
            succeeded, content = self._receive()
        except TimeoutError as error:
            raise WorkerError(f"no answer within {self.timeout} s") from error
        except (EOFError, OSError) as error:
            self.kill()
            status = self.popen.returncode
            how = f"with status {status}"
            if status < 0:
                how = f"by {signal.Signals(-status).name}"
            raise WorkerError(f"its process ended {how}") from error
        except Exception as error:  # an object that cannot be unpickled, or an incomplete message
            raise WorkerError(f"its answer cannot be read: {type(error).__name__}: {error}") from error
        if not succeeded:
            raise WorkerError(printable(content))  # an environment's text must not control a terminal
        return content

    def _receive(self) -> tuple[bool, Any]:
        """Wait for the answer to the last request: whether the call succeeded, and its result or error message."""
        while self.pipe.poll(max(0.0, self.asked + self.timeout - time.monotonic())):
            number, succeeded, content = self.pipe.recv()
            if number == self.number:  # not an old answer to an interrupted call
                return succeeded, content
        raise TimeoutError

    def kill(self) -> None:
        """Kill the process and all its children, only once: its id may be reused later."""
        self.pipe.close()
        if not self.ended:
            self.ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()


def _kill_all(processes: list[_Process]) -> None:
    for process in processes:
        process.kill()


def _spaces(description: Description) -> tuple[gymnasium.Space, gymnasium.Space]:
    """Observation and action space, from what `algos.envs.env_worker.Worker.make` returned."""
    return description["observation_space"], description["action_space"]


def _next_seed(seed: int | None) -> int | None:
    """Derive a new seed from a seed; None stays None."""
    if seed is None:
        return None
    return int(np.random.SeedSequence(seed).generate_state(1)[0])
