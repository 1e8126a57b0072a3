"""State of a training run (steps, history, meters), its checkpoints, and the callbacks that watch it."""

import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict, cast, overload

import numpy as np
from tensordict import TensorDict
from torch import nn

from algos.config import Config, ReplayConfig
from algos.policies.random_streams import ACTIONS, stream_seed
from algos.ranks import collectives
from algos.storage.checkpoint import read_checkpoint, write_checkpoint
from algos.storage.env_state import (
    PartState,
    changed_arguments,
    env_state,
    note_settings,
    object_states,
    restore_objects,
    set_env_state,
    set_object_states,
    wrappers_with_statistics,
)
from algos.storage.run_files import METRICS, UNFINISHED
from algos.storage.run_folder import agent_steps, checkpoint_steps, checkpoints, run_folder_of
from algos.storage.serialization import attributes, set_attributes
from algos.storage.weights import frozen_checksum
from algos.training.learner import Learner
from algos.training.loggers import Logs, Values
from algos.training.metrics import EpisodeMeter, Metrics
from algos.training.reward_hacking import RewardHackingMonitor
from algos.training.save import plain_config
from algos.training.signals import Interrupted, Request
from algos.training.unsaved import UnsavedState
from textenv.acceleration import FAST_PATHS_IN_USE
from textenv.envs.vector_env import TextVectorEnv
from textenv.kl.penalty import KLPenalty
from textenv.rollout import is_episode_env
from textenv.state import global_random_states, set_global_random_states, set_states, states_of

logger = logging.getLogger(__name__)
OF_RANK = ("policy_generator", "policy_memory", "collector")
"""Parts of an agent's state that differ between ranks, like the environment."""
_Columns = tuple[tuple[str, type], ...]
"""Names of an iteration's metrics, and for each whether it is an int or a float."""


class HistoryState(TypedDict):
    """A `History` in a checkpoint."""

    kinds: Sequence[Sequence[Sequence[object]]]
    """Each distinct set of columns: their names, and whether they hold integers."""
    rows: np.ndarray
    """Number of the set of columns of each iteration."""
    values: np.ndarray
    """Values of all iterations, float64."""


Settings = dict[str, int | float | str | bool | None]
"""What a run was made with, by name, as plain values."""


class RunState(TypedDict):
    """Content of a checkpoint: what a resumed run needs."""

    algorithm: str
    steps: int
    seconds: float
    num_envs: int
    """Environment slots of all ranks."""
    seed: int
    config: NotRequired[Settings]
    """See `settings_of`. Absent before version 1.0."""
    history: HistoryState
    agent: dict[str, Any]
    """What the agent's ``state_dict`` returns, on rank 0."""
    frozen: NotRequired[int | None]
    """Checksum of the frozen weights, which a checkpoint leaves out."""
    environment: list[PartState] | None
    """State of the environment of rank 0; None if it cannot be saved."""
    called: NotRequired[dict[str, dict[str, object]] | None]
    """States of the objects that the wrappers of a control environment call; absent before version 1.0."""
    random: NotRequired[dict[str, Any]]
    """Global random generators of rank 0; absent before version 0.10."""
    ranks: NotRequired[list[dict[str, Any]]]
    """What differs on the other ranks: the parts `OF_RANK` of the agent, ``environment`` and ``random``."""
    callbacks: NotRequired[Sequence[Sequence[Any]]]
    """Name of the class and state of each callback; absent in runs of 0.3.0."""
    listeners: NotRequired[dict[str, dict[str, object]]]
    """States of other objects of the user; absent before version 0.10."""
    watches: list[dict[str, object]]
    """Attributes of the meters and of the reward-hacking monitor."""


def settings_of(agent: Learner[Config]) -> Settings:
    """Return an agent's hyper-parameters, functions by their names, and in text what its environment was made with.

    A coefficient of the KL that changes in the training is not among them: the run goes on with its own.
    """
    settings = plain_config(agent.config)
    if isinstance(agent.env, TextVectorEnv):
        settings |= agent.env.settings
    if isinstance(agent.penalty, KLPenalty) and not agent.penalty.state_dict()["coefficient"]:
        settings["kl_coef"] = agent.penalty.coef
    return settings


class History(Sequence[dict[str, float]]):
    """Metrics of each iteration, kept as arrays, which need far less memory than dictionaries in a long run.

    Args:
        metrics: metrics of the iterations so far.

    Example:
        >>> History([{"steps": 64, "policy/loss": 0.5}])[-1]
        {'steps': 64, 'policy/loss': 0.5}
    """

    def __init__(self, metrics: Iterable[dict[str, float]] = ()) -> None:
        self._columns: dict[_Columns, _Columns] = {}
        """Each distinct set of columns, kept once: iterations with equal names share a tuple."""
        self._rows: list[tuple[_Columns, array[float]]] = []
        for row in metrics:
            self.append(row)

    @classmethod
    def from_state(cls, state: HistoryState) -> Self:
        """Restore a history from the result of `state`."""
        # Distinct sets of columns
        distinct: list[_Columns] = []
        for saved_columns in state["kinds"]:
            columns = [(str(name), int if is_integer else float) for name, is_integer in saved_columns]
            distinct.append(tuple(columns))

        # One row after the other, out of one array of values
        history = cls()
        history._columns = {columns: columns for columns in distinct}
        start = 0
        for number in state["rows"].tolist():
            columns_of_row = distinct[number]
            end = start + len(columns_of_row)
            values = array("d", state["values"][start:end].tolist())
            history._rows.append((columns_of_row, values))
            start = end
        return history

    def state(self) -> HistoryState:
        """Return all iterations, for a checkpoint: each distinct set of names once, and the values in one array."""
        numbers = {columns: number for number, columns in enumerate(self._columns)}
        kinds = [[[name, as_type is int] for name, as_type in columns] for columns in numbers]
        rows = [numbers[columns] for columns, _ in self._rows]
        values = [np.array(values) for _, values in self._rows]
        if not values:
            values = [np.zeros(0)]
        return {"kinds": kinds, "rows": np.array(rows, dtype=np.int64), "values": np.concatenate(values)}

    def append(self, metrics: dict[str, float]) -> None:
        """Append the metrics of one iteration: integers and floats by name."""
        columns = tuple((name, int if isinstance(value, int) else float) for name, value in metrics.items())
        shared = self._columns.setdefault(columns, columns)
        self._rows.append((shared, array("d", metrics.values())))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, float]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, float]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, float] | list[dict[str, float]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        columns, values = self._rows[index]
        return {name: as_type(value) for (name, as_type), value in zip(columns, values, strict=True)}


class Callback:
    """Base of callbacks; each method does nothing by default.

    Example:
        >>> class Patient(Callback):
        ...     def on_iteration(self, run, metrics):
        ...         return metrics["time/seconds"] > 3600  # True ends the training
    """

    several_processes = True
    """Whether it can be used where several processes train together (`algos.ranks`): it is called in the first."""

    def on_start(self, run: "Run") -> None:
        """Act before the first iteration, and after a resume."""

    def on_rollout(self, run: "Run", rollout: TensorDict) -> None:
        """Read a rollout (`textenv.rollout`), KL included, before the policy is updated on it."""

    def on_iteration(self, run: "Run", metrics: Metrics) -> object:
        """Read the metrics of an iteration, and add numbers to them before they are logged.

        Returns:
            True to end the training, None or False to go on.
        """

    def on_end(self, run: "Run") -> None:
        """Act after the last iteration, before the agent is saved; not called if an error ended the training."""

    def state_dict(self) -> dict[str, object]:
        """State that a resumed run needs, of the types that `algos.storage.serialization.to_json` accepts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


class Run:
    """State of an agent's training, from its first step or from a checkpoint.

    Args:
        agent: the agent to train.
        total_steps: length of the training.
        run_dir: folder of the run, if it has one.
        callbacks: callbacks that watch the training; their states are saved.
        listeners: other objects of the user that the training calls, by name; their states are saved.
        has_folder: True if the run has a folder, on this rank or on rank 0, which writes into it.
    """

    def __init__(
        self,
        agent: Learner[Config],
        *,
        total_steps: float = 0,
        run_dir: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        listeners: Mapping[str, object] | None = None,
        has_folder: bool = False,
    ) -> None:
        self.agent = agent
        self.total_steps = total_steps
        wrappers = wrappers_with_statistics(agent.env)
        if wrappers:
            advice = "take normalize_observations=True of the policy or normalize_rewards=True of the config"
            if isinstance(agent.config, ReplayConfig):
                kind = type(agent).__name__
                advice = f"scale by fixed numbers (TransformObservation, TransformReward): {kind} normalizes nothing"
            logger.warning(
                "the running statistics of %s stay in the environments of the training: another environment, as in an "
                "evaluation, begins without them, and a saved agent lacks them. Instead %s",
                " and ".join(wrappers),
                advice,
            )

        # What the training has done so far
        self.agent.steps = 0
        self.steps = 0
        """Steps (True entries) so far."""
        self.collected = 0
        """Steps of a rollout that is not counted yet, since its iteration has not ended."""
        self.seconds = 0.0
        """Training time so far, in seconds."""
        self.history = History()
        """Metrics of each iteration."""

        # What watches it
        self.callbacks = callbacks
        self.listeners = listeners or {}
        self.logs: Logs | None = None
        self.meters = EpisodeMeter(), EpisodeMeter()
        """Meters of the returns before and after the penalty."""
        self.watch = RewardHackingMonitor()

        # Its folder and checkpoints
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.has_folder = has_folder
        """True if the run has a folder, on this rank or on rank 0."""
        self.last_regular_steps = 0
        """Steps at the last regular checkpoint, or at the resumed one; the next regular one is an interval later."""
        self.newest_checkpoint: Path | None = None
        """Newest checkpoint in the run's folder."""
        self.resumed_from: Path | None = None
        """Folder of the run that this one continues, which may be its own; None if it began anew."""
        self.has_ended = False
        """True if the resumed run is as long as asked for, and its agent is saved: the folder stays as it is."""
        self.unsaved = UnsavedState(agent) if has_folder else None
        note_settings(agent.env)
        self._has_warned = False
        """Whether a warning has said that no checkpoint can be written."""
        self.frozen_checksum: int | None = None
        """Checksum of the policy's frozen weights, which a checkpoint does not hold; None if there are none."""
        if isinstance(agent.policy, nn.Module):
            self.frozen_checksum = frozen_checksum(agent.policy)

    def log(self, values: Values) -> None:
        """Log numbers, arrays (histograms) and lists of dictionaries (tables), by name.

        They are logged with the current iteration and the step count at its end.
        """
        if self.logs is not None:
            self.logs.write(values, step=self.steps + self.collected, iteration=len(self.history) + 1)

    def restore(self, folder: str | Path, *, in_same_folder: bool = False) -> None:
        """Restore agent, environment, counters, callbacks and history from a checkpoint.

        Args:
            folder: folder of a checkpoint; or of a run, whose newest checkpoint is restored.
            in_same_folder: True if it is this run's own folder, or one of its checkpoints.

        Raises:
            FileNotFoundError: if there is no checkpoint.
            ValueError: if it is damaged, or of another agent or environment.
        """
        state = cast("RunState", read_checkpoint(folder))
        algorithm = type(self.agent).__name__
        if state.get("algorithm") != algorithm:
            raise ValueError(f"{folder} is a run of {state.get('algorithm')}, but this agent is {algorithm}")
        try:
            self._restore(state, Path(folder))
        except Exception as error:  # another agent's checkpoint may fail in any way
            reason = str(error)
            if not isinstance(error, ValueError):
                reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"the checkpoint {folder} does not fit: {reason}") from error
        run_folder = run_folder_of(folder)
        self.resumed_from = run_folder
        if in_same_folder:
            by_steps = {checkpoint_steps(path): path for path in checkpoints(run_folder)}
            self.newest_checkpoint = by_steps.get(self.steps)
            is_saved = agent_steps(run_folder) == self.steps and not (run_folder / UNFINISHED).exists()
            self.has_ended = is_saved and self.steps >= self.total_steps

    def _restore(self, state: RunState, folder: Path) -> None:
        """Restore everything from the content of a checkpoint; raise an error of any kind if it does not fit."""
        self._check_setup(state)
        if state["steps"] < self.total_steps:
            self._warn_of_other_settings(state)
        self._restore_agent(state, folder)
        steps = int(state["steps"])
        self.steps = steps
        self.last_regular_steps = steps
        self.agent.steps = steps
        self.seconds = float(state["seconds"])
        self._restore_history(state, folder)
        self._restore_observers(state)

    def _check_setup(self, state: RunState) -> None:
        """Raise a ValueError unless the agent has as many environment slots as the run, and its seed."""
        slots = self.agent.env.num_envs * collectives.world_size()
        if state["num_envs"] != slots:
            raise ValueError(
                f"the run has {state['num_envs']} environment slots, but this agent has {slots}: make the "
                "same number (leave --num-envs out)"
            )
        seed = self.agent.config.seed
        if state["seed"] != seed:
            raise ValueError(f"the run has seed {state['seed']} and this agent {seed}: leave the seed out")

    def _warn_of_other_settings(self, state: RunState) -> None:
        """Log a warning that names the settings that are not the run's: they may be meant, or forgotten."""
        saved_settings = state.get("config", {})
        changes = []
        for name, value in settings_of(self.agent).items():
            if name in saved_settings and saved_settings[name] != value:
                changes.append(f"{name} {value} (before: {saved_settings[name]})")
        if changes:
            logger.warning("the run goes on with other settings: %s", ", ".join(changes))

    def _restore_agent(self, state: RunState, folder: Path) -> None:
        """Restore agent and environment; with another number of processes, environments and actions begin anew."""
        agent = self.agent

        # The parts that differ between ranks; `ranks` has those of all ranks but the first
        environment = state["environment"]
        random_states = state.get("random")  # absent before version 0.10
        called = state.get("called")
        states_of_ranks = state.get("ranks", [])
        same_ranks = len(states_of_ranks) + 1 == collectives.world_size()
        if not same_ranks:
            logger.warning(
                "the run had %d processes, now there are %d: environments and actions begin anew from the seed",
                len(states_of_ranks) + 1,
                collectives.world_size(),
            )
            environment = None
            random_states = None
            # Rewards, tasks and tools keep their state
            restore_objects(agent.env, state["environment"])
        elif collectives.rank() > 0:
            state_of_rank = states_of_ranks[collectives.rank() - 1]
            environment = state_of_rank.pop("environment", environment)
            called = state_of_rank.pop("called", called)
            random_states = state_of_rank.pop("random", random_states)
            state["agent"] |= state_of_rank

        # An environment with other arguments begins anew, because its state would bring the former ones back
        if environment is not None:
            change = changed_arguments(agent.env, environment)
            if change:
                logger.warning("%s: its episodes begin anew", change)
                environment = None

        # The environment first: if it shares a random generator with the agent, the agent's state is kept.
        if environment is not None:
            set_env_state(agent.env, environment)
        if called is not None:  # also if the environment itself begins anew
            set_object_states(agent.env, called)
        agent.load_state_dict(state["agent"])
        if random_states is not None:  # rewards may use these generators
            set_global_random_states(random_states)
        if state.get("frozen", self.frozen_checksum) != self.frozen_checksum:
            logger.warning(
                "the policy's frozen weights differ from those in the run %s, so training continues with a different "
                "policy: load the same base model, and change it in the same way",
                folder,
            )

        # What begins anew gets seeds that depend on the steps, so that resuming twice from here gives the same run.
        new_seed = collectives.local_seed(agent.config.seed) + int(state["steps"])
        if not same_ranks:
            agent.policy.generator.manual_seed(stream_seed(new_seed, ACTIONS))
            agent.collector.group_seeds = None
        if environment is not None:
            agent.collector.resume()
        else:
            agent.collector.observation = None
            agent.collector.seed = new_seed

    def _restore_history(self, state: RunState, folder: Path) -> None:
        """Restore the metrics of all iterations; warn if ``metrics.jsonl`` has fewer."""
        self.history = History.from_state(state["history"])
        path = run_folder_of(folder) / METRICS
        num_lines = 0
        if path.is_file():
            num_lines = path.read_bytes().count(b"\n")
        if num_lines < len(self.history):
            logger.warning(
                "%s has %d of %d iterations: the rest are taken from the checkpoint", path, num_lines, len(self.history)
            )

    def _restore_observers(self, state: RunState) -> None:
        """Restore meters, monitor, callbacks and listeners."""
        for observer, saved in zip((*self.meters, self.watch), state["watches"], strict=True):
            set_attributes(observer, saved)

        # Callbacks of the same class are told apart by their order
        waiting = list(self.callbacks)
        for name, saved in state.get("callbacks", ()):  # absent in runs of 0.3.0
            callback = next((callback for callback in waiting if type(callback).__name__ == name), None)
            if callback is not None:
                callback.load_state_dict(saved)
                waiting.remove(callback)

        different = set_states(self.listeners, state.get("listeners", {}))  # absent before version 0.10
        if different:
            logger.warning(
                "objects and saved states that do not match (such an object starts afresh): %s", ", ".join(different)
            )

    def count(self, metrics: dict[str, float], *, seconds: float) -> dict[str, float]:
        """Count an iteration's steps; return its metrics with step count, iteration number and times."""
        self.steps += int(metrics["rollout/steps"])
        self.agent.steps = self.steps
        self.collected = 0
        self.seconds = seconds
        # What took the steps: 0 is plain code, 1 also fast paths, and 2, if the update says so, PPO's closed form
        any_fast_path = int(bool(FAST_PATHS_IN_USE))
        update_path = metrics.pop("update/path", any_fast_path)
        metrics = {"steps": self.steps, "iteration": len(self.history) + 1} | metrics
        if not self.history:  # logged once, in the first iteration
            metrics["update/path"] = update_path
        return metrics | {"time/seconds": seconds, "time/steps_per_second": self.steps / seconds}

    def record(self, metrics: dict[str, float]) -> None:
        """Add the metrics of an iteration to history and logs."""
        if self.logs is not None and self.logs.failures:
            metrics["log/failures"] = self.logs.failures
        self.log(metrics)
        self.history.append(metrics)
        self.watch.look(metrics)

    def checkpoint(self, *, every: int | None, over: bool, request: Request) -> None:
        """Write a checkpoint if one is due: after the first iteration, then regularly, at the end, or after a signal.

        Args:
            every: steps between checkpoints; None: a tenth of the training, and none for an agent that cannot be
                saved in a checkpoint.
            over: the training is complete.
            request: has the name of the signal that this rank received, if any.

        Raises:
            Interrupted: after a signal on any rank, unless the training is complete.
        """
        names = collectives.gather(request.name)
        signal = next((name for name in names if name is not None), None)

        # Is a checkpoint due?
        interval = every
        if interval is None:
            interval = max(1, int(self.total_steps) // 10)
        regular = self.steps - self.last_regular_steps >= interval
        # An early first one shows whether checkpoints can be written, and an early failure can resume from it
        first = self.newest_checkpoint is None
        if self.has_folder and (first or regular or over or signal is not None):
            if regular:
                self.last_regular_steps = self.steps
            self.newest_checkpoint = self._write_checkpoint(asked=every is not None) or self.newest_checkpoint

        if signal is not None and not over:
            raise self.interruption(signal)

    def interruption(self, signal: str) -> Interrupted:
        """Return the exception for a signal, which says what is left of the training."""
        if not self.has_folder:
            return Interrupted(signal, f"stopped by {signal} after {self.steps} steps", resumable=False)
        checkpoint = "before its first checkpoint"
        if self.newest_checkpoint is not None:
            checkpoint = f"see {self.newest_checkpoint}"
        return Interrupted(signal, f"stopped by {signal} after {self.steps} steps, {checkpoint}")

    def _write_checkpoint(self, *, asked: bool) -> Path | None:
        """Write a checkpoint and return its folder.

        If the agent cannot be saved: raise a TypeError if checkpoints were asked for; else warn once and return None.
        """
        if self.unsaved is not None:
            self.unsaved.warn()
        folder = None
        try:
            state = self._state()
            if self.run_dir is not None:
                folder = write_checkpoint(self.run_dir, state, steps=self.steps, save=self.agent.save)
        except TypeError as error:
            if asked:
                raise
            if not self._has_warned:
                logger.warning("no checkpoint can be written, so this run cannot be resumed: %s", error)
            self._has_warned = True
        return collectives.broadcast(folder)

    def _state(self) -> RunState:
        """Return the content of a checkpoint."""
        agent = self.agent.state_dict()
        environment = env_state(self.agent.env)
        random_states = global_random_states()

        # What differs between ranks
        state_of_rank = {name: agent[name] for name in OF_RANK}
        called = None
        if not is_episode_env(self.agent.env):  # whose state has them already
            called = object_states(self.agent.env)
        state_of_rank |= {"environment": environment, "called": called, "random": random_states}
        states_of_ranks = collectives.gather(state_of_rank)
        return {
            "algorithm": type(self.agent).__name__,
            "steps": self.steps,
            "seconds": self.seconds,
            "num_envs": self.agent.env.num_envs * collectives.world_size(),
            "seed": self.agent.config.seed,
            "config": settings_of(self.agent),
            "history": self.history.state(),
            "agent": agent,
            "frozen": self.frozen_checksum,
            "environment": environment,
            "called": called,
            "random": random_states,
            "ranks": states_of_ranks[1:],
            "callbacks": [[type(callback).__name__, callback.state_dict()] for callback in self.callbacks],
            "listeners": states_of(self.listeners),
            "watches": [attributes(observer) for observer in (*self.meters, self.watch)],
        }
