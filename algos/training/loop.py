"""The learning loop of every algorithm: collect, penalise, update, log, save."""

import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT
from types import NoneType
from typing import Any, SupportsFloat

import numpy as np
from tensordict import TensorDict
from torch import Tensor

from algos.config import ClippedConfig, PolicyGradientConfig, field_values
from algos.ranks import collectives
from algos.storage.checkpoint import goes_back
from algos.storage.provenance import commit
from algos.storage.run_folder import (
    BROKEN_OFF,
    FAILED,
    STOPPED,
    UNFINISHED,
    checkpoint_steps,
    has_nothing_to_resume,
    lock_run_folder,
    remove,
    run_folder_of,
)
from algos.training.callbacks import RecordSamples
from algos.training.diagnose import write_violation
from algos.training.invariants import InvariantError, check_finite, check_inert
from algos.training.learner import Learner
from algos.training.live_view import LiveView
from algos.training.loggers import Logger, Logs, make_loggers
from algos.training.metrics import EpisodeMeter, Metrics, reference_metrics
from algos.training.run import Callback, Run
from algos.training.save import spec_of
from algos.training.signals import SIGNALS, Interrupted, Request, deferred_signals
from textenv.envs.vector_env import TextVectorEnv
from textenv.names import check_names
from textenv.processes import end_if_forked
from textenv.rewards.scores import StopTraining
from textenv.rewards.training import training
from textenv.rollout import is_episode_env

logger = logging.getLogger(__name__)


@check_names
def learn(
    agent: Learner,
    total_steps: int,
    *,
    run_dir: str | Path | None = None,
    progress: bool = False,
    on_iteration: Callable[[Metrics], Any] | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[str | Logger] = (),
    sample_every: int = 10,
    diagnose: Callable[[Any, TensorDict], Metrics] | None = None,
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
        progress: show the training in the terminal; plain lines if the output is none.
        on_iteration: called with the metrics of every iteration; training ends when it returns a true value.
        callbacks: objects of `algos.training.callbacks.Callback`, such as `EvaluateEvery`; called in this order.
        loggers: further destinations of the metrics: ``"tensorboard"``, ``"wandb"``, ``"trackio"``, or your own
            (`algos.training.loggers.Logger`).
        sample_every: iterations between tables of what the policy writes (`RecordSamples`); 0 records none.
        diagnose: called with the agent and each rollout after the update; its result is logged.
        checkpoint_every: steps between checkpoints, written to ``checkpoints/`` in the run's folder; None: a tenth of
            the training. Others are written after the first iteration and at the end. Ctrl-C, SIGTERM or SIGHUP ends
            training after the iteration and a checkpoint; without a folder, Ctrl-C ends it after the iteration.
        resume: folder of a run, or of one of its checkpoints, to continue: the rest of the training is the same as
            without the interruption, to the last bit on a CPU (except for environments that `algos.storage.env_state`
            cannot save). Build agent and environment as for that run. If this is ``run_dir`` and has no checkpoint and
            no agent yet, training starts from the beginning: the same call starts and resumes a run.
        overwrite: first remove the run in ``run_dir``; if False, such a folder is an error. With ``resume``, replace
            what the run's folder holds that was trained for longer than the checkpoint.

    Returns:
        The metrics of every iteration; ``steps`` counts the steps so far. ``episode/return`` is the mean return paid by
        the environment, over the episodes that ended; absent if none ended.

    Raises:
        Interrupted: a KeyboardInterrupt, after a signal.
        FileNotFoundError: if there is no checkpoint to resume.
        FileExistsError: if ``run_dir`` holds a run, unless it is resumed or overwritten; or if it holds an agent that
            was trained for longer than the checkpoint to resume, unless it is overwritten.
        BlockingIOError: if another process trains in ``run_dir``.
        OSError: if the disk is full or read-only; names the last good checkpoint. Or if the folder was removed or
            moved, after everything that can be saved was written into its place.
        ValueError: if the checkpoint is damaged, or of another agent.
        InvariantError: if an invariant is violated (`algos.training.invariants`); the offending batch is then in the
            run's folder, in ``violation.safetensors``.
    """
    _check_lengths(total_steps, checkpoint_every, run_dir)
    if run_dir is not None:
        run_dir = Path(run_dir).absolute()  # a reward or an environment may change the working folder
    here = False
    goes_on = resume is not None
    if resume is not None:
        here = check_resume(resume, run_dir, overwrite=overwrite)
        goes_on = not (here and has_nothing_to_resume(resume))
    others = collectives.rank() > 0  # logs, files and callbacks belong to rank 0
    shown = [] if others else make_loggers(loggers) + ([LiveView(total_steps)] if progress else [])
    if isinstance(callbacks, Callback) or not all(isinstance(each, Callback) for each in callbacks):
        raise TypeError(f"callbacks is {callbacks!r:.200}, expected a list of objects that inherit algos.Callback")
    watching = [] if others else [*callbacks, *([RecordSamples(sample_every)] if sample_every else [])]
    if on_iteration is not None and not callable(on_iteration):
        advice = "an algos.Callback goes into the list callbacks=[...]"
        raise TypeError(f"on_iteration is {on_iteration!r:.200}, expected a function of the metrics; {advice}")
    if run_dir is not None:
        commit()  # read now, written with the agent
    home = run_dir
    if others:
        run_dir = diagnose = on_iteration = None
    collectives.local_count(agent.config.num_episodes or 0, "num_episodes")
    collectives.check_same(agent.config, agent.policy.parameters())
    with lock_run_folder(run_dir, resumed=here, overwrite=overwrite):
        # State of the run, from the beginning or from a checkpoint
        listeners = {"on_iteration": on_iteration, "diagnose": diagnose, "loggers": list(loggers)}
        in_folder = home is not None
        run = Run(
            agent,
            total_steps=total_steps,
            run_dir=run_dir,
            callbacks=watching,
            listeners=listeners,
            in_folder=in_folder,
        )
        if resume is not None and goes_on:
            run.restore(resume, here=here)
        logs = Logs(run_dir, shown, config=_configuration(run), before=run.history)

        # Training; without a folder, other signals than Ctrl-C have nothing to save
        noted = SIGNALS if in_folder else (SIGINT,)
        with logs, _rescue(run, home), deferred_signals(noted) as request:
            run.logs = logs
            for callback in watching:
                callback.on_start(run)
            start = time.perf_counter() - run.seconds
            while run.steps < total_steps:
                with training(run.steps, run.steps / total_steps):  # for reward functions
                    stop = _iteration(run, diagnose, start=start)
                    stop = bool(on_iteration is not None and on_iteration(run.history[-1])) or stop
                over = collectives.broadcast(stop) or run.steps >= total_steps
                _check_folder(run, logs)
                run.checkpoint(every=checkpoint_every, over=over, request=request)
                if over:
                    break
            for callback in watching:
                callback.on_end(run)

            # The agent; a signal that came too late to shorten the training still ends the program
            if run_dir is not None:
                agent.save(run_dir)
                remove(Path(run_dir) / UNFINISHED)
            if request.name is not None:
                raise run.interruption(request.name)
    return list(run.history)


def _iteration(run: Run, diagnose: Callable[[Any, TensorDict], Metrics] | None, *, start: float) -> bool:
    """Run one iteration and record it, even if a callback fails; return True if one ends the training."""

    def on_rollout(rollout: TensorDict) -> None:
        run.collected = int(rollout["mask"].sum())
        for callback in run.callbacks:
            callback.on_rollout(run, rollout)

    process = os.getpid()
    run.agent.progress = run.steps / run.total_steps
    metrics = iterate(run.agent, run.meters, diagnose, on_rollout=on_rollout)
    metrics = run.count(metrics, seconds=time.perf_counter() - start)
    try:
        ends = [callback.on_iteration(run, metrics) for callback in run.callbacks]  # call them all
        return any(ends)
    finally:
        end_if_forked(process, "a callback")
        run.record(metrics)


def _configuration(run: Run) -> dict[str, Any]:
    """Configuration of a run for loggers."""
    spec, config = spec_of(run.agent.env), field_values(run.agent.config)
    plain = {name: x if isinstance(x, (int, float, str, bool, NoneType)) else str(x) for name, x in config.items()}
    algorithm = type(run.agent).__name__
    if isinstance(run.agent.env, TextVectorEnv):
        plain["turns_end_with"] = str(run.agent.env.ends)
    return {"environment": spec.id if spec else None, "algorithm": algorithm, "total_steps": run.total_steps} | plain


def check_resume(resume: str | Path, run_dir: str | Path | None, *, overwrite: bool) -> bool:
    """Check that nothing is lost by a resume; return True if the run goes on in its own folder.

    Raises:
        FileExistsError: if the folder holds something that was trained for longer, unless ``overwrite``.
        ValueError: if there is nothing to overwrite.
    """
    here = run_dir is not None and run_folder_of(resume) == Path(run_dir).resolve()
    longer = goes_back(resume) if here else None
    if overwrite and longer is None:
        raise ValueError("resume continues a run and overwrite removes it: give only one of them")
    if longer is not None and not overwrite:
        raise FileExistsError(
            f"{run_folder_of(resume)} holds {longer}, which going on from {resume} would replace: give another folder "
            "(--run-dir, in Python run_dir=...), or replace it (--overwrite, in Python overwrite=True)"
        )
    return here


def _check_lengths(total_steps: int, checkpoint_every: int | None, run_dir: str | Path | None) -> None:
    if not isinstance(total_steps, (int, float)) or not total_steps >= 1:
        raise ValueError(f"total_steps is {total_steps!r}, expected at least 1")
    if checkpoint_every is not None and (checkpoint_every < 1 or run_dir is None):
        raise ValueError(
            f"checkpoint_every is {checkpoint_every} and run_dir {run_dir}, expected at least 1 step and a folder"
        )


class FolderLostError(OSError):
    """The folder of a run was removed or moved while it trained."""


def _check_folder(run: Run, logs: Logs) -> None:
    """Raise an error if the folder of the run is not in its place any more, after all is written there again."""
    where = collectives.broadcast(logs.lost_folder())
    if where is None:
        return
    error = FolderLostError(f"the folder {run.run_dir} was removed or moved while the training used it: {where}")
    if logs.folder is not None:
        logs.write_again()
    run.checkpoint(every=None, over=True, request=Request())
    error.add_note(f"in its place is a new one, with the metrics and a checkpoint: --resume {run.run_dir} goes on")
    raise error


@contextmanager
def _rescue(run: Run, run_dir: str | Path | None) -> Iterator[None]:
    """If training fails, save its results: the agent, unscored answers, the offending batch."""
    process = os.getpid()
    try:
        yield
    except KeyboardInterrupt as interrupt:  # Ctrl-C at once is reported as after an iteration, without its place
        end_if_forked(process, "other code")
        interruption = interrupt
        if not isinstance(interrupt, Interrupted):
            interruption = run.interruption("SIGINT")
        _rescue_results(interruption, run, run_dir)
        raise interruption from None
    except BaseException as error:
        end_if_forked(process, "other code")
        if isinstance(error, SystemExit):  # of an environment or a callback; Python ends without a word
            location = traceback.extract_tb(error.__traceback__)[-1]
            logger.warning("line %s of %s ended the training by sys.exit", location.lineno, location.filename)
        if isinstance(error, InvariantError):
            error.add_note(f"in iteration {len(run.history) + 1}, after {run.steps} steps")
        _rescue_results(error, run, run_dir)
        raise


def _rescue_results(error: BaseException, run: Run, run_dir: str | Path | None) -> None:
    """Save what is left of a training that an error ends; what fails then is a note of this error."""
    if run_dir is None:
        return
    when = {"iteration": len(run.history) + 1, "steps": run.steps}
    try:
        _save_what_is_left(error, run, Path(run_dir), when)
    except OSError as failure:  # a full disk may be the first error too
        error.add_note(f"not everything could be saved in {run_dir}: {failure}")


def _save_what_is_left(error: BaseException, run: Run, run_dir: Path, when: Mapping[str, int]) -> None:
    """Write the agent, the answers and the batch of an error, and add notes with their paths."""
    if answers := getattr(error, "answers", None):  # on any error of a reward, see `textenv.envs.task.score_turns`
        path = run_dir / f"unscored{f'-{collectives.rank()}' if collectives.rank() else ''}.jsonl"
        path.write_text("".join(json.dumps(answer, default=str) + "\n" for answer in answers), encoding="utf-8")
        error.add_note(f"the {len(answers)} answers that were not scored are in {path}")
        error.add_note(f"when the reward is mended, resume the run: --resume {run_dir} (in Python resume=...)")
    if collectives.rank():
        return
    if isinstance(error, InvariantError) and error.batch is not None:
        path = write_violation(error, run_dir, **when)
        error.add_note(f"the batch is in {path}: safetensors.torch.load_file reads it")
    if isinstance(error, OSError) and run.logs is not None and run.logs.lost_folder() is not None:
        run.logs.write_again()
    ending = FAILED
    if isinstance(error, KeyboardInterrupt):
        saved_steps = 0 if run.newest is None else checkpoint_steps(run.newest)
        ending = STOPPED if saved_steps == run.steps else BROKEN_OFF
    (run_dir / UNFINISHED).write_text(ending, encoding="utf-8")
    # An agent that has learnt nothing is kept on request only: the folder of a failure stays free for the next try.
    if run.steps or isinstance(error, (KeyboardInterrupt, StopTraining)):
        run.agent.save(run_dir)
        if not isinstance(error, Interrupted):
            error.add_note(f"the agent in its present state is saved in {run_dir}")


def iterate(
    agent: Learner,
    meters: tuple[EpisodeMeter, EpisodeMeter],
    diagnose: Callable[[Any, TensorDict], Metrics] | None = None,
    on_rollout: Callable[[TensorDict], None] = lambda rollout: None,
    rollout: TensorDict | None = None,
) -> Metrics:
    """Run one iteration, on this rollout or the next one; the meters record returns before and after the penalty."""
    if not (isinstance(agent.progress, SupportsFloat) and 0 <= agent.progress <= 1):
        raise ValueError(f"agent.progress is {agent.progress!r}, expected the finished part of the training, 0 to 1")
    clock = [time.perf_counter()]
    process = os.getpid()
    try:
        rollout = agent.collect() if rollout is None else rollout
    finally:
        end_if_forked(process, "an environment or a task")
    metrics = {"rollout/steps": int(rollout["mask"].sum())} | _episode_metrics(meters[0], rollout)
    if is_episode_env(agent.env):
        metrics |= collectives.mean(agent.env.metrics)
    if not metrics["rollout/steps"]:
        raise ValueError(
            f"no trainable steps: mask is False everywhere in this rollout ({len(rollout)} rows). Did "
            "the reward return None or fail for every answer?"
        )
    rollout = rollout.to(agent.policy.device)
    check_finite(rollout, "observation", "reward", "log_prob")
    clock.append(time.perf_counter())
    if agent.penalty is not None:
        _charge(agent, rollout)
        check_finite(rollout, "reward", "reference_log_prob", "kl")
        check_inert(rollout, "reference_log_prob", "kl")
        metrics |= reference_metrics(rollout, coefficient=agent.penalty.coef)
        metrics |= _episode_metrics(meters[1], rollout, "episode/penalised_return")
    on_rollout(rollout)
    clock.append(time.perf_counter())
    metrics |= agent.update(rollout)
    clock.append(time.perf_counter())
    if diagnose is not None:  # before the normalizer update, which would count as a change of the policy
        metrics |= diagnose(agent, rollout)
    agent.policy.update_normalizer(rollout)
    if agent.penalty is not None:
        agent.penalty.update(rollout)
    return metrics | dict(zip(("time/collect", "time/penalty", "time/update"), np.diff(clock).tolist(), strict=True))


def _charge(agent: Learner, rollout: TensorDict) -> None:
    """Charge the KL penalty."""

    # What may differ at the first rollout; a penalty of one's own needs to know it only if the config says so
    config = agent.config
    options: dict[str, Any] = {}
    if isinstance(config, PolicyGradientConfig) and config.ratio_tolerance is not None:
        options["tolerance"] = config.ratio_tolerance
    if isinstance(config, ClippedConfig) and config.max_importance_weight is not None:
        options["other_sampler"] = True

    def charged(part: TensorDict) -> list[Tensor]:
        assert agent.penalty is not None
        agent.penalty(part, agent.policy, **options)
        return [part[name] for name in names]

    names = ("reward", "reference_log_prob", "kl")
    rollout.update(dict(zip(names, collectives.map_rows(charged, rollout), strict=True)))


def _episode_metrics(meter: EpisodeMeter, rollout: TensorDict, name: str = "episode/return") -> Metrics:
    returns, lengths = meter.finished(rollout)
    if not returns:
        return {}
    metrics = {name: float(np.mean(returns))}
    return metrics if name != "episode/return" else metrics | {"episode/length": float(np.mean(lengths))}
