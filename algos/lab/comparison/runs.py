"""Runs read from their folders: of `compare`, of ``algos train``, or all below a folder."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from algos.lab.comparison.record import read_record, result_from
from algos.lab.comparison.summary import Case, RunResult, by_case, name_cases
from algos.lab.run_summary import describe_run, read_options
from algos.storage.run_folder import status
from algos.storage.run_reader import METRICS, DamagedRunError, read_metrics
from textenv.json_files import read_json

STUDY = "report.json"
"""File of the results of `compare`, in its folder."""
SAME = (
    "seed", "env", "algo", "config", "json", "quiet", "logger", "sample_every", "checkpoint_every", "num_episodes",
    "device", "workers", "process_timeout", "trust_remote_code", "dynamics_every", "eval_every", "eval_num_episodes",
)  # fmt: skip
"""Options of ``algos train`` that do not separate cases: the seed, what names a case already, logging, hardware."""
LONGEST = 40
"""Maximum length of a setting in the name of a case."""


def read_runs(paths: Iterable[str | Path]) -> list[RunResult]:
    """Return the runs in folders; those that differ only in the seed (and in `SAME`) are a case, named by what differs.

    Two runs with the same settings and the same seed are two cases, named by their folders.

    Args:
        paths: folders of runs or of `compare`, or folders above them.

    Raises:
        FileNotFoundError: if a path has no run with at least one iteration.
        ValueError: if a file of a run is damaged.
    """
    found: dict[Path, RunResult] = {}
    for path in map(Path, paths):
        studies = sorted(path.rglob(STUDY))
        inside = [run for study in studies for run in read_study(study)]
        folders = {Path(run.folder).resolve() for run in inside}
        inside += [_run(each.parent) for each in sorted(path.rglob(METRICS)) if each.parent.resolve() not in folders]
        if not any(run.history for run in inside):
            raise FileNotFoundError(
                f"{path} holds no run with an iteration ({METRICS}): give the folder of a run, of a comparison, or one "
                "above them ('algos runs FOLDER' lists the runs in a folder)"
            )
        found |= {Path(run.folder).resolve(): run for run in inside if run.history}
    return _named(list(found.values()))


def read_study(path: Path) -> list[RunResult]:
    """Read the results of a comparison; raises a ValueError if the file is damaged."""
    rows = read_json(path, what="the results of a comparison", kind=list)
    runs = []
    for row in rows:
        try:
            run = result_from(row, folder=Path())
            folder = Path(row["folder"]).name
        except (TypeError, KeyError, ValueError) as error:
            advice = "expected the results of a comparison: remove it, or give another folder"
            raise DamagedRunError(f"{path} is damaged, {advice}: {error!r:.200}") from error
        if not run.label and not run.case.endswith(f"{run.env}:{run.algorithm}"):
            run.label = run.case  # of version 0.9, which stored no label
        runs.append(dataclasses.replace(run, folder=str(path.parent / folder)))
    return runs


def folder_name(case: Case, seed: int) -> str:
    """Return the name of a run's folder in that of its comparison."""
    name = f"{case.env_name}-{case.name}" if case.name else str(case)
    return f"{name.replace('/', '-').replace(':', '-')}-{seed}"


def _run(folder: Path) -> RunResult:
    """Read a run from its folder: what `compare` keeps there or, of another run, its metrics and settings."""
    record = read_record(folder)
    if record is not None and record.result is not None:
        return record.result

    rows = [row for row in read_metrics(folder) if "steps" in row]

    # Environment, algorithm, seed
    description = describe_run(folder)
    env = (description.get("environment") or {}).get("id")
    algorithm = str(description.get("algorithm") or "?").lower()
    seed = (description.get("config") or {}).get("seed", 0)
    if record is not None:  # a run of `compare` under way
        env = str(record.settings.get("env")).rpartition(":")[2]
        algorithm = str(record.settings.get("algorithm")).rpartition(".")[2]
        seed = record.seed
    env = env or "an environment without an id"
    run = RunResult(env, algorithm, seed, description.get("policy", ""), 0, None, {}, {}, rows, folder=str(folder))
    if record is not None:
        run.label = record.name
        run.name = record.name or f"{env}:{algorithm}"
    return run


def _named(runs: list[RunResult]) -> list[RunResult]:
    """Name the cases: environment and algorithm, with what else differs between those that share both."""
    name_cases(runs)
    settings = {run.folder: settings_of(run) for run in runs}
    for case in by_case(runs).values():
        own = [run for run in case if not run.name]
        each = {json.dumps(settings[run.folder], sort_keys=True): settings[run.folder] for run in own}
        if len(each) < 2:
            continue
        differ, labels = _differing(list(each.values())), dict[str, str]()
        # As few settings as tell the cases apart, three if there are so many; whole ones if those cut off do not.
        counts = range(min(3, len(differ)), len(differ) + 1)
        for count, longest in [*((n, LONGEST) for n in counts), (len(differ), None)]:
            parts = {key: [f"{x} {known.get(x, '–')[:longest]}" for x in differ[:count]] for key, known in each.items()}
            labels = {key: ", ".join(said) for key, said in parts.items()}
            if len(set(labels.values())) == len(each):
                break
        for run in own:
            run.name = f"{run.case} ({labels[json.dumps(settings[run.folder], sort_keys=True)]})"
    twice = [key for key, count in Counter((run.case, run.seed) for run in runs).items() if count > 1]
    for run in [run for run in runs if (run.case, run.seed) in twice]:
        run.name = f"{run.case} in {run.folder}"
        run.label = ""  # which the other folder's run has too
    return runs


def settings_of(run: RunResult) -> dict[str, str]:
    """Settings of a run by name, as texts: the options of ``algos train``, or else what was saved with the agent."""
    folder = Path(run.folder or "-")
    if options := read_options(folder):
        parts = {name: x for name, x in options.items() if name not in SAME} | options["config"]
    else:
        found = describe_run(folder)
        env, policy = found.get("environment") or {}, found.get("policy_arguments") or {}
        parts = {f"environment.{name}": x for name, x in (env.get("kwargs") or {}).items()}
        parts |= found.get("config") or {}
        parts |= {f"policy.{name}": x for name, x in policy.items() if name not in ("observation", "action")}
        parts |= {"policy": found.get("policy")} | ({"wrappers": env["wrappers"]} if env.get("wrappers") else {})
    parts = {name: x for name, x in parts.items() if name != "seed"}
    return {name: x if isinstance(x, str) else json.dumps(x) for name, x in parts.items()}


def differences(runs: Sequence[RunResult]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the settings that differ between the cases, by the first run of each."""
    cases = by_case(runs)
    found = [settings_of(own[0]) for own in cases.values()]
    return ["", *cases], [[name, *(each.get(name, "–") for each in found)] for name in _differing(found)]


def _differing(settings: Sequence[dict[str, str]]) -> list[str]:
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if len({each.get(name) for each in settings}) > 1]


def listed(runs: Sequence[RunResult]) -> list[list[Any]]:
    """Rows of a list of runs: case, seed, folder, status, steps, minutes, date and commit."""
    rows = []
    for run in runs:
        made = describe_run(Path(run.folder)).get("made_by") or {} if Path(run.folder or "-").is_dir() else {}
        git, last = made.get("git") or {}, run.history[-1]
        state = status(Path(run.folder)) if Path(run.folder or "-").is_dir() else ""
        minutes = f"{last['time/seconds'] / 60:.1f}" if "time/seconds" in last else ""
        commit = str(git.get("commit", ""))[:10] + ("+" if git.get("dirty") else "")
        rows.append(
            [run.case, run.seed, run.folder, state, f"{last['steps']:,}", minutes, made.get("date", ""), commit]
        )
    return rows
