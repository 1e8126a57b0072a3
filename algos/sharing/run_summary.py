"""Summary of a run, read from its folder."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from algos.config import CONFIGS
from algos.training.run_folder import RUN, status
from algos.training.save import describe, read_description
from textenv.json_files import parse_json

METRICS = "metrics.jsonl"
OF_SCORE = ("eval/mean_return", "episode/return")
"""Metrics of a run's score: of the evaluation while training, if there is one, else of the training."""
SHOWN = (*OF_SCORE, "episode/length", "reference/kl", "policy/approx_kl", "policy/entropy", "sft/loss")


def read_run(folder: Path) -> dict[str, Any]:
    """Return `summarise_run`'s summary with ``made_by``, ``config`` (what differs), ``curves`` and ``samples``.

    A run that can be continued has the command under ``continue``.
    """
    metrics, description = list(json_lines(folder / METRICS)), run_description(folder)
    result = summarise_run(folder, metrics, description) | {
        "made_by": description.get("made_by") or {},
        "config": _changed(description),
        "curves": {name: values for name in SHOWN if (values := _numbers(metrics, name))},
        "samples": list(json_lines(folder / "samples.jsonl"))[-3:],
    }
    if result["status"] in ("stopped", "failed") and (folder / RUN).is_file():
        result["continue"] = f"algos train --resume {folder}"
    return result


def summarise_run(folder: Path, metrics: list[dict[str, Any]], description: dict[str, Any]) -> dict[str, Any]:
    """Return environment, algorithm, status, steps, last and best score, and seconds of a run."""
    scores: list[Any] = next((found for name in OF_SCORE if (found := _numbers(metrics, name))), [None])
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


def run_description(folder: Path) -> dict[str, Any]:
    """``config.json`` of a run; while it is missing, the same of the flags that it was started with."""
    if (folder / "config.json").is_file():
        return read_description(folder)
    if not (folder / RUN).is_file():
        return {}
    try:
        found = yaml.safe_load((folder / RUN).read_bytes())
        config, algorithm = dict(found["config"]), found["algo"].upper()
        return {"environment": {"id": found["env"]}, "algorithm": algorithm, "config": config}
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder / RUN} is damaged, expected the options of a run: {error!r:.200}") from error


def _changed(description: dict[str, Any]) -> dict[str, Any]:
    """Hyper-parameters that differ from the algorithm's defaults."""
    kind = CONFIGS.get(str(description.get("algorithm")).lower())
    defaults = {} if kind is None else json.loads(json.dumps(dataclasses.asdict(kind()), default=describe))
    return {name: x for name, x in description.get("config", {}).items() if name not in defaults or x != defaults[name]}


def _numbers(metrics: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in metrics if isinstance(row.get(name), (int, float))]


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects in a file of JSON lines, none if it is missing, without a line that a killed process left incomplete."""
    if path.is_file():
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                if isinstance(found := parse_json(line), dict):
                    yield found
