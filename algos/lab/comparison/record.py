"""What `compare` keeps in the folder of each of its runs, so that the same call goes on after an interruption."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from algos.lab.comparison.fingerprint import changed_code
from algos.lab.comparison.summary import RunResult
from algos.recipe import IMPORT
from algos.storage.run_files import COMPARISON
from algos.storage.run_folder import replacing
from textenv.json_files import read_json

CODE = "code"
"""Key of the `fingerprint` among the settings of a run."""


class Record(NamedTuple):
    """Contents of a `COMPARISON`."""

    name: str
    """Name that the case was given; empty if it is named by environment and algorithm."""
    seed: int
    settings: dict[str, Any]
    """`Recipe.to_dict`, and how the run is evaluated."""
    result: RunResult | None
    """None while the run has not finished."""


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return ``name: before, not now`` for each setting that differs, those of the config and the code one by one.

    Args:
        before: settings that were stored, perhaps by version 0.10.
        now: settings of this version.
    """
    changed = []
    for name in dict.fromkeys([*before, *now]):
        old = before.get(name)
        new = now.get(name)
        if name == CODE:
            changed += changed_code(old, new or {})
            continue
        if old in (new, _as_in_version_0_10(new)):
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            changed += [f"{name}.{inner}" for inner in changed_settings(old, new)]
        else:
            changed.append(f"{name}: {old!r:.100}, not {new!r:.100}")
    return changed


def write_record(folder: Path, record: Record) -> None:
    """Write a run's `COMPARISON`; a reader sees the former one or this one, never a part."""
    result = None if record.result is None else dataclasses.asdict(record.result)
    content = {"name": record.name, "seed": record.seed, "settings": record.settings, "result": result}
    with replacing(folder / COMPARISON) as draft:
        draft.write_text(json.dumps(content), encoding="utf-8")


def read_record(folder: Path) -> Record | None:
    """Read a run's `COMPARISON`; None if the folder has none. Raises a ValueError if the file is damaged."""
    path = folder / COMPARISON
    if not path.is_file():
        return None
    content = read_json(path, what="the settings and the result of a run", kind=dict)
    settings = content.get("settings")
    if isinstance(settings, dict) and "algorithm" in settings:  # of version 0.10
        settings["algo"] = settings.pop("algorithm")
    match content:
        case {"name": str(name), "seed": int(seed), "settings": dict(settings), "result": None}:
            return Record(name, seed, settings, None)
        case {"name": str(name), "seed": int(seed), "settings": dict(settings), "result": dict(row)}:
            return Record(name, seed, settings, result_from(row, folder=folder))
        case _:
            raise ValueError(f"{path} is damaged, expected the name, settings and result of a run: remove the folder")


def result_from(row: Mapping[str, Any], *, folder: Path) -> RunResult:
    """Make a `RunResult` of its fields as JSON has them; the run is in ``folder``, wherever it was when written.

    Raises:
        ValueError: if fields are missing or unknown.
    """
    try:
        samples = [tuple(sample) for sample in row["samples"]]
        return RunResult(**{**row, "samples": samples, "folder": str(folder)})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{folder} has no complete result of a run ({error!r:.200}): remove it") from error


def _as_in_version_0_10(value: Any) -> Any:
    """Return plain data as version 0.10 described it: functions by names with dots only, objects by their ``type``."""
    if isinstance(value, list):
        return [_as_in_version_0_10(item) for item in value]
    if not isinstance(value, dict):
        return value
    if IMPORT not in value:
        return {name: _as_in_version_0_10(item) for name, item in value.items()}
    name = value[IMPORT].replace(":", ".")
    if "state" in value:
        return {"type": name, **_as_in_version_0_10(value["state"])}
    if "arguments" in value:
        return {"function": name, "arguments": _as_in_version_0_10(value["arguments"])}
    return name
