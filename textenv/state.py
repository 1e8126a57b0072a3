"""State of the objects that a training calls, such as rewards, tasks, tools and callbacks: saved, restored, frozen.

An object has a state if its class has ``state_dict`` and ``load_state_dict``. It is found wherever it is used: as an
attribute of an object, its class or a function, in a list or mapping, inside `functools.partial`, as the owner of a
method, and as a variable or default of a function, also of one inside a decorator.
"""

import copy
import functools
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Protocol, TypeGuard, runtime_checkable

from textenv.importing import USER_FILES

MAX_PATH_LENGTH = 10
"""Maximum number of steps from an object to one that it uses."""
MOST_ENTRIES = 100
"""Lists and mappings with more entries are data, and are not searched."""
MOST_OBJECTS = 10_000
"""Maximum number of objects that are looked at."""
LIBRARIES = {
    "torch", "transformers", "tokenizers", "peft", "safetensors", "tensordict", "torchrl", "numpy", "scipy", "pandas",
    "datasets", "pyarrow", "gymnasium", "algos", "ray", "vllm", "httpx", "openai", "pydantic",
    "filelock",
}  # fmt: skip
"""Packages whose objects hold no state of a reward; those of `algos` (agents, callbacks) are saved by themselves."""


@runtime_checkable
class Stateful(Protocol):
    """An object that saves its own state."""

    def state_dict(self) -> Mapping[str, object]:
        """Return the state: numbers, text, arrays, tensors, random generators, and containers of these."""

    def load_state_dict(self, state: Any) -> object:
        """Restore what `state_dict` returned."""


def stateful_objects(owner: object) -> dict[str, Stateful]:
    """Find the objects with a state that an object uses, itself included.

    A torch module counts only if its own class defines ``state_dict``: other modules are models, and whoever makes a
    model loads its weights.

    Returns:
        Each object once, by its path: the names of attributes, keys and variables that lead to it.

    Example:
        >>> from textenv.rewards import Normalize
        >>> list(stateful_objects({"task": [Normalize(len)]}))
        ['task.0']
    """
    return {path: used for path, used in used_objects(owner) if _has_state(used)}


def states_of(owner: object) -> dict[str, dict[str, object]]:
    """Return the ``class`` and ``state`` of each object with a state that an object uses, by path."""
    objects = stateful_objects(owner)
    return {path: {"class": type(used).__qualname__, "state": used.state_dict()} for path, used in objects.items()}


def set_states(owner: object, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Restore the states that `states_of` returned, in objects of the same path and class.

    Returns:
        Paths of the states that fit no object, and of the objects that got none.
    """
    objects = stateful_objects(owner)
    fitting = set()
    for path, used in objects.items():
        # Compare classes without their modules, because a module's name depends on its file's place and on the program
        if path in saved and str(saved[path]["class"]).endswith(type(used).__qualname__):
            used.load_state_dict(copy.deepcopy(saved[path]["state"]))  # the object may go on writing into it
            fitting.add(path)
    return sorted((saved.keys() | objects.keys()) - fitting)


@contextmanager
def frozen_states(owner: object) -> Iterator[None]:
    """Context after which the objects that an object uses, and the global random generators, are as before."""
    states = copy.deepcopy(states_of(owner))
    random_states = global_random_states()
    try:
        yield
    finally:
        set_states(owner, states)
        set_global_random_states(random_states)


def global_random_states() -> dict[str, Any]:
    """Return the states of the random generators that `random`, `numpy.random` and torch share with all code."""
    states: dict[str, Any] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
    return states


def set_global_random_states(states: Mapping[str, Any]) -> None:
    """Restore what `global_random_states` returned."""
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])


def class_name(used: object) -> str:
    """Return the full name of an object's class."""
    return f"{type(used).__module__}.{type(used).__qualname__}"


def used_objects(owner: object) -> Iterator[tuple[str, object]]:
    """Yield the objects that an object uses, itself included, each once with its path; without those of libraries."""
    waiting: list[tuple[tuple[str, ...], object]] = [((), owner)]
    seen: set[int] = set()
    while waiting and len(seen) < MOST_OBJECTS:
        path, used = waiting.pop(0)
        if id(used) in seen or _is_foreign(used):
            continue
        seen.add(id(used))
        yield ".".join(path), used
        if len(path) < MAX_PATH_LENGTH:
            waiting += [((*path, name), part) for name, part in _parts(used)]


def _parts(used: object) -> Iterator[tuple[str, object]]:
    """Yield the objects that an object uses directly, with their names."""
    if isinstance(used, functools.partial):
        yield "func", used.func
        yield from _parts(used.args)
        yield from _parts(used.keywords)
    elif isinstance(used, MethodType):
        yield "self", used.__self__
        yield "func", used.__func__
    elif isinstance(used, FunctionType):
        yield from variables_of(used)
        yield from vars(used).items()  # `functools.wraps` notes the function inside a decorator there
    elif isinstance(used, type):
        yield from _class_attributes(used)
    elif isinstance(used, Mapping):
        if len(used) <= MOST_ENTRIES:
            yield from ((str(name), part) for name, part in used.items())
    elif isinstance(used, (list, tuple, deque)):
        if len(used) <= MOST_ENTRIES:
            yield from ((str(index), part) for index, part in enumerate(used))
    else:
        # Attributes of the object and of its class; one of the object, or of a subclass, hides others of its name
        names = set()
        for attributes in (attributes_of(used), *map(_class_attributes, type(used).__mro__)):
            for name, part in attributes:
                if name not in names:
                    names.add(name)
                    yield name, part


def attributes_of(used: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object itself, those in slots too, with their names."""
    yield from getattr(used, "__dict__", {}).items()
    for kind in type(used).__mro__:
        slots = vars(kind).get("__slots__", ())
        if isinstance(slots, str):
            slots = (slots,)
        for name in slots:
            if name != "__dict__" and hasattr(used, name):
                yield name, getattr(used, name)


def _class_attributes(kind: type) -> Iterator[tuple[str, object]]:
    """Yield the attributes and functions of a class of the user's, with their names."""
    if _is_library(kind) or is_our_code(kind):
        return
    for name, value in vars(kind).items():
        if isinstance(value, (staticmethod, classmethod)):
            yield name, value.__func__
        elif isinstance(value, property):
            yield name, value.fget
        elif not name.startswith("__") or isinstance(value, FunctionType):
            yield name, value


def variables_of(function: object) -> Iterator[tuple[str, object]]:
    """Yield a function's defaults and what it reads of its module and of enclosing functions, with their names."""
    if not isinstance(function, FunctionType):
        return
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in dict.fromkeys(_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code reads, and those of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _has_state(used: object) -> TypeGuard[Stateful]:
    methods = [getattr(type(used), name, None) for name in ("state_dict", "load_state_dict")]
    return all(callable(method) and not _is_library(method) for method in methods)


def _is_foreign(used: object) -> bool:
    """Return True for what cannot hold a user's state: numbers, texts, modules, and objects of `LIBRARIES`."""
    if isinstance(used, (str, bytes, int, float, complex, ModuleType, type(None))):
        return True
    if isinstance(used, type):
        return _is_library(used) or is_our_code(used)
    if isinstance(used, (FunctionType, MethodType)):
        return _is_library(used)
    kind = type(used)
    containers = (functools.partial, Mapping, list, tuple, deque, SimpleNamespace)
    if isinstance(used, containers) and kind.__module__ in ("builtins", "functools", "collections", "types"):
        return False
    if hasattr(used, "__wrapped__"):  # of `functools.lru_cache`, in C
        return _is_library(used.__wrapped__)
    if any(_root(base) in ("gymnasium", "algos") for base in kind.__mro__):
        return True
    return _is_library(kind)


def is_our_code(code: object) -> bool:
    """Return True for code of `textenv` and `algos`; the user's files have names inside `textenv.importing`."""
    module = str(getattr(code, "__module__", ""))
    return _root(code) in ("textenv", "algos") and not module.startswith(USER_FILES)


def _is_library(code: object) -> bool:
    root = _root(code)
    return root in LIBRARIES or root in sys.stdlib_module_names - {"__main__"}


def _root(code: object) -> str:
    return str(getattr(code, "__module__", "")).partition(".")[0]
