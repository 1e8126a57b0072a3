"""Call reward functions (also async ones) with the columns in their signatures."""

import asyncio
import copy
import functools
import inspect
import os
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from textenv.names import nearest
from textenv.processes import end_if_forked
from textenv.rewards.scores import count_rows, is_tensor
from textenv.rewards.training import TRAINING_ARGUMENTS, RewardLog, Training, training, training_arguments
from textenv.rewards.workers import run_in_threads

NOT_THE_USERS = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parents[1],
    )
)
"""Folders of the standard library, of installed packages and of `textenv`."""
IMMUTABLE_TYPES = (str, int, float, bool, type(None))
"""Types of values that need no copy."""
Returned = tuple[object, dict[str, list[float | None]]]
"""What a reward function returned, and the numbers that it logged."""


def reward_name(function: object) -> str:
    """Return the name of a reward function for messages and tables; a partial function has the inner one's name."""
    if isinstance(function, functools.partial):
        return reward_name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def line_of_error(error: BaseException) -> str:
    """Say in which line of which file an exception was raised; empty if nothing says it, as after a time limit.

    It is the last line outside the standard library, installed packages and `textenv`, if there is one.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    own_frames = [frame for frame in frames if not frame.filename.startswith(NOT_THE_USERS)]
    last = (own_frames or frames)[-1]
    return f"in line {last.lineno} of {last.filename}"


def distinct_names(functions: Sequence[object]) -> list[str]:
    """Return a different name for each function.

    A function whose name is taken gets its module's name before it, or else ``_2``, ``_3``.

    Raises:
        ValueError: if a function is given twice.

    Example:
        >>> distinct_names([len, lambda completions: completions, lambda completions: completions])
        ['len', '<lambda>', '<lambda>_2']
    """
    names: list[str] = []
    for number, function in enumerate(functions):
        earlier_functions = functions[:number]

        # The same function twice
        is_method = inspect.ismethod(function)  # each access of a method makes another object
        if any(function is earlier or (is_method and function == earlier) for earlier in earlier_functions):
            raise ValueError(f"reward {reward_name(function)!r} is given twice: give each function once")

        # Another function of this name: add the module, if that tells them apart
        own_name = reward_name(function)
        module = _module_of(function)
        name = own_name
        namesakes = [earlier for earlier in earlier_functions if reward_name(earlier) == own_name]
        if namesakes and f"{module}.{own_name}" not in names and module not in map(_module_of, namesakes):
            name = f"{module}.{own_name}"

        # Else a number
        count = 2
        while name in names:
            name = f"{own_name}_{count}"
            count += 1
        names.append(name)
    return names


def _module_of(function: object) -> str:
    """Return the last part of the name of a function's module: the name of a file without ``.py``."""
    if isinstance(function, functools.partial):
        return _module_of(function.func)
    return str(function.__module__).rpartition(".")[2]


def is_async(function: Any) -> bool:
    """Return True for an ``async`` function, and for an object whose call is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def call_reward(function: Callable[..., object], columns: Mapping[str, object], tokenizer: object = None) -> object:
    """Call a reward function with the keyword arguments in its signature, and return its result.

    A parameter ``step``, ``progress``, ``evaluating`` or ``log``, and TRL's ``trainer_state``, ``log_metric`` and
    ``log_extra``, get their values from `textenv.rewards.training`, unless there is a column of that name.

    Args:
        function: takes any of the columns by name, or all by ``**columns``; ``async`` functions are awaited. It
            receives copies of lists and dictionaries, so changing them has no effect outside.
        columns: ``prompts``, ``completions``, ``prompt_ids``, ``completion_ids``, ``terminated``, and the prompts'
            further columns. A method cannot get a column with the name of its first parameter (``self``).
        tokenizer: tokenizer of the ids; passed to functions that have a parameter ``tokenizer``.

    Raises:
        ValueError: if the function needs a column that is missing, or takes arguments by position only.
        RuntimeError: if it calls ``sys.exit``.
    """
    # Arguments that every function can have: the columns, and the point in the training
    arguments = training_arguments(count_rows(columns)) | dict(columns)

    # Keep those that are in the signature of this function
    available_columns: Collection[str] = columns
    if tokenizer is not None:
        available_columns = columns.keys() | {"tokenizer"}
    check_columns(function, available_columns)
    parameters = _parameters(function)
    by_position = []
    for parameter in parameters:
        is_given = parameter.default is parameter.empty or parameter.name in arguments
        if parameter.kind is parameter.POSITIONAL_ONLY and is_given:
            by_position.append(parameter.name)
    if by_position:
        raise ValueError(
            f"reward {reward_name(function)!r} takes {', '.join(by_position)} by position only, but columns are given "
            "by name: remove the / from its parameters"
        )
    names = {parameter.name for parameter in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names |= columns.keys() - {_name_of_self(function)}
    passed = {name: _copied(value) for name, value in arguments.items() if name in names}
    if tokenizer is not None and "tokenizer" in names:
        passed["tokenizer"] = tokenizer

    process = os.getpid()
    try:
        returned = function(**passed)
        if inspect.isawaitable(returned):
            returned = _wait(returned, function)
        return returned
    except SystemExit as error:  # it would end the training without a word
        raise RuntimeError(f"ended by {error!r}") from error
    finally:
        end_if_forked(process, f"reward {reward_name(function)!r}")


def call_logged(
    function: Callable[..., object], columns: Mapping[str, object], tokenizer: object, now: Training
) -> Returned:
    """Call a reward function at this point in the training; return its result and what it logged."""
    log = RewardLog(count_rows(columns))
    with training(now.step, now.progress, log, evaluating=now.evaluating):
        return call_reward(function, columns, tokenizer), log.columns()


def check_columns(function: Callable[..., object], columns: Collection[str]) -> None:
    """Raise a ValueError if a reward function needs a column that is not among these."""
    # Parameters without a default
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = []
    for parameter in _parameters(function):
        is_needed = parameter.default is parameter.empty and parameter.kind in by_keyword
        if is_needed and parameter.name not in columns and parameter.name not in TRAINING_ARGUMENTS:
            missing.append(parameter.name)
    if not missing:
        return

    # TRL's instances of its ``environment_factory``
    if "environments" in missing:
        raise ValueError(
            f"reward {reward_name(function)!r} needs TRL's 'environments', which do not exist here: an environment is "
            "a task whose own score(turns) sees the whole episode, or a program of ProgramVectorEnv, which returns its "
            "reward. For a function that works without them, give the parameter a default: environments=None"
        )

    # Columns with a similar name
    hint = "add it to the prompts, one entry per row, or give the parameter a default"
    suggestions = []
    for name in missing:
        similar = nearest(name, columns)
        if similar:
            suggestions.append(similar)
    if suggestions:
        hint = f"did you mean {', '.join(map(repr, suggestions))}? Else {hint}"
    needs = f"reward {reward_name(function)!r} needs the column {', '.join(map(repr, missing))}"
    raise ValueError(f"{needs}, but got {sorted(columns)}: {hint}")


def _copied(value: object) -> object:
    """Copy containers recursively; return other values unchanged."""
    if type(value) in IMMUTABLE_TYPES:  # first, because token ids are many
        return value
    if type(value) is list:
        return [_copied(item) for item in value]
    if type(value) is tuple:
        return tuple(_copied(item) for item in value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    mutable_types = (list, tuple, dict, set, bytearray, deque, np.ndarray)
    if isinstance(value, mutable_types) or is_tensor(value):
        return copy.deepcopy(value)
    return value


def _name_of_self(function: Callable[..., object]) -> str | None:
    """Return the name of the first parameter (``self``) of a method or a callable object: no argument can have it.

    None for functions, and if the first parameter cannot be given by name: then a column may have its name.
    """
    method = function
    if not inspect.ismethod(function):
        method = type(function).__call__
    unbound = getattr(method, "__func__", method)
    parameters = list(inspect.signature(unbound).parameters.values())
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None
    return parameters[0].name


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return a function's parameters; of a torch module those of its ``forward``."""
    if "torch" in sys.modules and isinstance(function, sys.modules["torch"].nn.Module):
        function = function.forward  # its call takes any arguments, and passes them on
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without a signature
        return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("prompts", "completions")]


def _wait(awaitable: Awaitable[object], function: Callable[..., object]) -> object:
    """Return the result of an ``async`` reward function."""
    process = os.getpid()

    async def result() -> object:
        try:
            return await awaitable
        finally:
            end_if_forked(process, f"reward {reward_name(function)!r}")

    # A separate thread, because the caller may be inside an event loop (as in a notebook).
    (outcome,) = run_in_threads([lambda: asyncio.run(result())], None)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
