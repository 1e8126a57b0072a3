"""Comparison of any environments, algorithms and seeds by the same metrics."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import numbers
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algos.config import CONFIGS, check_total_steps
from algos.envs.wrapping import Wrapper
from algos.lab.comparison.jobs import Job, check_case, check_folder, make_jobs, num_finished
from algos.lab.comparison.record import changed_settings, read_record
from algos.lab.comparison.runs import STUDY, folder_name, read_study
from algos.lab.comparison.summary import Case, RunResult, by_case, name_cases, summary
from algos.policies.registry import CONTROL_POLICIES
from algos.statistics.pass_rates import Answer, Sampling, read_sampling
from algos.training.signals import Interrupted, interrupted_by_signals
from textenv.startup import load_torch

if TYPE_CHECKING:
    from algos.lab.comparison.report import Report

MAX_BYTES = 200
"""Maximum length of the name of a run's folder; file systems allow 255, and drafts of files have longer names."""
DEFAULT_CASES = ("CartPole-v1:ppo", "textenv/Reviews-v0:ppo")


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
    for case in cases:
        _check_name(case)
    folders = [folder_name(case, seed=1) for case in cases]
    if not cases or len(set(folders)) < len(folders):
        names = ", ".join(f"{case} in {case.env_name}" if case.name else str(case) for case in cases)
        raise ValueError(
            f"cases are {names or 'none'}: give each once, such as CartPole-v1:ppo,a2c, or "
            "give those of one environment different names (in Python name=...)"
        )
    return cases


def _check_name(case: Case) -> None:
    """Raise a ValueError if a case's name cannot be that of a folder, or is a key of the report."""
    name = str(case)
    problem = ""
    if name in ("report", "seconds"):
        problem = "a key of the comparison's result"
    elif len(os.fsencode(folder_name(case, seed=1))) > MAX_BYTES:
        problem = "too long for the name of a folder"
    elif not name.isprintable():
        problem = "not printable on one line"
    if problem:
        raise ValueError(f"the name of a case is {name!r:.200}, which is {problem}: give it another one (name=...)")


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

    # Policies, after algorithms; some names, such as sac, are those of both
    after_algorithms = len(parts) > 1 and _are_algorithms(parts[-1])
    are_policies = set(names) <= {"auto", *CONTROL_POLICIES}
    if parts and are_policies and (after_algorithms or not _are_algorithms(last)):
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
        wrappers: what wraps each environment of all cases instead of the wrappers of its preset, and outside of those
            that a case is given, see `algos.make.make_vector_environment`.
        seeds, total_steps, processes, overwrite, dynamics_every: see `train_all`.
        k, num_samples, num_prompts, by, success, answer: for text, several samples of each prompt in the evaluations
            before and after training, as in `algos.evaluate`; the table and the page then have the pass rates.

    Returns:
        Mean metrics of each case, path of the report, and seconds. Printed, it is a table; a notebook shows the page.

    Raises:
        FileExistsError: if the folder has a run of a case and seed that was trained with other settings.
        Interrupted: a KeyboardInterrupt, after Ctrl-C, SIGTERM or SIGHUP; says how many runs have finished.
        ValueError: if a case, a number or a function cannot be used.
        Exception: what ended a run; its notes name case and seed, and say how many runs have finished.
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
    runs = sorted([*_earlier_runs(run_dir, parsed, runs), *runs], key=_report_order(parsed))
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
    """Return the case with these wrappers around its environment: outside of its own, but instead of its preset's."""
    own_wrappers: Sequence[Wrapper] = ()
    if case.own_wrappers:
        own_wrappers = case.recipe.env_kwargs.get("wrappers", ())
    env_kwargs = {**case.recipe.env_kwargs, "wrappers": [*own_wrappers, *wrappers]}
    return Case(recipe=case.recipe, env_kwargs=env_kwargs, name=case.name)


def _earlier_runs(run_dir: Path, cases: Sequence[Case], trained: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs of earlier calls that stay in the report: of other cases, or of these with the same settings."""
    if not (run_dir / STUDY).exists():
        return []
    here = {Path(run.folder).name for run in trained}
    settings = {_case_key(run): _settings_of(run) for run in trained}
    earlier = []
    for run in read_study(run_dir / STUDY):
        folder = Path(run.folder)
        if folder.name in here or not folder.is_dir():
            continue
        if _case_key(run) not in settings or not changed_settings(_settings_of(run), settings[_case_key(run)]):
            earlier.append(run)
    return earlier


def _case_key(run: RunResult) -> tuple[str, str, str]:
    """What tells the cases of a comparison apart: game, environment and name."""
    return run.game_name, run.env, run.label or run.case


def _settings_of(run: RunResult) -> Mapping[str, Any]:
    """Settings of a run of `compare`; empty if its record is missing."""
    record = read_record(Path(run.folder))
    return {} if record is None else record.settings


def _report_order(cases: Sequence[Case]) -> Callable[[RunResult], tuple[int, int]]:
    """Return a sort key: runs of other cases first, in their order; then these cases, each by seed."""
    case_keys = [(case.game, case.env_id, str(case)) for case in cases]

    def order_of(run: RunResult) -> tuple[int, int]:
        key = _case_key(run)
        if key not in case_keys:
            return (-1, 0)
        return (case_keys.index(key), run.seed)

    return order_of


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
        num_episodes: episodes per evaluation; None takes `TEXT_EPISODES` or `CONTROL_EPISODES` of
            `algos.lab.comparison.one_run`.
        deterministic: evaluate with the most probable actions.
        processes: parallel runs, each in its own process with one thread; 0: one run after another in this process.
        overwrite: remove existing runs of these cases and seeds from the folder, finished or not.
        dynamics_every: iterations between measurements by `Dynamics`, plotted in the report; 0 measures none.
        sampling: how the evaluations sample each prompt several times; None: they do not.

    Raises:
        FileExistsError, Interrupted, ValueError: as `compare`.
    """
    # What to train
    seed_list = _seeds(seeds)
    cases = [Case(recipe=case.recipe.with_absolute_paths(), total_steps=total_steps, name=case.name) for case in cases]
    for case in cases:
        check_total_steps(case.recipe.total_steps)
    if any(case.env_name.startswith("textenv/") for case in cases):
        from textenv.embedded.folder import EMBEDDED
        from textenv.lm.loading import model_folder

        model_folder(EMBEDDED)  # created once, before the workers start

    # Everything that can be refused is refused before the first training
    jobs = make_jobs(
        cases,
        seed_list,
        run_dir=run_dir,
        overwrite=overwrite,
        quiet=quiet,
        dynamics_every=dynamics_every,
        num_episodes=num_episodes,
        deterministic=deterministic,
        sampling=sampling,
    )
    for job in jobs:
        check_folder(job)
    for case in cases:
        check_case(case, sampling, processes=processes)

    # Runs that an earlier call has finished
    num_kept = 0
    if not overwrite:
        num_kept = num_finished(jobs)
    if num_kept and not quiet:
        print(f"{num_kept} of {len(jobs)} runs have finished already: they are kept", flush=True)

    # Training
    try:
        if processes:
            results, signal_name = _run_in_processes(jobs, processes)
        else:
            results, signal_name = _run_here(jobs)
    except Exception as error:  # of an environment, a reward, a full disk, …
        error.add_note(_how_to_go_on(jobs))
        raise
    if len(results) < len(jobs):
        name = signal_name or "SIGINT"  # if a signal stopped workers alone, they have not said which
        raise Interrupted(name, f"stopped: {_how_to_go_on(jobs)}", resumable=False)
    return sorted(results, key=_report_order(cases))


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


def _run_here(jobs: Sequence[Job]) -> tuple[list[RunResult], str | None]:
    """Run the jobs one after another in this process.

    Returns:
        The results, fewer than jobs after a signal; and the name of the signal, if one stopped it.
    """
    results: list[RunResult] = []
    try:
        for job in jobs:
            results.append(_run_job(job))
    except Interrupted as interrupted:
        return results, interrupted.name
    except KeyboardInterrupt:  # Ctrl-C while nothing trained
        return results, "SIGINT"
    return results, None


def _run_in_processes(jobs: Sequence[Job], processes: int) -> tuple[list[RunResult], str | None]:
    """Run the jobs in parallel processes of one thread each: two are faster than one process of two threads.

    Returns:
        The results, fewer than jobs after a signal; and the name of the signal, if one stopped this process.

    Raises:
        ChildProcessError: if a process was killed.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_start_worker) as pool:
        try:
            with interrupted_by_signals("in a comparison"):
                results = list(pool.map(_run_in_worker, jobs))
        except Interrupted as interrupted:
            # Ctrl-C at a terminal has reached the workers too, other signals have not. They write their checkpoints
            for worker in multiprocessing.active_children():
                worker.terminate()
            pool.shutdown(cancel_futures=True)
            return [], interrupted.name
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"a process of the comparison was killed, perhaps for want of memory (processes={processes})"
            ) from error
    return [result for result in results if result is not None], None


def _how_to_go_on(jobs: Sequence[Job]) -> str:
    """Return a part of a message: how many jobs have finished, and how to continue."""
    run_dir = jobs[0].folder.parent
    return f"{num_finished(jobs)} of {len(jobs)} runs have finished; the same command goes on, in {run_dir}"


def _start_worker() -> None:
    """Load torch, and let this worker stop its training, with a checkpoint, when its parent process has gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # at once outside a training
        while not _stopped:
            time.sleep(0.1)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    load_torch()


_stopped = False
"""True in a worker whose training was stopped by a signal: it begins none of the jobs that wait for it."""


def _run_in_worker(job: Job) -> RunResult | None:
    """Return the result of one run; None if it was stopped by a signal, or waited in a worker that was."""
    global _stopped
    if _stopped:
        return None
    try:
        return _run_job(job)
    except KeyboardInterrupt:
        _stopped = True
        return None


def _run_job(job: Job) -> RunResult:
    """Return the result of one run: read if it has finished, else trained, on one thread."""
    record = None
    if not job.overwrite:
        record = read_record(job.folder)
    if record is not None and record.result is not None:
        return replace(record.result, game=job.case.game)  # version 0.11 did not store it

    from algos.lab.comparison.one_run import train  # imports torch

    try:
        return train(job, restarts=record is not None)
    except Exception as error:
        error.add_note(f"in case {job.case}, seed {job.seed}")
        raise
