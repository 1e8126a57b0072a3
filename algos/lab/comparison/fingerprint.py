"""Fingerprints of the user's code and files that a recipe names: two runs with equal settings may differ in these."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import gymnasium

from textenv.cache import sha256
from textenv.importing import load_function
from textenv.state import MOST_ENTRIES, attributes_of, is_our_code, used_objects, variables_of

if TYPE_CHECKING:
    from algos.recipe import Recipe

PYTHON = "python"
"""Key of the version of Python, which compiles the code."""
CODE = {"env", "algorithm", "policy", "reward", "wrappers", "env_wrappers", "describe", "play"}
"""Fields and arguments of a recipe whose texts may name a function or a class."""
LARGE = 2**27
"""Files with more bytes, such as models, count by their size and the time of their last change."""
PLAIN = (str, bytes, int, float, complex, bool, type(None))


def fingerprint(recipe: Recipe) -> dict[str, str]:
    """Return digests of the user's functions, objects and files that a recipe uses.

    Functions count with what they call of their own file and with their default and enclosed values; files that they
    import or read themselves are not seen.

    Returns:
        By name: for code the way that leads to it from a field of the recipe, for files the path. And the version of
        Python under `PYTHON`.
    """
    digests = {PYTHON: f"{sys.version_info.major}.{sys.version_info.minor}"}
    for field in fields(recipe):
        for name, value in _values(getattr(recipe, field.name), field.name):
            used = value
            if isinstance(value, (str, Path)):
                if _is_file(value):
                    digests[str(value)] = _digest_of_file(Path(value))
                    continue
                used = None
                if CODE & {*name.split(".")}:
                    used = _named_code(str(value))
            for way, part in used_objects(used):
                digest = _digest(part)
                if digest:
                    digests[f"{name}.{way}".removesuffix(".")] = digest
    return digests


def changed_code(before: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """Return the names of code and files that changed between two fingerprints, as parts of a sentence.

    Args:
        before: fingerprint that was stored; None if an earlier version stored none.
        now: the present one.
    """
    if before is None or before.get(PYTHON) != now.get(PYTHON):
        return []
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return [f"{name} has changed" for name in names]


def _values(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield what a field of a recipe holds, entries of lists and mappings one by one, with names."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _values(part, f"{name}.{key}")
    elif isinstance(value, (list, tuple)) and len(value) <= MOST_ENTRIES:  # longer ones are data, such as prompts
        for index, part in enumerate(value):
            yield from _values(part, f"{name}.{index}")
    else:
        yield name, value


def _is_file(name: str | Path) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # a text that is too long for a name
        return False


def _digest_of_file(path: Path) -> str:
    status = path.stat()
    if status.st_size > LARGE:
        return f"{status.st_size} bytes of {status.st_mtime_ns}"
    return sha256(path)


def _named_code(name: str) -> object:
    """Return the user's function that a text names, or the class of an environment's id; None if it names neither."""
    if ":" not in name:
        spec = gymnasium.registry.get(name)
        if spec is None or callable(spec.entry_point):
            return spec and spec.entry_point
        return _loaded(str(spec.entry_point))
    _, _, env_id = name.rpartition(":")
    if env_id in gymnasium.registry:  # module:id, whose module was imported when the case was made
        return _named_code(env_id)
    return _loaded(name)


def _loaded(name: str) -> object:
    """Return the function ``file.py:name`` or ``package.module:name``; None if there is none."""
    try:
        return load_function(name)
    except ValueError:  # no name of a function: a text with a colon
        return None


def _digest(used: object) -> str:
    """Return the digest of a function with its values, or of an object's plain attributes; empty for other things."""
    if is_our_code(used):
        return ""
    if isinstance(used, FunctionType):
        values = [(name, value) for name, value in variables_of(used) if name not in used.__globals__]
        return hashlib.sha256(repr((_code(used.__code__), _plain(values))).encode()).hexdigest()
    if isinstance(used, (type, Mapping, list, tuple)):
        return ""  # their functions and entries follow by themselves
    attributes = _plain(attributes_of(used))
    return hashlib.sha256(repr(attributes).encode()).hexdigest() if attributes else ""


def _code(code: CodeType) -> tuple[Any, ...]:
    """Return what a function does, without its place in a file."""
    constants = []
    for part in code.co_consts:
        if isinstance(part, CodeType):
            constants.append(repr(_code(part)))
        elif isinstance(part, frozenset):  # whose order differs between processes
            constants.append(repr(sorted(map(repr, part))))
        else:
            constants.append(repr(part))
    return code.co_code, code.co_names, code.co_varnames, constants


def _plain(values: Any) -> list[tuple[str, object]]:
    """Return the names and values that are numbers and texts, sorted by name."""
    return sorted((name, repr(value)) for name, value in values if isinstance(value, PLAIN))
