"""Call reward functions (also async ones) with the columns in their signatures, and load them from files."""

import asyncio
import copy
import functools
import importlib.util
import inspect
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from textenv.names import nearest
from textenv.rewards.scores import Rows, is_tensor
from textenv.rewards.training import NOW, RewardLog, Training, training
from textenv.rewards.workers import run_in_threads


def reward_name(function: Any) -> str:
    """Return the name of a reward function for messages and tables."""
    return str(getattr(function, "__name__", type(function).__name__))


def is_async(function: Any) -> bool:
    """Return True for an ``async`` function, and for an object whose call is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def call_reward(function: Callable[..., Any], columns: dict[str, Any], tokenizer: Any = None) -> Any:
    """Call a reward function with the keyword arguments in its signature, and return its result.

    A parameter ``step``, ``progress`` or ``log`` without a column of that name gets that of `textenv.rewards.training`.

    Args:
        function: takes any of the columns by name, or all by ``**columns``; ``async`` functions are awaited. It
            receives copies of lists and dictionaries, so changing them has no effect outside.
        columns: ``prompts``, ``completions``, ``prompt_ids``, ``completion_ids``, ``terminated``, and the prompts' own;
            a method cannot get a column named as its object (``self``).
        tokenizer: tokenizer of the ids; passed to functions that have a parameter ``tokenizer``.

    Raises:
        ValueError: if the function needs a column that is missing.
    """
    parameters, now = _parameters(function), NOW.get()._asdict()
    now["log"] = now["log"] or RewardLog(len(Rows(columns)))  # outside `Rewards`, what is logged is checked only
    check_columns(function, columns)
    names = {each.name for each in parameters}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        names |= columns.keys() - {_name_of_self(function)}
    given = {name: _copied(value) for name, value in (now | columns).items() if name in names}
    if tokenizer is not None and "tokenizer" in names:
        given["tokenizer"] = tokenizer
    found = function(**given)
    return _wait(found) if inspect.isawaitable(found) else found


def call_logged(
    function: Callable[..., Any], columns: dict[str, Any], tokenizer: Any, now: Training
) -> tuple[Any, dict[str, list[float | None]]]:
    """Call a reward function at this point in the training; return its result and what it logged."""
    log = RewardLog(len(Rows(columns)))
    with training(now.step, now.progress, log):
        return call_reward(function, columns, tokenizer), log.columns()


def check_columns(function: Callable[..., Any], columns: Collection[str]) -> None:
    """Raise a ValueError if a reward function needs a column that is not among these."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [each.name for each in _parameters(function) if each.default is each.empty and each.kind in kinds]
    if missing := [name for name in needed if name not in columns and name not in Training._fields]:
        needs = f"reward {reward_name(function)!r} needs the column {', '.join(map(repr, missing))}"
        close = [found for name in missing if (found := nearest(name, columns))]
        hint = "add it to the prompts, one entry per row, or give the parameter a default"
        hint = f"did you mean {', '.join(map(repr, close))}? Else {hint}" if close else hint
        raise ValueError(f"{needs}, but got {sorted(columns)}: {hint}")


def _copied(value: Any) -> Any:
    """Copy containers recursively; return other values unchanged."""
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    kinds = (list, tuple, dict, set, bytearray, deque, np.ndarray)
    return copy.deepcopy(value) if isinstance(value, kinds) or is_tensor(value) else value


def _name_of_self(function: Callable[..., Any]) -> str | None:
    """Return the name by which a method, or a callable object, knows its object: no argument can have it.

    None for functions, and where the name cannot be in conflict.
    """
    method = function if inspect.ismethod(function) else type(function).__call__
    parameters = list(inspect.signature(getattr(method, "__func__", method)).parameters.values())
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None
    return parameters[0].name


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without a signature
        return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("prompts", "completions")]


def _wait(found: Any) -> Any:
    async def result() -> Any:
        return await found

    # A separate thread, because the caller may be inside an event loop (as in a notebook).
    (outcome,) = run_in_threads([lambda: asyncio.run(result())], None)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def load_function(name: str) -> Callable[..., Any]:
    """Load the function named by ``"file.py:name"`` or ``"package.module:name"``, or make ``"textenv.rewards:name"``.

    Raises:
        ValueError: if the name has another form, if the module is missing or raises at import, or if it has no such
            function.

    Example:
        >>> load_function("textenv.rewards:unfinished").__name__
        'unfinished'
    """
    place, _, function_name = name.rpartition(":")
    if not place or not function_name.isidentifier():
        raise ValueError(
            f"function is {name!r}, expected file.py:name or package.module:name, such as my_rewards.py:score or "
            "minigrid.wrappers:ImgObsWrapper"
        )
    module = _read_file(Path(place)) if place.endswith(".py") else read_module(place)
    found = getattr(module, function_name, None)
    if not callable(found):
        kinds = (FunctionType, type)
        here = [key for key, x in vars(module).items() if isinstance(x, kinds) and x.__module__ == module.__name__]
        kind = "no function" if found is None else f"a {type(found).__name__}, not a function,"
        raise ValueError(f"{place} has {kind} named {function_name!r}; its functions are {', '.join(here)}")
    return found() if place == "textenv.rewards" else found


def _read_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give the path of a Python file, then ':' and a function in it")
    return _executed(path.resolve(), path.stat().st_mtime_ns)


@functools.lru_cache
def _executed(path: Path, modified: int) -> ModuleType:
    """Run a file once for each time it was modified, as it may load a model."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    with _explained(str(path), path.parent):
        spec.loader.exec_module(module)
    return module


def read_module(name: str) -> ModuleType:
    """Import a module, also ``name.py`` in the current folder; raise a ValueError with the reason if that fails."""
    with _explained(name, Path.cwd()):
        return importlib.import_module(name.removesuffix(".py"))


@contextmanager
def _explained(place: str, folder: Path) -> Iterator[None]:
    """Put a folder first on ``sys.path``, and turn any exception into a ValueError that names the module."""
    sys.path.insert(0, str(folder))
    try:
        yield
    except Exception as error:  # a user's module may raise anything
        said = f"{type(error).__name__}: {error} (looked for in {folder} and on PYTHONPATH)"
        raise ValueError(f"{place} could not be imported: {said}") from error
    finally:
        sys.path.remove(str(folder))
