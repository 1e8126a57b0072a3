"""The learning loop of every algorithm: collect, penalise, update, log, save."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from signal import SIGINT, Signals
from types import NoneType
from typing import Any, NamedTuple, SupportsFloat

import numpy as np
from tensordict import TensorDict
from torch import Tensor

from algos.config import Config, PolicyGradientConfig, ReplayConfig, check_total_steps, weighs_samples
from algos.ranks import collectives
from algos.storage.checkpoint import trained_longer_than
from algos.storage.provenance import commit
from algos.storage.run_files import UNFINISHED
from algos.storage.run_folder import (
    has_nothing_to_resume,
    lock_run_folder,
    refuse_tilde,
    remove,
    run_folder_of,
)
from algos.training.callbacks import RecordSamples
from algos.training.invariants import check_finite, check_inert
from algos.training.learner import Learner
from algos.training.live_view import LiveView
from algos.training.loggers import Logger, Logs, make_loggers
from algos.training.metrics import (
    EpisodeMeter,
    LeftOut,
    Metrics,
    count_turns,
    ending_metrics,
    group_metrics,
    reference_metrics,
    rollout_metrics,
)
from algos.training.rescue import rescue
from algos.training.run import Callback, Run
from algos.training.save import plain_config, spec_of
from algos.training.signals import SIGNALS, Request, deferred_signals
from textenv.envs.vector_env import TextVectorEnv
from textenv.kl.penalty import KLPenalty
from textenv.names import check_call, check_names, nearest
from textenv.processes import end_if_forked
from textenv.rewards.training import training
from textenv.rollout import is_episode_env, to_device

logger = logging.getLogger(__name__)
Diagnosis = Callable[[Any, TensorDict], Metrics]
"""Function that gets the agent, of whatever class, and its rollout after an update; returns metrics."""
Scalar = int | float | str | bool | None
"""Value of a run's configuration, as loggers get it."""
HOOKS = ("on_start", "on_rollout", "on_iteration", "on_end")
"""Methods of a `Callback` that the training calls."""
HOOKS_OF_STABLE_BASELINES3 = (
    "_on_step", "_on_rollout_start", "_on_rollout_end", "_on_training_start", "_on_training_end",
)  # fmt: skip
"""Methods that its callbacks override, which nothing here calls."""


@check_names
def learn(
    agent: Learner[Config],
    total_steps: int,
    *,
    run_dir: str | Path | None = None,
    progress: bool = False,
    on_iteration: Callable[[Metrics], object] | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[str | Logger] = (),
    sample_every: int = 10,
    diagnose: Diagnosis | None = None,
    checkpoint_every: int | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
) -> list[Metrics]:
    """Train for at least ``total_steps`` steps (True entries); the last iteration is completed.

    Args:
        agent: the agent to train.
        total_steps: at least 1.
        run_dir: folder for ``metrics.jsonl`` and, at the end or after an error, the saved agent; for text also
            ``samples.jsonl`` and ``tokens.jsonl``.
        progress: show the training in the terminal, or in plain lines where there is no terminal.
        on_iteration: called with the metrics of every iteration; training ends when it returns True.
        callbacks: objects of `algos.training.callbacks.Callback`, such as `EvaluateEvery`; called in this order.
        loggers: further destinations of the metrics: ``"tensorboard"``, ``"wandb"``, ``"trackio"``, or your own
            (`algos.training.loggers.Logger`).
        sample_every: iterations between tables of what the policy writes (`RecordSamples`); 0 records none.
        diagnose: called with the agent and each rollout after the update; its result is logged.
        checkpoint_every: steps between checkpoints, written to ``checkpoints/`` in the run's folder; None: a tenth of
            the training. There are also checkpoints after the first iteration and at the end. Ctrl-C, SIGTERM or SIGHUP
            ends training after the iteration and a checkpoint; without a folder, Ctrl-C ends it after the iteration.
        resume: folder of a run, or of one of its checkpoints, to continue. Build agent and environment as for that run.
            On a CPU the result is the same as without the interruption, to the last bit (except for environments that
            `algos.storage.env_state` cannot save). If this is ``run_dir`` and has no checkpoint and no agent yet,
            training starts from the beginning: the same call starts and resumes a run.
        overwrite: first remove the run in ``run_dir``; if False, such a folder is an error. With ``resume``, replace
            checkpoints and agents in the run's folder that were trained for longer than the checkpoint to resume.

    Returns:
        The metrics of every iteration; ``steps`` counts the steps so far. ``episode/return`` is the mean return paid by
        the environment, over the episodes that ended; absent if none ended.

    Raises:
        Interrupted: after a signal; it is a KeyboardInterrupt.
        FileNotFoundError: if there is no checkpoint to resume.
        FileExistsError: if ``run_dir`` holds a run, unless it is resumed or overwritten; or if it holds an agent that
            was trained for longer than the checkpoint to resume, unless it is overwritten.
        BlockingIOError: if another process trains in ``run_dir``.
        OSError: if the disk is full or read-only; names the last good checkpoint. Or if the folder was removed or
            moved; everything that can be saved is first written to a new folder in its place.
        ValueError: if the checkpoint is damaged, or of another agent.
        InvariantError: if an invariant is violated (`algos.training.invariants`); the offending batch is then in the
            run's folder, in ``violation.safetensors``.
    """
    _check_lengths(total_steps, checkpoint_every, run_dir)
    _check_path("run_dir", run_dir, "a folder for the run")
    _check_path("resume", resume, "the folder of the run to continue (often that of run_dir)")
    _check_callbacks(callbacks, on_iteration)
    run_folder: Path | None = None
    if run_dir is not None:
        run_folder = Path(run_dir).absolute()  # a reward or an environment may change the working folder

    # What to resume; a run's own folder may have nothing yet
    in_same_folder = False
    must_restore = False
    if resume is not None:
        in_same_folder = check_resume(resume, run_folder, overwrite=overwrite)
        must_restore = not (in_same_folder and has_nothing_to_resume(resume))

    # Only rank 0 has loggers and callbacks, and writes into the folder. The other ranks know the folder too, but write
    # nothing there except answers that a reward could not score.
    write_folder: Path | None = None
    observers = _Observers([], [], None, None)
    if collectives.rank() == 0:
        write_folder = run_folder
        observers = _Observers(make_loggers(loggers), list(callbacks), on_iteration, diagnose)
        if progress:
            observers.loggers.append(LiveView(total_steps))
        if sample_every:
            observers.callbacks.append(RecordSamples(sample_every))
    if run_folder is not None:
        commit()  # cached for config.json: a later commit of git is not the code that runs
    collectives.local_count(agent.config.num_episodes or 0, "num_episodes")  # raises if the ranks cannot share them
    collectives.check_same(agent.config, agent.policy.parameters())

    with lock_run_folder(write_folder, resumed=in_same_folder, overwrite=overwrite):
        # State of the run, from the beginning or from a checkpoint
        run = Run(
            agent,
            total_steps=total_steps,
            run_dir=write_folder,
            callbacks=observers.callbacks,
            listeners={
                "on_iteration": observers.on_iteration,
                "diagnose": observers.diagnose,
                "loggers": list(loggers),
            },
            has_folder=run_folder is not None,
        )
        if resume is not None and must_restore:
            run.restore(resume, in_same_folder=in_same_folder)
            _tell_if_trained(run)
        logs = Logs(write_folder, observers.loggers, config=_configuration(run), history=run.history)

        # Without a folder, signals other than Ctrl-C have nothing to save
        deferred: Sequence[Signals] = SIGNALS
        if run_folder is None:
            deferred = (SIGINT,)

        with logs, rescue(run, run_folder), deferred_signals(deferred) as request:
            run.logs = logs
            for callback in observers.callbacks:
                callback.on_start(run)
            _train(run, logs, observers, checkpoint_every=checkpoint_every, request=request)
            for callback in observers.callbacks:
                callback.on_end(run)
            _tell_if_untrained(run)

            # The agent; a signal that came too late to shorten the training still ends the program
            if write_folder is not None and not run.has_ended:
                agent.save(write_folder)
                remove(write_folder / UNFINISHED)
            if request.name is not None:
                raise run.interruption(request.name)
    return list(run.history)


def _tell_if_trained(run: Run) -> None:
    """Log a line if a resumed run is already as long as asked for."""
    if run.steps < run.total_steps:
        return
    consequence = ""
    if run.has_ended:
        consequence = ", so its folder stays as it is"
    logger.warning(
        "nothing is trained: the run has %d steps already, and %d are asked for%s",
        run.steps,
        run.total_steps,
        consequence,
    )


def _tell_if_untrained(run: Run) -> None:
    """Log a warning if the replay buffer has too few steps to learn from at the end of a training."""
    config = run.agent.config
    if not isinstance(config, ReplayConfig) or not run.history:
        return
    num_remembered = run.history[-1].get("update/remembered")  # an algorithm of one's own may not log it
    if num_remembered is not None and num_remembered < config.learning_starts:
        logger.warning(
            "nothing was learnt: learning begins after %s steps (learning_starts), and this training had %s; until "
            "then %s only collects",
            f"{config.learning_starts:,}",
            f"{run.steps:,}",
            type(run.agent).__name__,
        )


class _Observers(NamedTuple):
    """Who sees the metrics of an iteration; nobody on ranks other than 0."""

    loggers: list[Logger]
    callbacks: list[Callback]
    on_iteration: Callable[[Metrics], object] | None
    diagnose: Diagnosis | None


def _check_callbacks(callbacks: Sequence[Callback], on_iteration: object) -> None:
    """Raise a TypeError unless callbacks are a list of `Callback` and ``on_iteration`` is a function or None."""
    if not isinstance(callbacks, Sequence) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise TypeError(f"callbacks is {callbacks!r:.200}, expected a list of objects that inherit algos.Callback")
    for callback in callbacks:
        foreign = [name for name in HOOKS_OF_STABLE_BASELINES3 if hasattr(callback, name)]
        if foreign:
            raise TypeError(
                f"{type(callback).__name__} has {foreign[0]}, a method of Stable-Baselines3's callbacks, which nothing "
                "here calls: see algos.Callback for the methods, and mind that True ends the training"
            )
        _check_hooks(callback)
        if not callback.several_processes and collectives.world_size() > 1:
            raise ValueError(
                f"{type(callback).__name__} works in one process, and {collectives.world_size()} train together: leave "
                "it out, or train without torchrun"
            )
    if on_iteration is not None and not callable(on_iteration):
        raise TypeError(
            f"on_iteration is {on_iteration!r:.200}, expected a function of the metrics; an algos.Callback goes "
            "into the list callbacks=[...]"
        )


def _check_hooks(callback: Callback) -> None:
    """Raise a TypeError if a method cannot be called as a `Callback`'s is; warn of one that nothing calls."""
    kind = type(callback).__name__
    for name in HOOKS:
        _, *arguments = signature(getattr(Callback, name)).parameters
        check_call(getattr(callback, name), arguments, name=f"{kind}.{name}")
    for name in dir(type(callback)):
        hook = nearest(name, HOOKS)
        if hook is not None and name not in HOOKS and name.startswith("on_"):
            logger.warning(
                "%s has %s, which the training does not call: did you mean %s? A callback's methods are %s",
                kind, name, hook, ", ".join(HOOKS),
            )  # fmt: skip


def _train(run: Run, logs: Logs, observers: _Observers, *, checkpoint_every: int | None, request: Request) -> None:
    """Run iterations, with checkpoints, until the training is complete or a callback ends it."""
    total_steps = run.total_steps
    start = time.perf_counter() - run.seconds
    while run.steps < total_steps:
        with training(run.steps, run.steps / total_steps):  # reward functions read the step and the progress
            stop = _iteration(run, observers.diagnose, start=start)
            if observers.on_iteration is not None:
                metrics = run.history[-1]
                result = observers.on_iteration(metrics)
                stop = _ends_training(result, observers.on_iteration, metrics, run) or stop
        over = collectives.broadcast(stop) or run.steps >= total_steps
        _check_folder(run, logs)
        run.checkpoint(every=checkpoint_every, over=over, request=request)
        if over:
            break


def _iteration(run: Run, diagnose: Diagnosis | None, *, start: float) -> bool:
    """Run one iteration and record it, even if a callback fails; return True if a callback ends the training."""

    def on_rollout(rollout: TensorDict) -> None:
        run.collected = int(rollout["mask"].sum()) + run.agent.left_out.steps
        for callback in run.callbacks:
            callback.on_rollout(run, rollout)

    process = os.getpid()  # a process that a callback forks must not train on
    run.agent.progress = run.steps / run.total_steps
    try:
        metrics = iterate(run.agent, run.meters, diagnose, on_rollout=on_rollout)
    finally:
        run.agent.stop_exploring()
    metrics = run.count(metrics, seconds=time.perf_counter() - start)
    try:
        # Call all of them, even if one ends the training
        stops = []
        for callback in run.callbacks:
            result = callback.on_iteration(run, metrics)
            stops.append(_ends_training(result, callback.on_iteration, metrics, run))
        return any(stops)
    finally:
        end_if_forked(process, "a callback")
        run.record(metrics)


def _ends_training(result: object, observer: Callable[..., object], metrics: Metrics, run: Run) -> bool:
    """Whether what a callback has returned ends the training; in the first iteration a warning says so.

    There it may be meant otherwise: in Stable-Baselines3, True goes on.

    Raises:
        TypeError: on anything but True, False and None, such as what ``file.write`` returns.
    """
    name = getattr(observer, "__qualname__", type(observer).__name__)
    if result is not None and not isinstance(result, (bool, np.bool_)):
        raise TypeError(
            f"{name} returned {result!r:.100}, expected True to end the training, and None or False to go on"
        )
    if not result:
        return False
    if metrics["iteration"] == 1 and not str(observer.__module__).startswith("algos."):
        logger.warning("%s returned True, which ends the training at %d of %d steps", name, run.steps, run.total_steps)
    return True


def _configuration(run: Run) -> dict[str, Scalar]:
    """Return the configuration of a run for loggers: numbers, texts and None, by name."""
    agent = run.agent
    spec = spec_of(agent.env)
    configuration: dict[str, Scalar] = {"environment": None}
    if spec is not None:
        configuration["environment"] = spec.id
    configuration["algorithm"] = type(agent).__name__
    configuration["total_steps"] = run.total_steps
    configuration |= plain_config(agent.config)
    if isinstance(agent.env, TextVectorEnv):
        configuration["turns_end_with"] = str(agent.env.ends)
    return configuration


def check_resume(resume: str | Path, run_dir: str | Path | None, *, overwrite: bool) -> bool:
    """Check that nothing is lost by a resume; return True if the run goes on in its own folder.

    Raises:
        FileExistsError: if the folder holds something that was trained for longer, unless ``overwrite``.
        ValueError: if ``overwrite`` is True, but nothing in the folder was trained for longer.
    """
    in_same_folder = run_dir is not None and run_folder_of(resume) == Path(run_dir).resolve()
    trained_longer = None
    if in_same_folder:
        trained_longer = trained_longer_than(resume)
    if overwrite and trained_longer is None:
        raise ValueError("resume continues a run and overwrite removes it: give only one of them")
    if trained_longer is not None and not overwrite:
        raise FileExistsError(
            f"{run_folder_of(resume)} holds {trained_longer}, which going on from {resume} would replace: give "
            "another folder (--run-dir, in Python run_dir=...), or replace it (--overwrite, in Python overwrite=True)"
        )
    return in_same_folder


def _check_lengths(total_steps: int, checkpoint_every: int | None, run_dir: str | Path | None) -> None:
    """Raise a ValueError unless the lengths are at least 1, and checkpoints have a folder."""
    check_total_steps(total_steps)
    if isinstance(checkpoint_every, bool) or not isinstance(checkpoint_every, (SupportsFloat, NoneType)):
        raise TypeError(f"checkpoint_every is {checkpoint_every!r:.200}, expected a number of steps, or None")
    if checkpoint_every is not None and (checkpoint_every < 1 or run_dir is None):
        raise ValueError(
            f"checkpoint_every is {checkpoint_every} and run_dir {run_dir}, expected at least 1 step and a folder"
        )


def _check_path(name: str, path: Any, expected: str) -> None:
    """Raise a TypeError unless an argument is a path or None, and a ValueError if it begins with ``~``."""
    if not isinstance(path, (str, os.PathLike, NoneType)):
        raise TypeError(f"{name} is {path!r:.200}, expected {expected}, or None")
    refuse_tilde(name, path)


class FolderLostError(OSError):
    """The folder of a run was removed or moved while it trained."""


def _check_folder(run: Run, logs: Logs) -> None:
    """Raise a `FolderLostError` if the run's folder was removed or moved; first write a new one in its place."""
    whereabouts = collectives.broadcast(logs.lost_folder())
    if whereabouts is None:
        return
    error = FolderLostError(f"the folder {run.run_dir} was removed or moved while the training used it: {whereabouts}")
    if logs.folder is not None:
        logs.write_again()
    run.checkpoint(every=None, over=True, request=Request())
    error.add_note(f"in its place is a new one, with the metrics and a checkpoint: --resume {run.run_dir} goes on")
    raise error


def iterate(
    agent: Learner[Config],
    meters: tuple[EpisodeMeter, EpisodeMeter],
    diagnose: Diagnosis | None = None,
    on_rollout: Callable[[TensorDict], None] | None = None,
    rollout: TensorDict | None = None,
) -> Metrics:
    """Run one iteration: collect, penalise, update.

    Args:
        agent: the agent to train.
        meters: record the returns before and after the penalty.
        diagnose: called with agent and rollout after the update; returns metrics.
        on_rollout: called with the rollout before the update.
        rollout: the rollout to use; None collects the next one.

    Returns:
        The metrics of the iteration.

    Raises:
        ValueError: if ``agent.progress`` is not between 0 and 1, or if no step of the rollout can be trained on.
        InvariantError: see `algos.training.invariants`.
    """
    if not (isinstance(agent.progress, SupportsFloat) and 0 <= agent.progress <= 1):
        raise ValueError(f"agent.progress is {agent.progress!r}, expected the finished part of the training, 0 to 1")

    # Collect
    start = time.perf_counter()
    left_out = LeftOut()
    if rollout is None:
        rollout = _collect(agent)
        left_out = agent.left_out
    metrics = _collection_metrics(agent, meters[0], rollout, left_out)
    if not rollout["mask"].any():
        raise ValueError(
            f"no trainable steps: mask is False everywhere in this rollout ({len(rollout)} rows). Did "
            "the reward return None or fail for every answer?"
        )
    rollout = to_device(rollout, agent.policy.device)
    check_finite(rollout, "observation", "reward", "log_prob", "next_observation")
    collected = time.perf_counter()

    # Charge the KL penalty
    if agent.penalty is not None:
        _charge_penalty(agent, agent.penalty, rollout)
        check_finite(rollout, "reward", "reference_log_prob", "kl")
        check_inert(rollout, "reference_log_prob", "kl")
        metrics |= reference_metrics(rollout, coefficient=agent.penalty.coef)
        metrics |= _episode_metrics(meters[1], rollout, name="episode/penalised_return")
    if on_rollout is not None:
        on_rollout(rollout)
    charged = time.perf_counter()

    # Update
    update_metrics = agent.update(rollout)
    metrics["rollout/steps"] += update_metrics.get("update/steps", 0)  # what the update itself has sampled
    if "advantage" in rollout.keys():  # DQN computes none
        metrics |= rollout_metrics(rollout)
        if agent.config.episodes_per_group > 1:
            metrics |= group_metrics(rollout)
    metrics |= update_metrics  # last: an algorithm may give its own value of one of them
    updated = time.perf_counter()
    if diagnose is not None:  # before the normalizer update, which would count as a change of the policy
        metrics |= diagnose(agent, rollout)
    agent.policy.update_normalizer(rollout)
    if agent.penalty is not None:
        agent.penalty.update(rollout)

    return metrics | {
        "time/collect": collected - start,
        "time/penalty": charged - collected,
        "time/update": updated - charged,
    }


def _collect(agent: Learner[Config]) -> TensorDict:
    """Return the agent's next rollout; a process that an environment forks ends here, so that it does not train."""
    process = os.getpid()
    try:
        return agent.collect()
    finally:
        end_if_forked(process, "an environment or a task")


def _collection_metrics(agent: Learner[Config], meter: EpisodeMeter, rollout: TensorDict, left_out: LeftOut) -> Metrics:
    """Return the metrics of a rollout as it was collected, with the episodes that were left out of it."""
    num_steps = int(rollout["mask"].sum())
    metrics: Metrics = {"rollout/steps": num_steps + left_out.steps, **left_out.metrics}
    metrics |= _episode_metrics(meter, rollout, left_out)
    metrics |= ending_metrics(rollout)
    if is_episode_env(agent.env):
        metrics["rollout/turns"] = count_turns(rollout["mask"]) + left_out.turns
        metrics |= collectives.mean(agent.env.metrics)
    return metrics


def _charge_penalty(agent: Learner[Config], penalty: KLPenalty, rollout: TensorDict) -> None:
    """Charge the KL penalty: change the rewards, and add ``reference_log_prob`` and ``kl`` to the rollout."""
    # Options of the check at the first rollout. They are passed only if the config sets them, so a user's own penalty
    # need not accept them
    config = agent.config
    options: dict[str, Any] = {}
    if isinstance(config, PolicyGradientConfig) and config.ratio_tolerance is not None:
        options["tolerance"] = config.ratio_tolerance
    if weighs_samples(config):
        options["other_sampler"] = True

    # Each rank charges its share of the rows
    names = ("reward", "reference_log_prob", "kl")

    def charge(rows: TensorDict) -> list[Tensor]:
        penalty(rows, agent.policy, **options)
        return [rows[name] for name in names]

    columns = collectives.map_rows(charge, rollout)
    rollout.update(dict(zip(names, columns, strict=True)))


def _episode_metrics(
    meter: EpisodeMeter, rollout: TensorDict, left_out: LeftOut | None = None, name: str = "episode/return"
) -> Metrics:
    """Return the mean return, under this name, and mean length of the episodes that end in a rollout.

    Episodes that were left out of the rollout count too: without them the mean would be biased.
    """
    returns, lengths = meter.finished(rollout)
    if left_out is not None:
        returns += left_out.returns
        lengths += left_out.lengths
    if not returns:
        return {}
    metrics = {name: float(np.mean(returns))}
    if name == "episode/return":
        metrics["episode/length"] = float(np.mean(lengths))
    return metrics
