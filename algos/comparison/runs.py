"""Runs read from their folders: of `compare`, of ``algos train``, or all below a folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from algos.comparison.summary import RunResult, by_case
from algos.sharing.run_summary import METRICS, describe_run
from algos.training.run_folder import status
from textenv.json_files import json_lines, read_json

STUDY = "report.json"
"""File of the results of `compare`, in its folder."""
SAME = ("seed",)
"""Settings that differ between the runs of a case."""


def read_runs(paths: Iterable[str | Path]) -> list[RunResult]:
    """Return the runs in folders; those that differ in their seed only are a case, named by what differs.

    Args:
        paths: folders of runs or of `compare`, or folders above them.

    Raises:
        FileNotFoundError: if a path has no run with at least one iteration.
        ValueError: if a file of a run is damaged.
    """
    found: dict[Path, RunResult] = {}
    for path in map(Path, paths):
        studies = sorted(path.rglob(STUDY))
        inside = [run for study in studies for run in _study(study)]
        folders = {Path(run.folder).resolve() for run in inside}
        inside += [_run(each.parent) for each in sorted(path.rglob(METRICS)) if each.parent.resolve() not in folders]
        if not any(run.history for run in inside):
            raise FileNotFoundError(
                f"{path} holds no run with an iteration ({METRICS}): give the folder of a run, of a comparison, or one "
                "above them ('algos runs FOLDER' lists the runs in a folder)"
            )
        found |= {Path(run.folder).resolve(): run for run in inside if run.history}
    return _named(list(found.values()))


def _study(path: Path) -> list[RunResult]:
    rows = read_json(path, what="the results of a comparison", kind=list)
    try:
        runs = [RunResult(**row | {"samples": [tuple(x) for x in row["samples"]]}) for row in rows]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged, expected the results of a comparison: {error!r:.200}") from error
    return [dataclasses.replace(run, folder=str(path.parent / folder_name(run.case, run.seed))) for run in runs]


def folder_name(case: str, seed: int) -> str:
    """Name of a run's folder in that of its comparison."""
    return f"{case.replace('/', '-').replace(':', '-')}-{seed}"


def _run(folder: Path) -> RunResult:
    found, history = describe_run(folder), json_lines(folder / METRICS)
    env, algorithm = (found.get("environment") or {}).get("id"), str(found.get("algorithm") or "?").lower()
    seed = (found.get("config") or {}).get("seed", 0)
    history = [row for row in history if isinstance(row.get("steps"), int)]
    return RunResult(env or "?", algorithm, seed, found.get("policy", ""), 0, None, {}, {}, history, folder=str(folder))


def _named(runs: list[RunResult]) -> list[RunResult]:
    """Name the cases: environment and algorithm, with what else differs between those that share both."""
    settings = {run.folder: settings_of(run) for run in runs}
    for case in by_case(runs).values():
        own = [run for run in case if not run.name]
        each = {json.dumps(settings[run.folder], sort_keys=True) for run in own}
        if len(each) < 2:
            continue
        differ = _differing([settings[run.folder] for run in own])
        for run in own:
            said = ", ".join(f"{name.rpartition('.')[2]} {settings[run.folder].get(name, '–')}" for name in differ[:3])
            run.name = f"{run.case} ({said})"
    return runs


def settings_of(run: RunResult) -> dict[str, str]:
    """Settings of a run by name, its hyper-parameters and those of its environment, as texts; without the seed."""
    found = describe_run(Path(run.folder)) if run.folder and Path(run.folder).is_dir() else {}
    env = found.get("environment") or {}
    parts = dict(found.get("config") or {}) | {f"environment.{x}": y for x, y in (env.get("kwargs") or {}).items()}
    parts |= {"wrappers": env["wrappers"]} if env.get("wrappers") else {}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in parts.items()}
    return {name: text for name, text in texts.items() if name not in SAME}


def differences(runs: Sequence[RunResult]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the settings that differ between the cases, by the first run of each."""
    cases = by_case(runs)
    found = [settings_of(own[0]) for own in cases.values()]
    return ["", *cases], [[name, *(each.get(name, "–") for each in found)] for name in _differing(found)]


def _differing(settings: Sequence[dict[str, str]]) -> list[str]:
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if len({each.get(name) for each in settings}) > 1]


def listed(runs: Sequence[RunResult]) -> list[list[Any]]:
    """Rows of a list of runs: case, seed, folder, status, steps, minutes, date, commit and processor."""
    rows = []
    for run in runs:
        made = describe_run(Path(run.folder)).get("made_by") or {} if Path(run.folder or "-").is_dir() else {}
        git, last = made.get("git") or {}, run.history[-1]
        state = status(Path(run.folder)) if made or Path(run.folder or "-").is_dir() else ""
        minutes = f"{last['time/seconds'] / 60:.1f}" if "time/seconds" in last else ""
        commit = git.get("commit", "")[:10] + ("+" if git.get("dirty") else "")
        rows.append(
            [run.case, run.seed, run.folder, state, f"{last['steps']:,}", minutes, made.get("date", ""), commit]
        )
    return rows
