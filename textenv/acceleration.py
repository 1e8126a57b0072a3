"""Fast paths: `accelerated` replaces a plain function by a faster one; ``TEXTENV_FAST=0`` switches all of them off."""

import os
from collections.abc import Callable
from functools import partial, update_wrapper
from pkgutil import resolve_name
from typing import Any, TypeVar

T = TypeVar("T")
FAST = os.environ.get("TEXTENV_FAST") != "0"
"""False if the environment variable ``TEXTENV_FAST`` is 0."""
TAKEN: list[str] = []
"""Fast paths in use."""


def accelerated(path: str) -> Callable[[T], T]:
    """Decorator that replaces a plain function or class by its fast path, if that exists and is not switched off.

    Args:
        path: ``module:name``. A fast class replaces the plain one. A fast function gets the plain one as its first
            argument and calls it for inputs that it does not support.
    """

    def choose(plain: T) -> T:
        if not FAST:
            return plain
        try:
            fast: Any = resolve_name(path)
        except ModuleNotFoundError as error:
            if not path.startswith(str(error.name)):
                raise
            return plain
        TAKEN.append(path)
        return fast if isinstance(plain, type) else update_wrapper(partial(fast, plain), plain)  # type: ignore

    return choose
