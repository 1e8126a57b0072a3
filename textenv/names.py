"""Former names and names of other libraries: an unknown name raises an error that suggests ours."""

import difflib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from textenv.foreign import ADVICE, FLAGS, METHODS, MOVED, NO_EQUIVALENT, OF_CONFIG, PLACES, our_names
from textenv.plain import plain

P = ParamSpec("P")
R = TypeVar("R")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to an unknown one, by `our_names` or by spelling; None if no name is close."""
    known_names = list(known)
    for our_name in our_names(name):
        if our_name in known_names:
            return our_name
    matches = difflib.get_close_matches(name, known_names, n=1)
    return matches[0] if matches else None


def advice(name: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown name, such as ``did you mean 'num_steps'?``; empty if that is unclear.

    Args:
        name: the unknown name, as it was written in Python.
        known: names that are known there.
    """
    known_names = list(known)

    # A name of another library, or a former one
    names_here = our_names(name)
    for name_here in names_here:
        if name_here in known_names:
            return f"did you mean {name_here!r}?"
    if name in ADVICE:
        return f"{ADVICE[name]}."
    if names_here:
        return f"here it is {_with_owner(names_here[0])}."
    if name in NO_EQUIVALENT:
        return "it is of another library, and has no counterpart here."

    # A misspelt name, or one that belongs elsewhere
    similar = nearest(name, known_names)
    if similar is not None:
        return f"did you mean {similar!r}?"
    if name in PLACES:
        return f"it is {PLACES[name]}."
    return ""


def _with_owner(name: str) -> str:
    """Return a name of ours and what it belongs to."""
    owner = PLACES.get(name, "a field of a config")
    return f"{name}, {owner}"


def flag_advice(name: str) -> str:
    """Return what to write on the command line instead of a foreign flag that no flag replaces; empty if unclear."""
    if name in FLAGS:
        return FLAGS[name]
    if name in ADVICE:
        return f"in Python, {ADVICE[name]}"
    names_here = our_names(name)
    if names_here:
        return f"in Python it is {_with_owner(names_here[0])}"
    if name in NO_EQUIVALENT:
        return "it is of another library, and has no counterpart here"
    return ""


def refuse_unknown(names: Iterable[str], known: Iterable[str], *, owner: str) -> None:
    """Raise a TypeError that suggests our name, unless all names are known.

    Example:
        >>> refuse_unknown(["lr"], ["learning_rate", "gamma"], owner="PPOConfig")
        Traceback (most recent call last):
            ...
        TypeError: PPOConfig has no 'lr': did you mean 'learning_rate'? It has learning_rate, gamma
    """
    known_names = list(known)
    for name in names:
        if name not in known_names:
            suggestion = advice(name, known_names)
            if name in OF_CONFIG.get(owner, {}):
                suggestion = f"{OF_CONFIG[owner][name]}."
            ending = f": {suggestion}" if suggestion else "."
            raise TypeError(f"{owner} has no {name!r}{ending} It has {', '.join(known_names)}")


def missing_name(package: str, name: str) -> ImportError | AttributeError:
    """Return the error for a name that a package does not have; it says where a formerly public name is.

    For such a name it is an ImportError: Python replaces an AttributeError in ``from textenv import k1`` by an error
    without our sentence.

    Example:
        >>> missing_name("textenv", "k1")
        ImportError('textenv.k1 is textenv.kl.estimators.k1: from textenv.kl.estimators import k1')
    """
    path = f"{package}.{name}"
    if path in MOVED:
        module, _, attribute = MOVED[path].rpartition(".")
        return ImportError(f"{path} is {MOVED[path]}: from {module} import {attribute}")

    message = f"module {package!r} has no attribute {name!r}"
    if not name.startswith("_") and importlib.util.find_spec(path) is not None:
        message += f": write 'import {path}' first"
    return AttributeError(message, name=name, obj=sys.modules[package])


class HintsAtMethods(type):
    """Type of classes that say what to write instead of an attribute of another library, such as ``PPO.load``."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise AttributeError(_no_attribute(cls.__name__, name), name=name, obj=cls)


def no_attribute(owner: Any, name: str) -> AttributeError:
    """Return the error for a missing attribute of an object; it says what replaces a name of another library."""
    return AttributeError(_no_attribute(type(owner).__name__, name), name=name, obj=owner)


def _no_attribute(owner: str, name: str) -> str:
    """Return the message for a missing attribute."""
    message = f"{owner} has no attribute {name!r}"
    suggestion = METHODS.get(name)
    if suggestion is None and not name.startswith("_"):
        suggestion = ADVICE.get(name)
    if suggestion:
        message += f": {suggestion}"
    return message


def check_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that checks a function's keywords by `refuse_unknown`, unless the function accepts any keyword.

    NumPy scalars among the arguments become Python numbers (`textenv.plain.plain`).
    """
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.name not in ("self", "cls")]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        if not takes_any:
            refuse_unknown(options, names, owner=owner)
        plain_args = [plain(value) for value in args]
        plain_options = {name: plain(value) for name, value in options.items()}
        return function(*plain_args, **plain_options)

    return checked


def check_call(
    function: Callable[..., object], arguments: Sequence[str] = (), *, keywords: Sequence[str] = (), name: str
) -> None:
    """Raise a TypeError if a user's function cannot be called with these arguments and keywords.

    One that does not say its parameters, as some in C, passes.

    Example:
        >>> check_call(lambda mask: mask, keywords=["mask", "advantage"], name="loss")
        Traceback (most recent call last):
            ...
        TypeError: loss is called with mask=..., advantage=...: got an unexpected keyword argument 'advantage'
    """
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        parameters.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join([*arguments, *(f"{keyword}=..." for keyword in keywords)])
        raise TypeError(f"{name} is called with {call}: {error}") from error


class NamedFields:
    """Base of config dataclasses: an unknown field raises the error of `refuse_unknown`."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Refuse unknown fields."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        refuse_unknown(values, names, owner=cls.__name__)
        return super().__new__(cls)
