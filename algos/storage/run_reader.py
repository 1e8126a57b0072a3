"""Readers of a run's files, from anyone: typed, bounded in size, and with one error for whatever is damaged.

Other files of this library read ``config.json``, ``run.yaml``, ``metrics.jsonl`` and ``samples.jsonl`` through these.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import yaml

from textenv.json_files import json_lines, read_bytes, read_json

METRICS, SAMPLES, TOKENS = "metrics.jsonl", "samples.jsonl", "tokens.jsonl"
MOST_BYTES_OF_RECORD = 2**24
"""Bytes that ``config.json`` may have."""
MOST_BYTES_OF_OPTIONS = 2**17
"""Bytes that a file of options may have; a run's has some 2,000."""
MOST_LEVELS = 32
"""Levels of lists and objects inside each other."""
MOST_INTEGER = 2**63
"""Bound of an integer; greater ones fit into no array."""
Plain = str | int | float | bool | None


class DamagedRunError(ValueError):
    """A file of a run is damaged, or holds something else than this library writes."""


class MadeBy(TypedDict, total=False):
    """What made a run; see `algos.storage.provenance`."""

    date: str
    command: str
    folder: str
    git: dict[str, Plain] | None
    python: str
    versions: dict[str, Plain]
    machine: dict[str, Plain]


class EnvironmentRecord(TypedDict):
    """Environment of a saved agent."""

    id: str
    kwargs: dict[str, Any]
    module: NotRequired[str | None]
    wrappers: NotRequired[list[str]]


class AgentRecord(TypedDict):
    """Content of the ``config.json`` of a saved agent; `algos.training.save` writes it."""

    format: int
    environment: EnvironmentRecord | None
    policy: str
    policy_arguments: dict[str, Any]
    algorithm: NotRequired[str]
    config: NotRequired[dict[str, Any]]
    reward_normalizer: NotRequired[dict[str, Any] | None]
    penalty: NotRequired[dict[str, Any] | None]
    made_by: NotRequired[MadeBy]


KINDS: dict[str, tuple[type, ...]] = {
    "environment": (dict, type(None)),
    "policy": (str,),
    "policy_arguments": (dict,),
    "algorithm": (str,),
    "config": (dict,),
    "reward_normalizer": (dict, type(None)),
    "penalty": (dict, type(None)),
    "made_by": (dict,),
}
"""Types of the fields of an `AgentRecord`."""
REQUIRED = ("environment", "policy", "policy_arguments")
KINDS_OF_ENVIRONMENT: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "kwargs": (dict,),
    "module": (str, type(None)),
    "wrappers": (list,),
}
KINDS_OF_MADE_BY: dict[str, tuple[type, ...]] = {
    "date": (str,),
    "command": (str,),
    "folder": (str,),
    "git": (dict, type(None)),
    "python": (str,),
    "versions": (dict,),
    "machine": (dict,),
}
PLAIN = (str, int, float, bool, type(None))


def read_record(path: Path) -> dict[str, Any]:
    """Read a ``config.json`` as plain data of bounded size, of whatever format.

    Raises:
        DamagedRunError: if it is no object of JSON, or too large.
    """
    try:
        record = read_json(path, what="the description of an agent", kind=dict, most=MOST_BYTES_OF_RECORD)
    except (OSError, ValueError) as error:
        raise DamagedRunError(str(error)) from error
    check_plain(record, str(path))
    return cast("dict[str, Any]", record)


def check_record(record: Mapping[str, Any], path: Path) -> AgentRecord:
    """Return the content of a ``config.json``, if all its fields have the types of an `AgentRecord`.

    Raises:
        DamagedRunError: naming the field, what it is and what was expected.
    """
    missing = [name for name in REQUIRED if name not in record]
    if missing:
        raise DamagedRunError(f"{path} has no {', '.join(missing)}, expected the description of an agent")
    _check_kinds(record, KINDS, f"{path}: ")
    environment = record["environment"]
    if environment is not None:
        absent = [name for name in ("id", "kwargs") if name not in environment]
        if absent:
            raise DamagedRunError(f"{path}: environment has no {', '.join(absent)}, expected id and kwargs")
        _check_kinds(environment, KINDS_OF_ENVIRONMENT, f"{path}: environment.")
        _check_items(environment.get("wrappers", []), (str,), f"{path}: environment.wrappers")
    _check_kinds(record.get("config", {}), {"seed": (int,)}, f"{path}: config.")
    made_by = record.get("made_by", {})
    _check_kinds(made_by, KINDS_OF_MADE_BY, f"{path}: made_by.")
    for name, value in made_by.items():
        values = list(value.values()) if isinstance(value, dict) else [value]
        _check_items(values, PLAIN, f"{path}: made_by.{name}")
    return cast("AgentRecord", record)


def check_plain(value: Any, where: str, *, levels: int = MOST_LEVELS) -> None:
    """Raise a `DamagedRunError` if data is nested deeper than `MOST_LEVELS`, or has integers beyond `MOST_INTEGER`."""
    if isinstance(value, (dict, list)):
        if levels == 0:
            raise DamagedRunError(f"{where} is nested in more than {MOST_LEVELS} levels")
        items = list(value.values()) if isinstance(value, dict) else value
        for item in items:
            check_plain(item, where, levels=levels - 1)
    elif isinstance(value, int) and abs(value) >= MOST_INTEGER:
        digits = value.bit_length() * 3 // 10
        raise DamagedRunError(f"{where} has an integer of about {digits} digits, expected less than 2**63")


def read_options_file(path: Path) -> dict[str, Any]:
    """Read the options in a YAML file (JSON is YAML): a mapping of plain data, without anchors and aliases.

    Raises:
        DamagedRunError: if it is something else, too large or too deep.
    """
    try:
        loader = _PlainLoader(read_bytes(path, most=MOST_BYTES_OF_OPTIONS).decode("utf-8-sig"))
        found = loader.get_single_data()
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise DamagedRunError(f"{path} is no {path.suffix[1:]} in UTF-8 ({said:.500})") from error
    if not isinstance(found, dict):
        raise DamagedRunError(f"{path} holds {found!r:.200}, expected names of options with their values")
    check_plain(found, str(path))
    return found


class _PlainLoader(yaml.SafeLoader):
    """YAML of plain data, bounded before it is built."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803 (PyYAML's name)
        """Refuse flow collections inside each other, for which the scanner's time grows with the square."""
        if self.flow_level >= MOST_LEVELS:
            raise yaml.YAMLError(f"it is nested in more than {MOST_LEVELS} levels")
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, a few of which can stand for billions of values."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name): write the value itself")
        return super().compose_node(parent, index)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Read a run's metrics, one dictionary an iteration, of those that are numbers: ``steps`` is an integer.

    Raises:
        DamagedRunError: if the file cannot be read.
    """
    rows = []
    for line in _lines(folder / METRICS):
        row = {name: value for name, value in line.items() if _is_number(value)}
        if not isinstance(row.get("steps", 0), int):
            del row["steps"]
        rows.append(row)
    return rows


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's tables of samples.

    Raises:
        DamagedRunError: if the file cannot be read.
    """
    return _lines(folder / SAMPLES)


def read_tokens(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's tables of tokens, each with its ``iteration`` and ``row``; raises as `read_samples`."""
    return [row for row in _lines(folder / TOKENS) if _is_number(row.get("iteration")) and _is_number(row.get("row"))]


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return json_lines(path)
    except (OSError, ValueError) as error:
        raise DamagedRunError(str(error)) from error


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < MOST_INTEGER


def _check_kinds(values: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], where: str) -> None:
    for name, expected in kinds.items():
        if name in values and not isinstance(values[name], expected):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in expected)
            raise DamagedRunError(f"{where}{name} is {values[name]!r:.100}, expected {names}")


def _check_items(values: list[Any], kinds: tuple[type, ...], where: str) -> None:
    for value in values:
        if not isinstance(value, kinds):
            raise DamagedRunError(
                f"{where} has {value!r:.100}, expected {' or '.join(kind.__name__ for kind in kinds)}"
            )
