"""Fingerprints of the user's code and files that a recipe names: two runs with equal settings may differ in these."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from types import CodeType, FunctionType, NoneType
from typing import Any

import gymnasium

from algos.config import Config, field_values
from algos.recipe import Recipe
from algos.statistics.pass_rates import Answer
from textenv.cache import sha256
from textenv.importing import load_function
from textenv.state import MOST_ENTRIES, attributes_of, is_our_code, used_objects, variables_of

PYTHON = "python"
"""Key of the version of Python, which compiles the code."""
CODE = {"env", "algorithm", "policy", "reward", "wrappers", "env_wrappers", "describe", "play", "opponents"}
"""Fields and arguments of a recipe whose texts may name a function or a class."""
LARGE = 2**27
"""Files with more bytes, such as models, count by their size and the time of their last change."""
PLAIN = (str, bytes, int, float, complex, bool, NoneType, PurePath)


def fingerprint(recipe: Recipe, *, answer: Answer | None = None) -> dict[str, str]:
    """Return digests of the user's functions, objects and files that a recipe uses, and of the function ``answer``.

    Functions count with what they call of their own file and with their default and enclosed values; files that they
    import or read themselves are not seen.

    Returns:
        By name: for code the way that leads to it from a field of the recipe, for files the path. And the version of
        Python under `PYTHON`.
    """
    digests = {PYTHON: f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name, value in [*_values(recipe), ("answer", answer)]:
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


def _values(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield what a recipe, its config, a list or a mapping holds, one by one, with names."""
    parts: Mapping[Any, object] | None = None
    if isinstance(value, (Recipe, Config)):
        parts = field_values(value)
    elif isinstance(value, Mapping):
        parts = value
    elif isinstance(value, (list, tuple)) and len(value) <= MOST_ENTRIES:  # longer ones are data, such as prompts
        parts = dict(enumerate(value))
    if parts is None:
        yield name, value
        return
    for key, part in parts.items():
        yield from _values(part, f"{name}.{key}".removeprefix("."))


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
    """Return the function ``file.py:name`` or ``package.module:name``, perhaps with a weight; None if there is none."""
    function_name, _, _ = name.partition("=")
    try:
        return load_function(function_name)
    except ValueError:  # no name of a function: a text with a colon
        return None


def _digest(used: object) -> str:
    """Return the digest of a function with its values, or of an object's plain attributes; empty for other things."""
    if is_our_code(used):
        return ""
    if isinstance(used, FunctionType):
        # Its defaults and what it encloses; values of its module may change by themselves
        names = {*used.__code__.co_varnames, *used.__code__.co_freevars}
        values = {name: value for name, value in variables_of(used) if name in names}
        return _sha256([_code(used.__code__), _plain(values)])
    if isinstance(used, (type, Mapping, list, tuple)):
        return ""  # their functions follow by themselves, their values with their owners
    attributes = _plain(dict(attributes_of(used)))
    return _sha256(attributes) if attributes else ""


def _sha256(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _code(code: CodeType) -> tuple[Any, ...]:
    """Return what a function does, without its place in a file."""
    return code.co_code, code.co_names, code.co_varnames, _plain(code.co_consts)


def _plain(value: Any) -> Any:
    """Return what is equal for equal numbers, texts, code, arrays, and containers of these; None for other objects."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, (set, frozenset)):  # whose order differs between processes
        return sorted(repr(_plain(part)) for part in value)
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        entries = [(str(key), _plain(part)) for key, part in value.items()]
        return [entry for entry in entries if entry[1] is not None]
    if hasattr(value, "tolist"):  # arrays and tensors, as in `algos.recipe`
        return value.tolist()
    return None
