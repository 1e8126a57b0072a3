"""Call reward functions (also async ones) with the columns in their signatures."""

import asyncio
import copy
import functools
import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from textenv.names import nearest
from textenv.processes import end_if_forked
from textenv.rewards.scores import Rows, is_tensor
from textenv.rewards.training import NOW, RewardLog, Training, training
from textenv.rewards.workers import run_in_threads


def reward_name(function: Any) -> str:
    """Return the name of a reward function for messages and tables; of a partial one, that of the function in it."""
    if isinstance(function, functools.partial):
        return reward_name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def distinct_names(functions: Sequence[Any]) -> list[str]:
    """Return a name for each function; one whose name is taken gets that of its module before it, or ``_2``, ``_3``.

    Raises:
        ValueError: if a function is given twice.

    Example:
        >>> distinct_names([len, lambda completions: completions, lambda completions: completions])
        ['len', '<lambda>', '<lambda>_2']
    """
    names: list[str] = []
    for number, function in enumerate(functions):
        is_method = inspect.ismethod(function)  # each access of a method makes another object
        if any(function is x or (is_method and function == x) for x in functions[:number]):
            raise ValueError(f"reward {reward_name(function)!r} is given twice: give each function once")
        name = reward_name(function)
        by_module = f"{_module_of(function)}.{name}"
        alike = [x for x in functions[:number] if reward_name(x) == name]
        if alike and by_module not in names and _module_of(function) not in map(_module_of, alike):
            name = by_module
        count = 2
        while name in names:
            name = f"{reward_name(function)}_{count}"
            count += 1
        names.append(name)
    return names


def _module_of(function: Any) -> str:
    """Return the last part of the name of a function's module: the name of a file without ``.py``."""
    if isinstance(function, functools.partial):
        return _module_of(function.func)
    return str(function.__module__).rpartition(".")[2]


def is_async(function: Any) -> bool:
    """Return True for an ``async`` function, and for an object whose call is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def call_reward(function: Callable[..., Any], columns: dict[str, Any], tokenizer: Any = None) -> Any:
    """Call a reward function with the keyword arguments in its signature, and return its result.

    A parameter ``step``, ``progress``, ``evaluating`` or ``log`` without a column of that name gets that of
    `textenv.rewards.training`.

    Args:
        function: takes any of the columns by name, or all by ``**columns``; ``async`` functions are awaited. It
            receives copies of lists and dictionaries, so changing them has no effect outside.
        columns: ``prompts``, ``completions``, ``prompt_ids``, ``completion_ids``, ``terminated``, and the prompts' own;
            a method cannot get a column named as its object (``self``).
        tokenizer: tokenizer of the ids; passed to functions that have a parameter ``tokenizer``.

    Raises:
        ValueError: if the function needs a column that is missing.
        RuntimeError: if it calls ``sys.exit``.
    """
    parameters, now = _parameters(function), NOW.get()._asdict()
    now["log"] = now["log"] or RewardLog(len(Rows(columns)))  # outside `Rewards`, what is logged is checked only
    check_columns(function, columns if tokenizer is None else columns.keys() | {"tokenizer"})
    names = {each.name for each in parameters}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        names |= columns.keys() - {_name_of_self(function)}
    given = {name: _copied(value) for name, value in (now | columns).items() if name in names}
    if tokenizer is not None and "tokenizer" in names:
        given["tokenizer"] = tokenizer
    process = os.getpid()
    try:
        returned = function(**given)
        return _wait(returned, function) if inspect.isawaitable(returned) else returned
    except SystemExit as error:  # it would end the training without a word
        raise RuntimeError(f"ended by {error!r}") from error
    finally:
        end_if_forked(process, f"reward {reward_name(function)!r}")


def call_logged(
    function: Callable[..., Any], columns: dict[str, Any], tokenizer: Any, now: Training
) -> tuple[Any, dict[str, list[float | None]]]:
    """Call a reward function at this point in the training; return its result and what it logged."""
    log = RewardLog(len(Rows(columns)))
    with training(now.step, now.progress, log, evaluating=now.evaluating):
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
    if "torch" in sys.modules and isinstance(function, sys.modules["torch"].nn.Module):
        function = function.forward  # its call takes any arguments, and passes them on
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without a signature
        return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("prompts", "completions")]


def _wait(awaitable: Any, function: Callable[..., Any]) -> Any:
    """Return the result of an ``async`` reward function."""
    process = os.getpid()

    async def result() -> Any:
        try:
            return await awaitable
        finally:
            end_if_forked(process, f"reward {reward_name(function)!r}")

    # A separate thread, because the caller may be inside an event loop (as in a notebook).
    (outcome,) = run_in_threads([lambda: asyncio.run(result())], None)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
