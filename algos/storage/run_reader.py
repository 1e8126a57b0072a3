"""Readers of a run's files, whoever wrote them: typed, bounded in size, with one error for whatever is damaged.

The library reads ``config.json``, ``run.yaml``, ``metrics.jsonl`` and ``samples.jsonl`` only through these functions.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeGuard, cast

import yaml

from algos.storage.run_files import METRICS, SAMPLES, TOKENS
from textenv.json_files import json_lines, read_bytes, read_json

MOST_BYTES_OF_RECORD = 2**24
"""Maximum size of ``config.json``, in bytes."""
MOST_BYTES_OF_OPTIONS = 2**17
"""Maximum size of a file of options, in bytes; that of a run has about 2,000."""
MOST_LEVELS = 32
"""Maximum depth of nested lists and objects."""
MOST_INTEGER = 2**63
"""Integers must be smaller than this, because larger ones fit into no array."""
Plain = str | int | float | bool | None


class DamagedRunError(ValueError):
    """A file of a run is damaged, or holds something that this library does not write."""


class Provenance(TypedDict, total=False):
    """Command, versions and machine of a run; see `algos.storage.provenance`."""

    date: str
    command: str
    folder: str
    git: Mapping[str, Plain] | None
    python: str
    versions: Mapping[str, Plain]
    machine: Mapping[str, Plain]


class EnvironmentRecord(TypedDict):
    """Environment of a saved agent."""

    id: str
    kwargs: dict[str, object]
    module: NotRequired[str | None]
    wrappers: NotRequired[list[str]]
    vector_wrappers: NotRequired[list[str]]
    """Those of ``wrappers`` that wrap all slots at once; absent before version 1.0."""


class AgentRecord(TypedDict):
    """Content of the ``config.json`` of a saved agent; `algos.training.save` writes it."""

    format: int
    environment: EnvironmentRecord | None
    policy: str
    policy_arguments: dict[str, object]
    algorithm: NotRequired[str]
    config: NotRequired[dict[str, Any]]
    reward_normalizer: NotRequired[dict[str, object] | None]
    penalty: NotRequired[dict[str, object] | None]
    made_by: NotRequired[Provenance]


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
"""Fields that an `AgentRecord` must have; `save.read_description` checks its format."""
KINDS_OF_ENVIRONMENT: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "kwargs": (dict,),
    "module": (str, type(None)),
    "wrappers": (list,),
    "vector_wrappers": (list,),
}
"""Types of the fields of an `EnvironmentRecord`."""
KINDS_OF_PROVENANCE: dict[str, tuple[type, ...]] = {
    "date": (str,),
    "command": (str,),
    "folder": (str,),
    "git": (dict, type(None)),
    "python": (str,),
    "versions": (dict,),
    "machine": (dict,),
}
"""Types of the fields of `Provenance`."""
PLAIN = (str, int, float, bool, type(None))
"""Types of single values in `Provenance`."""


def read_record(path: Path) -> dict[str, object]:
    """Read a ``config.json`` of any format as plain data of bounded size.

    Raises:
        DamagedRunError: if it is not a JSON object, or too large.
    """
    try:
        record = read_json(path, what="the description of an agent", kind=dict, most=MOST_BYTES_OF_RECORD)
    except (OSError, ValueError) as error:
        raise DamagedRunError(str(error)) from error
    check_plain(record, str(path))
    return cast("dict[str, object]", record)


def check_record(record: Mapping[str, object], path: Path) -> AgentRecord:
    """Return the content of a ``config.json``, if all its fields have the types of an `AgentRecord`.

    Raises:
        DamagedRunError: names the field, its value and what was expected.
    """
    # Fields of the agent
    missing = [name for name in REQUIRED if name not in record]
    if missing:
        raise DamagedRunError(f"{path} has no {', '.join(missing)}, expected the description of an agent")
    check_kinds(record, KINDS, f"{path}: ")
    agent = cast("AgentRecord", record)

    # Environment and seed
    environment = agent["environment"]
    if environment is not None:
        absent = [name for name in ("id", "kwargs") if name not in environment]
        if absent:
            raise DamagedRunError(f"{path}: environment has no {', '.join(absent)}, expected id and kwargs")
        check_kinds(environment, KINDS_OF_ENVIRONMENT, f"{path}: environment.")
        _check_items(environment.get("wrappers", []), (str,), f"{path}: environment.wrappers")
        _check_items(environment.get("vector_wrappers", []), (str,), f"{path}: environment.vector_wrappers")
    check_kinds(agent.get("config", {}), {"seed": (int,)}, f"{path}: config.")

    # What made it: plain values, and dictionaries of these
    made_by = agent.get("made_by", Provenance())
    check_kinds(made_by, KINDS_OF_PROVENANCE, f"{path}: made_by.")
    for name, value in made_by.items():
        values: list[object] = [value]
        if isinstance(value, dict):
            values = list(value.values())
        _check_items(values, PLAIN, f"{path}: made_by.{name}")
    return agent


def check_plain(value: object, where: str, *, levels: int = MOST_LEVELS) -> None:
    """Raise a `DamagedRunError` if data is nested deeper than `MOST_LEVELS`, or has integers beyond `MOST_INTEGER`."""
    if isinstance(value, (dict, list)):
        if levels == 0:
            raise DamagedRunError(f"{where} is nested in more than {MOST_LEVELS} levels")
        items: Iterable[object] = value
        if isinstance(value, dict):
            items = value.values()
        for item in items:
            check_plain(item, where, levels=levels - 1)
    elif isinstance(value, int) and abs(value) >= MOST_INTEGER:
        digits = value.bit_length() * 3 // 10
        raise DamagedRunError(f"{where} has an integer of about {digits} digits, expected less than 2**63")


def read_options_file(path: Path) -> dict[str, object]:
    """Read the options in a YAML or JSON file: a mapping of plain data, without anchors, aliases and repeated names.

    Raises:
        DamagedRunError: if it is something else, too large or too deep.
    """
    if not path.exists():
        raise DamagedRunError(f"there is no file {path}")
    try:
        text = read_bytes(path, most=MOST_BYTES_OF_OPTIONS).decode("utf-8-sig")
        if path.suffix.lower() == ".json":  # not by the reader of YAML, which has other numbers and escapes
            options = json.loads(text, object_pairs_hook=_without_repetition)
        else:
            options = _PlainLoader(text).get_single_data()
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DamagedRunError(f"{path} cannot be read as {path.suffix[1:]} in UTF-8: {reason:.500}") from error
    if not isinstance(options, dict):
        raise DamagedRunError(f"{path} holds {options!r:.200}, expected names of options with their values")
    check_plain(options, str(path))
    return options


def options_text(options: Mapping[str, object]) -> str:
    """Return options as the text of a YAML file, which `read_options_file` reads back."""
    return yaml.dump(options, Dumper=_PlainDumper, sort_keys=False)


def _without_repetition(pairs: list[tuple[Any, object]]) -> dict[Any, object]:
    """Return a dictionary; raise a ValueError if a name stands there twice."""
    values: dict[Any, object] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"it has {name!r:.100} twice")
        values[name] = value
    return values


INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
"""Words of YAML that are integers."""
FRACTION = re.compile(
    r"[-+]?(\.[0-9_]+|[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
"""Words of YAML that are other numbers."""


def _resolvers(*, without: tuple[str, ...]) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return how words without quotes are read in YAML, by their first letter.

    `INTEGER` and `FRACTION` are added to PyYAML's own patterns, without those of the tags ``without``.
    """
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for first, usual in yaml.SafeLoader.yaml_implicit_resolvers.items():
        resolvers[first] = [(tag, pattern) for tag, pattern in usual if not tag.endswith(without)]
    for tag, pattern in (("tag:yaml.org,2002:int", INTEGER), ("tag:yaml.org,2002:float", FRACTION)):
        for first in "-+.0123456789":
            resolvers.setdefault(first, []).append((tag, pattern))
    return resolvers


class _PlainDumper(yaml.SafeDumper):
    """Writer of plain data in YAML, which quotes the texts that this or another reader would take for numbers."""

    yaml_implicit_resolvers = _resolvers(without=())


class _PlainLoader(yaml.SafeLoader):
    """Loader of plain data in YAML, which refuses too much data before it builds it.

    1e-5 is a number, and 010 and 1:30 are texts; PyYAML reads a text, 8 and 90.
    """

    yaml_implicit_resolvers = _resolvers(without=(":int", ":float"))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a name that stands there twice, of which the last value would count."""
        names = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise yaml.YAMLError(f"it has {repeated[0][1]!r:.100} twice")
        return super().construct_mapping(node, deep=deep)

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:  # noqa: N803 (PyYAML's name)
        """Refuse deeply nested flow collections: the scanner's time grows with the square of the depth."""
        if self.flow_level >= MOST_LEVELS:
            raise yaml.YAMLError(f"it is nested in more than {MOST_LEVELS} levels")
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Refuse aliases: a few of them can stand for billions of values."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name): write the value itself")
        return super().compose_node(parent, index)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Read the metrics of a run that are numbers: one dictionary an iteration, in which ``steps`` is an integer.

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


def read_samples(folder: Path) -> list[dict[str, object]]:
    """Read the rows of a run's tables of samples.

    Raises:
        DamagedRunError: if the file cannot be read.
    """
    return _lines(folder / SAMPLES)


def read_tokens(folder: Path) -> list[dict[str, object]]:
    """Read the rows of a run's tables of tokens; rows without ``iteration`` or ``row`` are left out.

    Raises:
        DamagedRunError: if the file cannot be read.
    """
    rows = _lines(folder / TOKENS)
    return [row for row in rows if _is_number(row.get("iteration")) and _is_number(row.get("row"))]


def _lines(path: Path) -> list[dict[str, object]]:
    """Read a file of JSON lines; raise a `DamagedRunError` if this fails."""
    try:
        return json_lines(path)
    except (OSError, ValueError) as error:
        raise DamagedRunError(str(error)) from error


def _is_number(value: object) -> TypeGuard[int | float]:
    """Return True for a float, and for an integer below `MOST_INTEGER`."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return abs(value) < MOST_INTEGER
    return isinstance(value, float)


def check_kinds(values: Mapping[str, object], kinds: Mapping[str, tuple[type, ...]], where: str) -> None:
    """Raise a `DamagedRunError` if a value is not of one of the types for its name; missing values pass."""
    for name, expected in kinds.items():
        if name in values and not isinstance(values[name], expected):
            names = " or ".join(kind.__name__ for kind in expected).replace("NoneType", "null")
            raise DamagedRunError(f"{where}{name} is {values[name]!r:.100}, expected {names}")


def _check_items(values: Sequence[object], kinds: tuple[type, ...], where: str) -> None:
    """Raise a `DamagedRunError` if a value is not of one of these types."""
    for value in values:
        if not isinstance(value, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise DamagedRunError(f"{where} has {value!r:.100}, expected {names}")
