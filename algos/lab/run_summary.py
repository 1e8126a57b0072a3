"""Summary of a run, read from its folder."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from algos.config import CONFIGS, Config
from algos.storage.run_files import CONFIG, RUN
from algos.storage.run_folder import status
from algos.storage.run_reader import DamagedRunError, Provenance, read_metrics, read_options_file, read_samples
from algos.training.save import describe, read_description

SUMMARY = ("run", "environment", "algorithm", "status", "steps", "last_score", "best_score", "seconds")
"""Part of `read_run` that a list of runs has."""
CURVES = (
    "eval/mean_return",
    "episode/return",
    "episode/length",
    "reference/kl",
    "policy/approx_kl",
    "policy/entropy",
    "sft/loss",
)
"""Metrics with a curve; the score is that of the evaluation while training, if there is one, else of the training."""


_Continue = TypedDict("_Continue", {"continue": str}, total=False)
"""Command that goes on with a run, if that is possible; the key is a word of Python's own."""


class RunSummary(_Continue):
    """What a run was and how it went."""

    run: str
    """Folder of the run."""
    environment: str | None
    algorithm: str | None
    status: str
    """See `algos.storage.run_folder.status`."""
    steps: int
    last_score: float | None
    best_score: float | None
    seconds: float
    made_by: Provenance
    config: dict[str, object]
    """Hyper-parameters that differ from the algorithm's defaults."""
    curves: dict[str, list[float]]
    """Values of each iteration, by metric."""
    samples: list[dict[str, object]]
    """The newest three."""
    wrappers: NotRequired[list[str]]


def read_run(folder: Path) -> RunSummary:
    """Read what a run was and how it went.

    Raises:
        DamagedRunError: if a file of the run is damaged.
    """
    description = describe_run(folder)
    environment = description.get("environment") or {}

    # Curves and scores
    lines = read_metrics(folder)
    last: dict[str, float] = {}
    if lines:
        last = lines[-1]
    curves: dict[str, list[float]] = {}
    for name in CURVES:
        values = [line[name] for line in lines if name in line]
        if values:
            curves[name] = values
    scores = curves.get("eval/mean_return") or curves.get("episode/return") or []

    # Settings that differ from the algorithm's defaults
    saved_config = description.get("config", {})
    config_class = _config_class(str(description.get("algorithm")), saved_config)
    defaults = {}
    if config_class is not None:
        defaults = json.loads(json.dumps(dataclasses.asdict(config_class()), default=describe))
    config = {}
    for name, value in saved_config.items():
        if name not in defaults or value != defaults[name]:
            config[name] = value

    summary: RunSummary = {
        "run": str(folder),
        "environment": environment.get("id"),
        "algorithm": description.get("algorithm"),
        "status": status(folder),
        "steps": int(last.get("steps", 0)),
        "last_score": scores[-1] if scores else None,
        "best_score": max(filter(math.isfinite, scores), default=None),
        "seconds": last.get("time/seconds", 0.0),
        "made_by": description.get("made_by") or Provenance(),
        "config": config,
        "curves": curves,
        "samples": read_samples(folder)[-3:],
    }
    if environment.get("wrappers"):
        summary["wrappers"] = environment["wrappers"]
    if summary["status"] in ("stopped", "failed") and (folder / RUN).is_file():
        summary["continue"] = f"algos train --resume {folder}"
    return summary


def _config_class(algorithm: str, saved_config: Mapping[str, object]) -> type[Config] | None:
    """Return the config class of an algorithm; for one of the user's, the class with the fields that were saved."""
    config_class = CONFIGS.get(algorithm.lower())
    if config_class is not None:
        return config_class
    for config_class in CONFIGS.values():
        if {field.name for field in dataclasses.fields(config_class)} == set(saved_config):
            return config_class
    return None


def describe_run(folder: Path) -> Mapping[str, Any]:
    """Read ``config.json`` of a run; while it is missing, return the same from its flags, or an empty one."""
    if (folder / CONFIG).is_file():
        return read_description(folder)
    options = read_options(folder)
    if not options:
        return {}
    env_id = options["env"].rpartition(":")[2]
    config = options["config"] | {"seed": options.get("seed", 0)}
    return {"environment": {"id": env_id}, "algorithm": options["algo"].upper(), "config": config}


def read_options(folder: Path) -> dict[str, Any]:
    """Read the options of ``algos train`` that a run was started with; none for a run of another kind."""
    if not (folder / RUN).is_file():
        return {}
    options = read_options_file(folder / RUN)
    kinds = {"config": dict, "env": str, "algo": str}
    for name, kind in kinds.items():
        if not isinstance(options.get(name), kind):
            fault = f"{name} is {options.get(name)!r:.100}, expected {kind.__name__}"
            raise DamagedRunError(f"{folder / RUN} is damaged, expected the options of a run: {fault}")
    return options
