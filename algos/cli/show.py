"""``algos runs``, ``algos show`` and ``algos envs``: what was run, and what can be."""

import dataclasses
import inspect
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, ClassVar

import tyro

from algos.cli.arguments import Command
from algos.cli.tables import print_table
from algos.config import CONFIGS
from algos.training.run_folder import status
from algos.training.save import describe, read_description
from textenv.json_files import parse_json
from textenv.registration import NAMES
from textenv.rendering import sparkline

METRICS = "metrics.jsonl"
SCORES = ("eval/mean_return", "episode/return")
"""Metrics of a run's score: of the evaluation while training, if there is one, else of the training."""
CURVES = (*SCORES, "episode/length", "reference/kl", "policy/approx_kl", "policy/entropy", "sft/loss")
SAMPLES = 3
"""Number of samples to show, the newest."""


@dataclass(frozen=True, kw_only=True)
class Runs(Command):
    """List the runs in a folder and below it: status, steps, score and seconds."""

    prints: ClassVar[bool] = True
    folder: tyro.conf.Positional[Path] = Path("runs")
    """Folder to search."""

    def run(self) -> list[dict[str, Any]]:
        """Find and summarise the runs."""
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there is no folder {self.folder}: give the folder that holds your runs")
        found = []
        for path, folders, files in os.walk(self.folder):
            folders.sort()
            if METRICS in files:
                folders.clear()  # those of a run hold its parts
                description: dict[str, Any] = {}
                with suppress(ValueError):  # 'algos show' says what is wrong with this run
                    description = _description(Path(path))
                found.append(summarise(Path(path), list(_json_lines(Path(path) / METRICS)), description))
        if not self.json:
            _print_runs(found)
        return found


@dataclass(frozen=True, kw_only=True)
class Envs(Command):
    """List our text environments, with the task of each."""

    prints: ClassVar[bool] = True

    def run(self) -> list[dict[str, Any]]:
        """Read the first line about each task."""
        from textenv.tasks.builtin import GAMES, TASKS
        from textenv.tasks.reasoning_gym import ReasoningGym

        tasks = TASKS | {name: make for name, (make, _) in GAMES.items()} | {"ReasoningGym": ReasoningGym}
        lines = {name: str(inspect.getdoc(tasks[name])).partition("\n")[0] for name in NAMES}
        found = [{"environment": f"textenv/{name}-v0", "task": line.replace("`", "")} for name, line in lines.items()]
        if not self.json:
            print_table([entry.values() for entry in found], ["environment", "task"])
        return found


@dataclass(frozen=True, kw_only=True)
class Show(Command):
    """Show a run: how it was made, its configuration, its curves, its newest samples."""

    prints: ClassVar[bool] = True
    folder: tyro.conf.Positional[Path]
    """Folder of the run."""

    def run(self) -> dict[str, Any]:
        """Read the folder, and print what it holds."""
        if not (self.folder / METRICS).is_file():
            raise FileNotFoundError(
                f"{self.folder} holds no run ({METRICS} is missing): 'algos runs FOLDER' lists the runs in a folder"
            )
        metrics, description = list(_json_lines(self.folder / METRICS)), _description(self.folder)
        result: dict[str, Any] = summarise(self.folder, metrics, description) | {
            "made_by": description.get("made_by") or {},
            "config": _changed(description),
            "curves": {name: values for name in CURVES if (values := _column(metrics, name))},
            "samples": list(_json_lines(self.folder / "samples.jsonl"))[-SAMPLES:],
        }
        if not self.json:
            _print_run(**result)
        return result


def summarise(folder: Path, metrics: list[dict[str, Any]], description: dict[str, Any]) -> dict[str, Any]:
    """Return environment, algorithm, status, steps, last and best score, and seconds of a run."""
    scores: list[Any] = next((found for name in SCORES if (found := _column(metrics, name))), [None])
    last = metrics[-1] if metrics else {}
    return {
        "run": str(folder),
        "environment": (description.get("environment") or {}).get("id"),
        "algorithm": description.get("algorithm"),
        "status": status(folder),
        "steps": last.get("steps", 0),
        "last_score": scores[-1],
        "best_score": max(scores),
        "seconds": last.get("time/seconds", 0.0),
    }


def _description(folder: Path) -> dict[str, Any]:
    """``config.json`` of a run; while it is missing, the same of the flags that it was started with."""
    if (folder / "config.json").is_file():
        return read_description(folder)
    return {}


def _changed(description: dict[str, Any]) -> dict[str, Any]:
    """Hyper-parameters that differ from the algorithm's defaults."""
    kind = CONFIGS.get(str(description.get("algorithm")).lower())
    defaults = {} if kind is None else json.loads(json.dumps(dataclasses.asdict(kind()), default=describe))
    return {name: x for name, x in description.get("config", {}).items() if name not in defaults or x != defaults[name]}


def _column(metrics: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in metrics if isinstance(row.get(name), (int, float))]


def _print_runs(found: list[dict[str, Any]]) -> None:
    """Print two lines for each run: with a column for each name, 80 characters are too few."""
    if not found:
        print(f"no runs: a run is a folder with {METRICS}")
        return
    names = [f"{run['run']}\n  {run['algorithm'] or '?'} on {run['environment'] or '?'}" for run in found]
    rows = [
        (name, run["status"], run["steps"], run["last_score"], run["best_score"], _time(run["seconds"]))
        for name, run in zip(names, found, strict=True)
    ]
    print_table(rows, ["run", "status", "steps", "last", "best", "time"])


def _print_run(
    *,
    made_by: dict[str, Any],
    config: dict[str, Any],
    curves: dict[str, list[float]],
    samples: list[dict[str, Any]],
    **result: Any,
) -> None:
    print_table((result | _flat(made_by)).items())
    if config:
        print_table([(name, str(value)) for name, value in config.items()], ["hyper-parameter", "not its default"])
    if curves:
        width = max(8, min(64, get_terminal_size().columns - 56))
        rows = [(name, sparkline(values, width), values[0], values[-1]) for name, values in curves.items()]
        print_table(rows, ["metric", "curve", "first", "last"])
    if samples:
        names = ["prompt", "completion", "score"]
        print_table([[sample.get(name) for name in names] for sample in samples], names)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _flat(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries of nested dictionaries as one line each."""
    return {
        name: ", ".join(f"{key} {x}" for key, x in value.items()) if isinstance(value, dict) else value
        for name, value in entries.items()
    }


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects in a file of JSON lines, none if it is missing, without a line that a killed process left incomplete."""
    if path.is_file():
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                if isinstance(found := parse_json(line), dict):
                    yield found
