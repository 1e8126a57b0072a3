"""Former names and names of other libraries: an unknown name raises an error that suggests ours."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from textenv.foreign import ADVICE, FLAGS, METHODS, NO_EQUIVALENT, PLACES, our_names
from textenv.plain import plain

P = ParamSpec("P")
R = TypeVar("R")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to an unknown one, by `our_names` or by spelling; None if no name is close."""
    known = list(known)
    for ours in our_names(name):
        if ours in known:
            return ours
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def advice(name: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown name, such as ``did you mean 'num_steps'?``; empty if that is unclear.

    Args:
        name: as it was written, in Python.
        known: names that are known there.
    """
    known = list(known)
    ours = our_names(name)
    here = [other for other in ours if other in known]
    if here:
        return f"did you mean {here[0]!r}?"
    if name in ADVICE:
        return f"{ADVICE[name]}."
    if ours:
        return f"here it is {ours[0]}, {PLACES.get(ours[0], 'a field of a config')}."
    if name in NO_EQUIVALENT:
        return "it is of another library, and has no counterpart here."
    similar = nearest(name, known)
    if similar is not None:
        return f"did you mean {similar!r}?"
    return f"it is {PLACES[name]}." if name in PLACES else ""


def flag_advice(name: str) -> str:
    """Return what to write on the command line instead of a foreign flag that no flag replaces; empty if unclear."""
    if name in FLAGS:
        return FLAGS[name]
    if name in ADVICE:
        return f"in Python, {ADVICE[name]}"
    ours = our_names(name)
    if ours:
        return f"in Python it is {ours[0]}, {PLACES.get(ours[0], 'a field of a config')}"
    return "it is of another library, and has no counterpart here" if name in NO_EQUIVALENT else ""


def refuse_unknown(names: Iterable[str], known: Iterable[str], *, owner: str) -> None:
    """Raise a TypeError that suggests our name, unless all names are known.

    Example:
        >>> refuse_unknown(["lr"], ["learning_rate", "gamma"], owner="PPOConfig")
        Traceback (most recent call last):
            ...
        TypeError: PPOConfig has no 'lr': did you mean 'learning_rate'? It has learning_rate, gamma
    """
    known = list(known)
    for name in names:
        if name not in known:
            instead = advice(name, known)
            suggestion = f": {instead}" if instead else "."
            raise TypeError(f"{owner} has no {name!r}{suggestion} It has {', '.join(known)}")


class HintsAtMethods(type):
    """Type of classes that say what to write instead of an attribute of another library, such as ``PPO.load``."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise AttributeError(_no_attribute(cls.__name__, name), name=name, obj=cls)


def no_attribute(owner: Any, name: str) -> AttributeError:
    """Return the error for a missing attribute of an object, with what to write instead of another library's."""
    return AttributeError(_no_attribute(type(owner).__name__, name), name=name, obj=owner)


def _no_attribute(owner: str, name: str) -> str:
    instead = METHODS.get(name)
    if instead is None and not name.startswith("_"):
        instead = ADVICE.get(name)
    return f"{owner} has no attribute {name!r}" + (f": {instead}" if instead else "")


def check_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that checks a function's keywords by `refuse_unknown`, unless the function accepts any keyword.

    NumPy scalars among the arguments become Python numbers (`textenv.plain.plain`).
    """
    parameters = inspect.signature(function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.name not in ("self", "cls")]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        if not takes_any:
            refuse_unknown(options, known, owner=owner)
        plain_args = [plain(value) for value in args]
        plain_options = {name: plain(value) for name, value in options.items()}
        return function(*plain_args, **plain_options)

    return checked


class NamedFields:
    """Base of config dataclasses; `refuse_unknown` checks the field names."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Refuse unknown fields."""
        refuse_unknown(values, [field.name for field in fields(cls)], owner=cls.__name__)  # type: ignore[arg-type]
        return super().__new__(cls)
