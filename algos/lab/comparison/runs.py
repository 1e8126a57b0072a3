"""Runs read from their folders: of `compare`, of ``algos train``, or all below a folder."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from algos.lab.comparison.games import game_of, in_steps_of_the_game
from algos.lab.comparison.record import read_record, result_from
from algos.lab.comparison.summary import Case, RunResult, by_case, case_name, name_cases
from algos.lab.run_summary import describe_run, read_options
from algos.make import WORDS
from algos.recipe import IMPORT
from algos.storage.run_files import METRICS
from algos.storage.run_folder import status
from algos.storage.run_reader import DamagedRunError, read_metrics
from textenv.json_files import read_json

STUDY = "report.json"
"""File of the results of `compare`, in its folder."""
IGNORED_OPTIONS = (
    "seed",
    "env",
    "algo",
    "config",
    "json",
    "quiet",
    "logger",
    "sample_every",
    "checkpoint_every",
    "num_episodes",
    "device",
    "workers",
    "process_timeout",
    "trust_remote_code",
    "dynamics_every",
    "eval_every",
    "eval_num_episodes",
)
"""Options of ``algos train`` that do not separate cases: the seed, what names a case already, logging, hardware."""
MAX_SETTING_CHARACTERS = 40
"""Maximum length of a setting in the name of a case."""
MISSING = "–"
"""Text for a setting that a case does not have."""


def read_runs(paths: Iterable[str | Path]) -> list[RunResult]:
    """Return the runs in folders, grouped into cases: ``name`` of a run is that of its case.

    Runs that differ only in the seed (and in `IGNORED_OPTIONS`) are one case, named by what differs from the others.
    Two runs with the same settings and the same seed are two cases, named by their folders.

    Args:
        paths: folders of runs or of `compare`, or folders above them.

    Raises:
        FileNotFoundError: if a path has no run with at least one iteration.
        ValueError: if a file of a run is damaged.
    """
    by_folder: dict[Path, RunResult] = {}
    for path in map(Path, paths):
        # Runs of comparisons, then all others
        runs = [run for study in sorted(path.rglob(STUDY)) for run in read_study(study)]
        of_studies = {Path(run.folder).resolve() for run in runs}
        for metrics in sorted(path.rglob(METRICS)):
            folder = metrics.parent
            if folder.resolve() not in of_studies:
                runs.append(_read_run(folder))

        runs = [run for run in runs if run.history]
        if not runs:
            raise FileNotFoundError(
                f"{path} holds no run with an iteration ({METRICS}): give the folder of a run, of a comparison, or one "
                "above them ('algos runs FOLDER' lists the runs in a folder)"
            )
        for run in runs:
            by_folder[Path(run.folder).resolve()] = run
    runs = list(by_folder.values())
    _name(runs)
    return runs


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
        if not run.label and f"{run.env}:{run.algorithm}" not in run.case:
            run.label = run.case  # of version 0.9, which stored no label
        runs.append(dataclasses.replace(run, folder=str(path.parent / folder)))
    return runs


def folder_name(case: Case, seed: int) -> str:
    """Return the name of a run's folder in that of its comparison."""
    name = str(case)
    if case.name:
        name = f"{case.env_name}-{case.name}"
        if case.env_id == WORDS:
            game_id, _, _ = case.game.partition(" ")
            name = f"{case.env_name}-{game_id}-{case.name}"
    return f"{name.replace('/', '-').replace(':', '-')}-{seed}"


def _name_of_setting(value: object) -> str:
    """Return the name without its module of an environment or algorithm in the plain form of a recipe."""
    if isinstance(value, dict):  # a function or class
        value = value.get(IMPORT)
    return str(value).rpartition(":")[2]


def _read_run(folder: Path) -> RunResult:
    """Read a run from its folder: what `compare` keeps there or, of another run, its metrics and settings."""
    record = read_record(folder)
    if record is not None and record.result is not None:
        return record.result

    rows = [row for row in read_metrics(folder) if "steps" in row]

    # Environment, algorithm, seed
    description = describe_run(folder)
    environment = description.get("environment") or {}
    env = environment.get("id")
    env_kwargs = {**(environment.get("kwargs") or {}), "wrappers": environment.get("wrappers") or ()}
    algorithm = str(description.get("algorithm") or "?").lower()
    seed = (description.get("config") or {}).get("seed", 0)
    if record is not None:  # a run of `compare` under way
        env = _name_of_setting(record.settings.get("env"))
        env_kwargs = record.settings.get("env_kwargs") or {}
        algorithm = _name_of_setting(record.settings.get("algo")).rpartition(".")[2]
        seed = record.seed
    env = env or "an environment without an id"

    run = RunResult(
        env=env,
        algorithm=algorithm,
        seed=seed,
        policy=description.get("policy", ""),
        parameters=0,
        best=None,
        before={},
        after={},
        history=in_steps_of_the_game(rows, env_id=env, env_kwargs=env_kwargs),
        folder=str(folder),
        game=game_of(env, env_kwargs),
    )
    if record is not None:
        run.label = record.name
        run.name = record.name or case_name(env, algorithm, record.settings.get("policy"))
    return run


def _name(runs: Sequence[RunResult]) -> None:
    """Name the cases: environment and algorithm, with what else differs between those that share both.

    Changes ``name`` of the runs, and ``label`` where two runs cannot be told apart by it.
    """
    name_cases(runs)

    # Cases of equal names are told apart by their settings: a folder of `compare` may have seeds of an earlier call
    # with other ones
    settings = {run.folder: settings_of(run) for run in runs}
    for of_case in by_case(runs).values():
        unnamed = [run for run in of_case if not run.name]
        named = [run for run in of_case if run.name]
        for alike in (unnamed, named):
            labels = _labels([settings[run.folder] for run in alike])
            for run, label in zip(alike, labels, strict=True):
                if label:
                    run.name = f"{run.case} ({label})"
                    run.label = run.label and f"{run.label} ({label})"

    # Runs of equal settings and seeds are told apart by their folders
    counts = Counter((run.case, run.seed) for run in runs)
    for run in runs:
        if counts[run.case, run.seed] > 1:
            run.name = f"{run.case} in {run.folder}"
            run.label = ""  # which the other folder's run has too


def _labels(settings: Sequence[dict[str, str]]) -> list[str]:
    """Return a text for each of these settings that tells unequal ones apart; empty texts if all are equal."""
    distinct = {_as_key(x): x for x in settings}
    if len(distinct) < 2:
        return [""] * len(settings)

    # As few names as tell them apart, but three if so many differ; at last, values are not cut off
    names = _differing(list(distinct.values()))
    fewest = min(3, len(names))
    attempts: list[tuple[int, int | None]] = [(n, MAX_SETTING_CHARACTERS) for n in range(fewest, len(names) + 1)]
    attempts.append((len(names), None))
    for count, max_characters in attempts:
        labels = {key: _label(x, names[:count], max_characters) for key, x in distinct.items()}
        if len(set(labels.values())) == len(distinct):
            break
    return [labels[_as_key(x)] for x in settings]


def _as_key(settings: dict[str, str]) -> str:
    return json.dumps(settings, sort_keys=True)


def _label(settings: dict[str, str], names: Sequence[str], max_characters: int | None) -> str:
    """Return the settings of these names; if they may be cut off, files stand without their folders, too."""
    parts = []
    for name in names:
        value = settings.get(name, MISSING)
        if max_characters is not None:
            value = _without_folders(value)
            if len(value) > max_characters:
                value = f"{value[:max_characters]}…"
        parts.append(f"{name} {value}")
    return ", ".join(parts)


def _without_folders(value: str) -> str:
    """Return a setting's text with names of files instead of absolute paths, and a list of texts without its quotes.

    Example:
        >>> _without_folders('["/home/me/rewards.py:short", "/home/me/rewards.py:polite=0.3"]')
        'rewards.py:short, rewards.py:polite=0.3'
        >>> _without_folders("/home/me/prompts.jsonl"), _without_folders("yes /and/or no")
        ('prompts.jsonl', 'yes /and/or no')
    """
    entries: Any = value
    with suppress(ValueError):
        entries = json.loads(value)
    if not isinstance(entries, list):
        entries = [value]
    if not all(isinstance(entry, str) for entry in entries):
        return value
    shown = []
    for entry in entries:
        if entry.startswith("/") and not re.search(r"\s", entry):
            _, _, entry = entry.rstrip("/").rpartition("/")
        shown.append(entry)
    return ", ".join(shown)


def settings_of(run: RunResult) -> dict[str, str]:
    """Settings of a run by name, as texts: the options of ``algos train``, or else what was saved with the agent."""
    folder = Path(run.folder or "-")
    options = read_options(folder)
    settings: dict[str, object] = {}
    if options:
        # A run of ``algos train``
        settings |= {name: x for name, x in options.items() if name not in IGNORED_OPTIONS}
        settings |= options["config"]
    else:
        # Any other run: what was saved with its agent
        description = describe_run(folder)
        env = description.get("environment") or {}
        policy_arguments = description.get("policy_arguments") or {}
        for name, x in (env.get("kwargs") or {}).items():
            settings[f"environment.{name}"] = x
        settings |= description.get("config") or {}
        for name, x in policy_arguments.items():
            if name not in ("observation", "action"):
                settings[f"policy.{name}"] = x
        settings["policy"] = description.get("policy")
        if env.get("wrappers"):
            settings["wrappers"] = env["wrappers"]
    settings.pop("seed", None)

    # Texts
    texts = {}
    for name, x in settings.items():
        texts[name] = x if isinstance(x, str) else json.dumps(x)
    return texts


def differences(runs: Sequence[RunResult]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table: the settings that differ between the cases, by the first run of each."""
    cases = by_case(runs)
    settings = [settings_of(of_case[0]) for of_case in cases.values()]
    rows = []
    for name in _differing(settings):
        rows.append([name, *(x.get(name, MISSING) for x in settings)])
    return ["", *cases], rows


def _differing(settings: Sequence[dict[str, str]]) -> list[str]:
    """Names whose values are not the same in all settings, in the order of their first appearance."""
    names = dict.fromkeys(name for x in settings for name in x)
    return [name for name in names if len({x.get(name) for x in settings}) > 1]


def listed(runs: Sequence[RunResult]) -> list[list[object]]:
    """Return rows of a list of runs: case, seed, folder, status, steps, minutes, date and commit."""
    rows = []
    for run in runs:
        # What the folder says, if it still exists
        provenance: Mapping[str, Any] = {}
        run_status = ""
        if run.folder and Path(run.folder).is_dir():
            provenance = describe_run(Path(run.folder)).get("made_by") or {}
            run_status = status(Path(run.folder))
        git = provenance.get("git") or {}
        commit = str(git.get("commit", ""))[:10]
        if git.get("dirty"):
            commit += "+"

        last = run.history[-1]
        minutes = ""
        if "time/seconds" in last:
            minutes = f"{last['time/seconds'] / 60:.1f}"
        steps = f"{last['steps']:,}"
        rows.append([run.case, run.seed, run.folder, run_status, steps, minutes, provenance.get("date", ""), commit])
    return rows
