"""Save, restore and freeze the state of objects that a training calls, such as rewards, tasks, tools and callbacks.

An object has a state if its class has ``state_dict`` and ``load_state_dict``. It is found wherever it is used: as an
attribute, in a list or mapping, inside `functools.partial`, as the owner of a method, or as a variable of a function.
"""

import copy
import functools
import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, runtime_checkable

DEPTH = 10
"""Maximum number of steps from an object to one that it uses."""
MOST_ENTRIES = 100
"""Lists and mappings with more entries are data, and are not searched."""
MOST_OBJECTS = 10_000
"""Maximum number of objects that are looked at."""
LIBRARIES = {
    "torch", "transformers", "tokenizers", "peft", "safetensors", "tensordict", "torchrl", "numpy", "scipy", "pandas",
    "datasets", "pyarrow", "gymnasium", "algos", "ray", "vllm", "httpx", "openai", "pydantic",
}  # fmt: skip
"""Packages whose objects hold no state of a reward. Objects of `algos` (agents, callbacks) are saved elsewhere."""


@runtime_checkable
class Stateful(Protocol):
    """An object that saves its own state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, text, arrays, tensors, random generators, and containers of these."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore what `state_dict` returned."""


def stateful_objects(owner: Any) -> dict[str, Stateful]:
    """Find the objects with a state that an object uses, itself included.

    Torch modules are models, and whoever makes a model loads its weights. So a module counts only if its class defines
    a ``state_dict`` of its own.

    Returns:
        Each object once, by its path: the names of attributes, keys and variables that lead to it.

    Example:
        >>> from textenv.rewards import Normalize
        >>> list(stateful_objects({"task": [Normalize(len)]}))
        ['task.0']
    """
    return {path: used for path, used in used_objects(owner) if _has_state(used)}


def states_of(owner: Any) -> dict[str, dict[str, Any]]:
    """Return the ``class`` and ``state`` of each object with a state that an object uses, by path."""
    states = {}
    for path, used in stateful_objects(owner).items():
        states[path] = {"class": class_name(used), "state": used.state_dict()}
    return states


def set_states(owner: Any, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Restore the states that `states_of` returned, in objects of the same path and class.

    Returns:
        Paths of the states that fit no object, and of the objects that got none.
    """
    # Compare all before the first changes
    objects = stateful_objects(owner)
    fitting = {}
    for path, used in objects.items():
        if path in saved and saved[path]["class"] == class_name(used):
            fitting[path] = used

    for path, used in fitting.items():
        state = copy.deepcopy(saved[path]["state"])  # the object may go on writing into it
        used.load_state_dict(state)
    all_paths = saved.keys() | objects.keys()
    return sorted(all_paths - fitting.keys())


def copy_states(source: Any, target: Any) -> None:
    """Give the objects that ``target`` uses the state of those that ``source`` uses, where path and class are equal."""
    set_states(target, states_of(source))


@contextmanager
def frozen_states(owner: Any) -> Iterator[None]:
    """Context that restores the state of the objects that an object uses on exit."""
    states = copy.deepcopy(states_of(owner))
    try:
        yield
    finally:
        set_states(owner, states)


def class_name(used: Any) -> str:
    """Return the full name of an object's class."""
    return f"{type(used).__module__}.{type(used).__qualname__}"


def used_objects(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object uses, itself included, each once with its path; the nearest come first."""
    queue: deque[tuple[tuple[str, ...], Any]] = deque([((), owner)])
    seen: set[int] = set()
    while queue and len(seen) < MOST_OBJECTS:
        path, used = queue.popleft()
        if id(used) in seen or _is_foreign(used):
            continue
        seen.add(id(used))
        yield ".".join(path), used
        if len(path) < DEPTH:
            for name, part in _parts(used):
                queue.append(((*path, name), part))


def _parts(used: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object uses directly, with their names."""
    if isinstance(used, functools.partial):
        yield "func", used.func
        yield from _parts(used.args)
        yield from _parts(used.keywords)
    elif isinstance(used, MethodType):
        yield "self", used.__self__
    elif isinstance(used, FunctionType):
        yield from variables_of(used)
    elif isinstance(used, Mapping):
        if len(used) <= MOST_ENTRIES:
            for name, part in used.items():
                yield str(name), part
    elif isinstance(used, (list, tuple)):
        if len(used) <= MOST_ENTRIES:
            for index, part in enumerate(used):
                yield str(index), part
    elif hasattr(used, "__dict__"):
        yield from vars(used).items()


def variables_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function reads from enclosing functions and from its module, with their names."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return

    # Variables of enclosing functions
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue

    # Variables of the module
    for name in dict.fromkeys(_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code reads, and those of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _has_state(used: Any) -> bool:
    """Return True if the class of an object has the two methods of `Stateful`, and not from a library."""
    kind = type(used)
    if not callable(getattr(kind, "state_dict", None)) or not callable(getattr(kind, "load_state_dict", None)):
        return False
    return not _is_library(kind.state_dict) and not _is_library(kind.load_state_dict)


def _is_foreign(used: Any) -> bool:
    """Return True for values without parts, modules, classes, and objects of `LIBRARIES`, such as environments."""
    if isinstance(used, (str, bytes, int, float, complex, type, ModuleType, type(None))):
        return True
    if isinstance(used, (FunctionType, MethodType)):
        return _is_library(used)

    # Containers of Python itself are searched
    kind = type(used)
    containers = (functools.partial, Mapping, list, tuple)
    if isinstance(used, containers) and kind.__module__ in ("builtins", "functools", "collections"):
        return False

    # Objects of libraries, and of classes that are derived from theirs
    packages_of_bases = {_package_of(base) for base in kind.__mro__}
    if "gymnasium" in packages_of_bases or "algos" in packages_of_bases:
        return True
    if "torch" in packages_of_bases and not _has_state(used):
        return True
    return _is_library(kind)


def _is_library(code: Any) -> bool:
    """Return True if a class or function belongs to `LIBRARIES` or to the standard library."""
    package = _package_of(code)
    if package == "__main__":
        return False
    return package in LIBRARIES or package in sys.stdlib_module_names


def _package_of(code: Any) -> str:
    """Return the name of the package in which a class or function is defined."""
    return str(getattr(code, "__module__", "")).partition(".")[0]
