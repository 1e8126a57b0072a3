"""Runs read from their folders: of `compare`, of ``algos train``, or all below a folder."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from algos.comparison.summary import RunResult, by_case
from algos.sharing.run_summary import describe_run, read_options
from algos.training.run_folder import status
from algos.training.run_reader import METRICS, DamagedRunError, read_metrics
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
    """Results of a comparison; raises a ValueError if the file is damaged."""
    rows = read_json(path, what="the results of a comparison", kind=list)
    try:
        runs = [RunResult(**row | {"samples": [tuple(x) for x in row["samples"]]}) for row in rows]
    except (TypeError, KeyError) as error:
        advice = "expected the results of a comparison: remove it, or give another folder"
        raise DamagedRunError(f"{path} is damaged, {advice}: {error!r:.200}") from error
    return [dataclasses.replace(run, folder=str(path.parent / folder_name(run.case, run.seed))) for run in runs]


def folder_name(case: str, seed: int) -> str:
    """Name of a run's folder in that of its comparison."""
    return f"{case.replace('/', '-').replace(':', '-')}-{seed}"


def _run(folder: Path) -> RunResult:
    found = describe_run(folder)
    rows = read_metrics(folder)
    env, algorithm = (found.get("environment") or {}).get("id"), str(found.get("algorithm") or "?").lower()
    seed = (found.get("config") or {}).get("seed", 0)
    history: list[dict[str, Any]] = [row for row in rows if "steps" in row]
    env = env or "an environment without an id"
    return RunResult(env, algorithm, seed, found.get("policy", ""), 0, None, {}, {}, history, folder=str(folder))


def _named(runs: list[RunResult]) -> list[RunResult]:
    """Name the cases: environment and algorithm, with what else differs between those that share both."""
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
