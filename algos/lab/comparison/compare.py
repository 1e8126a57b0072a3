"""Comparison of any environments, algorithms and seeds by the same metrics."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import numbers
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from algos.config import CONFIGS
from algos.envs.wrapping import Wrapper
from algos.lab.comparison.episodes import record_episode, write_episodes
from algos.lab.comparison.games import describes_a_game, in_steps_of_the_game, solved_return
from algos.lab.comparison.record import Record, changed_settings, read_record, write_record
from algos.lab.comparison.runs import STUDY, folder_name, read_study
from algos.lab.comparison.summary import Case, RunResult, by_case, name_cases, summary, update_kl
from algos.policies.registry import CONTROL_POLICIES
from algos.statistics.pass_rates import Answer, Sampling, read_sampling
from algos.storage.run_folder import checkpoints, holds_run
from algos.training.signals import Interrupted, interrupted_by_signals

if TYPE_CHECKING:
    from tensordict import TensorDict

    from algos.agent import Agent
    from algos.lab.comparison.report import Report
    from algos.policies.policy import Policy
    from algos.training.run import Run

DEFAULT_CASES = ("CartPole-v1:ppo", "textenv/Reviews-v0:ppo")
TEXT_EPISODES = 288
"""Episodes per evaluation in text: prompts of the test split."""
CONTROL_EPISODES = 20
"""Episodes per evaluation in control, and in games in words."""


def parse_cases(entries: Iterable[Case | str] | Case | str) -> list[Case]:
    """Return cases; one may stand alone.

    Texts are ``ENV``, ``ENV:ALGO,ALGO`` or ``ENV:ALGO,ALGO:POLICY,POLICY``. ``ENV`` may be ``module:id``, and a policy
    is a name of `algos.policies.registry`, such as ``mlp``.

    Raises:
        TypeError: if an entry is neither a text nor a `Case`.
        ValueError: on an unknown environment, algorithm or policy, two that do not fit together, or two cases of one
            name in one environment.
    """
    if isinstance(entries, (Case, str)):
        entries = [entries]
    cases = list[Case]()
    for entry in entries:
        if isinstance(entry, Case):
            cases.append(entry)
        elif isinstance(entry, str):
            cases += _cases_of_text(entry)
        else:
            raise TypeError(f"a case is {entry!r:.200}, expected a text such as 'CartPole-v1:ppo' or an algos.Case")
    folders = [folder_name(case, seed=1) for case in cases]
    if not cases or len(set(folders)) < len(folders):
        names = ", ".join(f"{case} in {case.env_name}" if case.name else str(case) for case in cases)
        raise ValueError(
            f"cases are {names or 'none'}: give each once, such as CartPole-v1:ppo,a2c, or "
            "give those of one environment different names (in Python name=...)"
        )
    return cases


def _cases_of_text(text: str) -> list[Case]:
    """Return the cases of ``ENV:ALGO,ALGO:POLICY,POLICY``, after importing the module that registers the environment.

    Algorithms and policies have names of their own kinds, so they are read from the end: what is left is ``ENV``, which
    may be ``module:id``.
    """
    import gymnasium

    import textenv  # noqa: F401 (registers the environments)
    from textenv.importing import read_module

    env, algorithms, policies = _parts_of_case(text)
    module, _, env_id = env.rpartition(":")
    if module:
        read_module(module)
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        advice = "give an environment of a package, or your own, as module:id, such as my_envs:Chase-v0"
        raise ValueError(f"case {text!r}: {error} {advice}") from error
    return [Case(env, algorithm, policy) for algorithm in algorithms for policy in policies]


def _parts_of_case(text: str) -> tuple[str, list[str], list[str | None]]:
    """Return environment, algorithms and policies of a case's text; without a policy the list has None alone.

    Raises:
        ValueError: if a part stands where it cannot, or a policy is unknown.
    """
    import gymnasium

    form = f"case {text!r:.200}: expected ENV, ENV:ALGO,ALGO or ENV:ALGO,ALGO:POLICY,POLICY, where ENV may be module:id"
    *parts, last = text.split(":")
    names = last.split(",")
    policies: list[str | None] = [None]

    # Policies, after algorithms
    after_algorithms = len(parts) > 1 and _are_algorithms(parts[-1])
    if parts and set(names) <= {"auto", *CONTROL_POLICIES}:
        if not after_algorithms and parts[-1] in gymnasium.registry:
            raise ValueError(f"{form}; {last} names no algorithm, so write {':'.join(parts)}:ppo:{last}")
        policies = [*names]
        *parts, last = parts
        names = last.split(",")
    elif after_algorithms:
        raise ValueError(f"{form}; policy is {last!r:.100}, expected one of auto, {', '.join(CONTROL_POLICIES)}")

    # Algorithms, unless the text ends with the id of an environment
    algorithms = ["ppo"]
    if parts and (policies != [None] or _are_algorithms(last) or parts[-1] in gymnasium.registry):
        algorithms = names
    else:
        parts.append(last)
    if len(parts) > 2 or not all(parts):
        raise ValueError(form)
    return ":".join(parts), algorithms, policies


def _are_algorithms(names: str) -> bool:
    """Return True for names of algorithms with commas between them."""
    return set(names.split(",")) <= set(CONFIGS)


def compare(
    cases: Sequence[Case | str] | Case | str,
    *,
    seeds: int | Sequence[int] = 3,
    run_dir: str | Path = "runs/compare",
    total_steps: int | None = None,
    processes: int = 2,
    overwrite: bool = False,
    quiet: bool = False,
    wrappers: Sequence[Wrapper] = (),
    dynamics_every: int = 0,
    k: int | Sequence[int] | None = None,
    num_samples: int | None = None,
    num_prompts: int | None = None,
    by: str | None = None,
    success: float = 1.0,
    answer: Answer | None = None,
) -> Report:
    """Train every case; print a table, and write a page, figures and CSV files.

    The same call goes on after an interruption: seeds that have finished are kept, and others are resumed from their
    newest checkpoint. So more seeds or cases are trained by a call that adds them.

    The files are ``report.html``, ``curves.csv`` (each iteration of each run), ``summary.csv``, ``curves.pdf`` and
    ``.svg`` (`plot_curves`), and the files of `algos.lab.comparison.paper.write_paper`.

    Args:
        cases: cases to train, or a single one; strings as in `parse_cases`.
        run_dir: folder for the report and a run folder for each training; other runs that an earlier call has
            trained there stay in the report.
        quiet: print nothing.
        wrappers: what wraps each environment of all cases, see `algos.make.make_vector_environment`.
        seeds, total_steps, processes, overwrite, dynamics_every: see `train_all`.
        k, num_samples, num_prompts, by, success, answer: for text, several samples of each prompt in the evaluations
            before and after training, as in `algos.evaluate`; the table and the page then have the pass rates.

    Returns:
        Mean metrics of each case, path of the report, and seconds. Printed, it is a table; a notebook shows the page.

    Raises:
        FileExistsError: if the folder has a run of a case and seed that was trained with other settings.
        Interrupted: a KeyboardInterrupt, after Ctrl-C, SIGTERM or SIGHUP; says how many runs have finished.
        ValueError: if a case, a number or a function cannot be used.
    """
    from algos.lab.comparison.report import Report, write_report
    from textenv.importing import load_function

    start = time.perf_counter()
    sampling = read_sampling(k, num_samples=num_samples, num_prompts=num_prompts, by=by, success=success, answer=answer)
    run_dir = Path(run_dir).absolute()  # a reward or an environment may change the working folder

    # Cases, with what wraps their environments
    for name in wrappers:
        if isinstance(name, str):
            load_function(name)  # its package may register the environments
    parsed = parse_cases(cases)
    if wrappers:
        parsed = [_wrapped(case, wrappers) for case in parsed]

    # Training, beside the runs of earlier calls
    run_dir.mkdir(parents=True, exist_ok=True)
    runs = train_all(
        parsed,
        run_dir=run_dir,
        seeds=seeds,
        total_steps=total_steps,
        processes=processes,
        overwrite=overwrite,
        quiet=quiet,
        dynamics_every=dynamics_every,
        sampling=sampling,
    )
    runs = sorted([*_earlier_runs(run_dir, parsed, runs), *runs], key=_place_among(parsed))
    name_cases(runs)
    (run_dir / STUDY).write_text(json.dumps([dataclasses.asdict(run) for run in runs]), encoding="utf-8")

    # Report
    page = write_report(run_dir, runs)
    summaries = {case: summary(of_case, study=runs) for case, of_case in by_case(runs).items()}
    seconds = time.perf_counter() - start
    means = {case: {name: figure.mean for name, figure in metrics.items()} for case, metrics in summaries.items()}
    report = Report(means | {"report": str(page.resolve()), "seconds": seconds}, summaries=summaries)
    if not quiet:
        print(report)
        print(f"{seconds:.0f} s. The report is {page.resolve()} (CSV files, and figures for a paper, beside it).")
    return report


def _wrapped(case: Case, wrappers: Sequence[Wrapper]) -> Case:
    """Return the case with these wrappers around its environment, outside of its own."""
    own_wrappers = case.recipe.env_kwargs.get("wrappers", ())
    env_kwargs = {**case.recipe.env_kwargs, "wrappers": [*own_wrappers, *wrappers]}
    return Case(recipe=case.recipe, env_kwargs=env_kwargs, name=case.name)


def _earlier_runs(run_dir: Path, cases: Sequence[Case], trained: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs of earlier calls that stay in the report: of other cases, or of these with the same settings."""
    if not (run_dir / STUDY).exists():
        return []
    here = {Path(run.folder).name for run in trained}
    settings = {_key(run): _settings_of(run) for run in trained}
    earlier = []
    for run in read_study(run_dir / STUDY):
        folder = Path(run.folder)
        if folder.name in here or not folder.is_dir():
            continue
        if _key(run) not in settings or not changed_settings(_settings_of(run), settings[_key(run)]):
            earlier.append(run)
    return earlier


def _key(run: RunResult) -> tuple[str, str, str]:
    """What tells the cases of a comparison apart: game, environment and name."""
    return run.game_name, run.env, run.label or run.case


def _settings_of(run: RunResult) -> Mapping[str, Any]:
    """Settings of a run of `compare`; empty if its record is missing."""
    record = read_record(Path(run.folder))
    return {} if record is None else record.settings


def _place_among(cases: Sequence[Case]) -> Callable[[RunResult], tuple[int, int]]:
    """Order of runs: those of other cases first, as they were; then the cases' own, each by its seeds."""
    order = [(case.game, case.env_id, str(case)) for case in cases]

    def place(run: RunResult) -> tuple[int, int]:
        key = _key(run)
        return (order.index(key), run.seed) if key in order else (-1, 0)

    return place


def train_all(
    cases: Sequence[Case],
    *,
    run_dir: Path,
    seeds: int | Sequence[int],
    total_steps: int | None = None,
    num_episodes: int | None = None,
    deterministic: bool = False,
    processes: int = 2,
    overwrite: bool = False,
    quiet: bool = False,
    dynamics_every: int = 0,
    sampling: Sampling | None = None,
) -> list[RunResult]:
    """Train every case with every seed, in run folders inside ``run_dir``, unless a run is there already.

    Args:
        cases, run_dir, quiet: see `compare`.
        seeds: runs per case, with seeds 1, 2, …; or the seeds. With 5 or more the report has 95 % limits.
        total_steps: steps of every run; None takes each case's own.
        num_episodes: episodes per evaluation; None takes `TEXT_EPISODES` or `CONTROL_EPISODES`.
        deterministic: evaluate with the most probable actions.
        processes: parallel runs, each in its own process with one thread; 0: one run after another in this process.
        overwrite: remove existing runs of these cases and seeds from the folder, finished or not.
        dynamics_every: iterations between measurements by `Dynamics`, plotted in the report; 0 measures none.
        sampling: how the evaluations sample each prompt several times; None: they do not.

    Raises:
        FileExistsError, Interrupted, ValueError: as `compare`.
    """
    from algos.evaluation import fit_sampling

    chosen = _seeds(seeds)
    if total_steps is not None and total_steps < 1:
        raise ValueError(f"total_steps is {total_steps}, expected at least 1, or None")
    if any(case.env_name.startswith("textenv/") for case in cases):
        from textenv.embedded.folder import EMBEDDED
        from textenv.lm.loading import model_folder

        model_folder(EMBEDDED)  # created once, before the workers start
    cases = [Case(recipe=case.recipe.with_absolute_paths(), total_steps=total_steps, name=case.name) for case in cases]

    # Everything that can be refused is refused before the first training
    jobs = [
        _Job(
            case=case,
            seed=seed,
            folder=run_dir / folder_name(case, seed),
            overwrite=overwrite,
            quiet=quiet,
            dynamics_every=dynamics_every,
            num_episodes=num_episodes,
            deterministic=deterministic,
            sampling=sampling,
        )
        for seed in chosen
        for case in reversed(cases)
    ]
    for job in jobs:
        _check_folder(job)
    for case in cases:
        try:
            case.recipe.build(seed=1)
            if sampling is not None:
                fit_sampling(sampling, case.recipe.environment(1, split="test"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"case {case}: {error}") from error
        if processes:
            _check_importable(case, sampling)

    kept = 0 if overwrite else sum(_finished(job.folder) for job in jobs)
    if kept and not quiet:
        print(f"{kept} of {len(jobs)} runs have finished already: they are kept", flush=True)

    # Training: two processes of one thread are faster than one of two threads
    results: list[RunResult | None] = []
    signal_name = "SIGINT"
    if not processes:
        try:
            for job in jobs:
                results.append(_run(job))
        except KeyboardInterrupt as stop:
            if isinstance(stop, Interrupted):
                signal_name = stop.name
    else:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_end_with_parent) as pool:
            try:
                with interrupted_by_signals("in a comparison"):
                    results = list(pool.map(_run_in_worker, jobs))
            except Interrupted as interrupted:
                # Ctrl-C at a terminal has reached the workers too, other signals have not. They write their checkpoints
                signal_name = interrupted.name
                for worker in multiprocessing.active_children():
                    worker.terminate()
                pool.shutdown(cancel_futures=True)
                results = []
            except BrokenProcessPool as error:
                finished = sum(_finished(job.folder) for job in jobs)
                raise ChildProcessError(
                    f"a process of the comparison was killed, perhaps for want of memory (processes={processes}); "
                    f"{finished} of {len(jobs)} runs have finished; the same command goes on, in {run_dir}"
                ) from error
    runs = [run for run in results if run is not None]
    if len(runs) < len(jobs):
        finished = sum(_finished(job.folder) for job in jobs)
        message = f"stopped: {finished} of {len(jobs)} runs have finished; the same command goes on, in {run_dir}"
        raise Interrupted(signal_name, message, resumable=False)
    return sorted(runs, key=_place_among(cases))


class _Job(NamedTuple):
    """One run of a comparison."""

    case: Case
    seed: int
    folder: Path
    overwrite: bool
    quiet: bool
    dynamics_every: int
    num_episodes: int | None
    """Episodes per evaluation; None: `TEXT_EPISODES` or `CONTROL_EPISODES`."""
    deterministic: bool
    """Evaluate with the most probable actions."""
    sampling: Sampling | None
    """How the evaluations sample each prompt several times; None: they do not."""

    @property
    def settings(self) -> dict[str, Any]:
        """What `Record` stores to know this run again."""
        return self.case.recipe.to_dict() | {
            "dynamics_every": self.dynamics_every,
            "num_episodes": self.num_episodes,
            "deterministic": self.deterministic,
            "sampling": None if self.sampling is None else self.sampling.settings,
        }


def _seeds(seeds: Any) -> list[int]:
    """Return the seeds: 1, 2, … up to a number, or those of a sequence."""
    number = isinstance(seeds, numbers.Integral) and not isinstance(seeds, bool)
    if number and seeds >= 1:
        return list(range(1, int(seeds) + 1))
    listed = [] if number or isinstance(seeds, (str, bytes)) or not isinstance(seeds, Iterable) else list(seeds)
    integers = all(isinstance(seed, numbers.Integral) and not isinstance(seed, bool) for seed in listed)
    if not listed or not integers or min(listed) < 0 or len(set(listed)) < len(listed):
        raise ValueError(
            f"seeds is {seeds!r:.200}, expected at least 1, the number of runs of each case, or a list of different "
            "seeds such as [1, 2, 3]"
        )
    return [int(seed) for seed in listed]


def _check_folder(job: _Job) -> None:
    """Raise a FileExistsError if a job's folder holds a run that it may neither keep nor continue nor remove."""
    if job.overwrite or not holds_run(job.folder):
        return
    record = read_record(job.folder)
    advice = (
        "give another folder (--run-dir), or remove the runs of these cases (--overwrite, in Python overwrite=True)"
    )
    if record is None:
        raise FileExistsError(f"{job.folder} holds a run already, not one of compare: {advice}")
    if changed := changed_settings(record.settings, job.settings):
        raise FileExistsError(f"{job.folder} holds a run already, with other settings ({'; '.join(changed)}): {advice}")


def _check_importable(case: Case, sampling: Sampling | None) -> None:
    """Raise a ValueError if a case has functions that another process cannot import."""
    advice = "give processes=0, or define them in a file of their own that this program imports"
    try:
        data = pickle.dumps((case, sampling))
    except Exception as error:  # a lambda, a function inside a function, or whatever an object raises
        raise ValueError(f"case {case}: its functions cannot be sent to other processes ({error}): {advice}") from error
    main = sys.modules["__main__"]
    if b"__main__" in data and getattr(main, "__file__", None) is None:  # a notebook, or typed at a prompt
        raise ValueError(f"case {case}: its functions are of a notebook, which other processes cannot import: {advice}")


def _finished(folder: Path) -> bool:
    record = read_record(folder)
    return record is not None and record.result is not None


def _end_with_parent() -> None:
    """Let this worker stop its training, with a checkpoint, when the process that started it has gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # at once outside a training
        while not _stopped:
            time.sleep(0.1)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


_stopped = False
"""True in a worker whose training was stopped by a signal: it begins none of the jobs that wait for it."""


def _run_in_worker(job: _Job) -> RunResult | None:
    """Return the result of one run; None if it was stopped by a signal, or waited in a worker that was."""
    global _stopped
    if _stopped:
        return None
    try:
        return _run(job)
    except KeyboardInterrupt:
        _stopped = True
        return None


def _run(job: _Job) -> RunResult:
    """Return the result of one run: read if it has finished, else trained, on one thread."""
    record = None if job.overwrite else read_record(job.folder)
    if record is not None and record.result is not None:
        return replace(record.result, game=job.case.game)  # version 0.11 did not store it
    return _train(job, again=record is not None)


def _train(job: _Job, *, again: bool) -> RunResult:
    """Train and evaluate one run, from its newest checkpoint if it goes on; keep the result in its folder."""
    import torch

    from algos.evaluation import summarise
    from algos.lab.insight.dynamics import Dynamics
    from algos.storage.env_state import share_objects
    from algos.training.run import Callback
    from textenv.rollout import is_episode_env

    torch.set_num_threads(1)
    case = job.case
    seed = job.seed
    folder = job.folder
    recipe = case.recipe
    agent = recipe.build(seed)
    policy = agent.policy

    # Evaluation before the training: of the initial weights, also when a checkpoint is restored afterwards
    is_game = describes_a_game(agent.env.spec) or not is_episode_env(agent.env)
    num_episodes = job.num_episodes or (CONTROL_EPISODES if is_game else TEXT_EPISODES)
    test_env = recipe.environment(min(num_episodes, 64), split="test")
    options: dict[str, Any] = {"num_episodes": num_episodes, "deterministic": job.deterministic}
    if job.sampling is not None:
        options = {"sampling": job.sampling}
    evaluate = partial(summarise, test_env, policy, seed=seed, **options)
    untrained_scores = evaluate()
    samples_before = _samples(test_env, policy)
    episode_before = record_episode(test_env, policy, seed=seed, deterministic=job.deterministic)

    # Training
    record = Record(case.name, seed, job.settings, None)

    class StoreSettings(Callback):
        """Stores the settings when the run starts: one that cannot start changes nothing."""

        def on_start(self, run: Run) -> None:
            write_record(folder, record)

    def report(metrics: dict[str, float]) -> None:
        if not job.quiet and int(metrics["iteration"]) % 10 == 0 and "episode/return" in metrics:
            progress = f"{metrics['steps']:>6.0f} steps, mean return {metrics['episode/return']:.3g}"
            print(f"{case} seed {seed}: {progress}", flush=True)

    resume = folder if again and checkpoints(folder) else None
    callbacks: list[Callback] = [StoreSettings()]
    if job.dynamics_every:
        callbacks.append(Dynamics(job.dynamics_every))
    history = agent.learn(
        recipe.total_steps,
        run_dir=folder,
        on_iteration=report,
        callbacks=callbacks,
        diagnose=_Measurements(),
        checkpoint_every=max(1, int(recipe.total_steps) // 10),
        resume=resume,
        overwrite=resume is None and (again or job.overwrite),
    )

    # Evaluation after the training, with the states that rewards have now
    share_objects(agent.env, test_env)
    after = evaluate()
    samples_after = _samples(test_env, policy)
    episode_after = record_episode(test_env, policy, seed=seed, deterministic=job.deterministic)
    write_episodes(folder, {"before": episode_before, "after": episode_after})
    samples = [(prompt, first, last) for (prompt, first), (_, last) in zip(samples_before, samples_after, strict=True)]
    result = RunResult(
        env=case.env_id,
        algorithm=case.algorithm_name,
        seed=seed,
        policy=type(policy).__name__,
        parameters=sum(p.numel() for p in policy.parameters()),
        best=solved_return(agent.env.spec),
        before=untrained_scores,
        after=after,
        history=in_steps_of_the_game(history, env_id=case.env_id, env_kwargs=recipe.env_kwargs),
        samples=samples,
        name=str(case),
        label=case.name,
        folder=str(folder),
        game=case.game,
        trained_parameters=sum(p.numel() for p in policy.parameters() if p.requires_grad),
    )
    write_record(folder, record._replace(result=result))
    return result


class _Measurements:
    """Measures each iteration (a ``diagnose`` of `algos.training.loop.learn`): `update_kl` and ``time/processor``.

    ``time/processor`` are the seconds that all processors spent on this process since the last iteration.
    """

    def __init__(self) -> None:
        self._last = time.process_time()

    def __call__(self, agent: Agent[Any], rollout: TensorDict) -> dict[str, float]:
        """Return the measurements of an iteration."""
        metrics = update_kl(agent, rollout)
        now = time.process_time()
        metrics["time/processor"] = now - self._last
        self._last = now
        return metrics


def _samples(env: Any, policy: Policy, count: int = 8) -> list[tuple[str, str]]:
    """Return a few prompts of a text environment and the policy's completions; none in control."""
    from algos.evaluation import evaluate
    from textenv.rollout import is_episode_env

    if not is_episode_env(env.unwrapped):
        return []
    evaluate(env, policy, num_episodes=count)
    return [(sample["prompt"], sample["completion"]) for sample in env.unwrapped.samples(range(count))]
