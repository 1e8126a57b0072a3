"""Fast paths: faster code that stands for plain functions, as long as these are the ones that it was written for.

Beside a fast path stands the digest of each plain function that it stands for. If one of them is edited, patched or
overridden, the plain one runs. ``TEXTENV_FAST=0`` switches all fast paths off.
"""

import ast
import hashlib
import inspect
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, update_wrapper
from pkgutil import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)
FAST = os.environ.get("TEXTENV_FAST") != "0"
"""False if the environment variable ``TEXTENV_FAST`` is 0."""
TAKEN: list[str] = []
"""Fast paths in use."""
PACKAGES = ("algos", "textenv")
"""Our packages: what other packages do is not compared."""


def accelerated(path: str, digest: str) -> Callable[[T], T]:
    """Decorator that replaces a plain function or class by its fast path, if that exists and is not switched off.

    Args:
        path: ``module:name``. A fast class replaces the plain one. A fast function gets the plain one as its first
            argument and calls it for inputs that it does not support.
        digest: `syntax_digest` of the plain one; if it has another, the plain one stays.
    """

    def choose(plain: T) -> T:
        if not FAST:
            return plain
        if syntax_digest(plain) != digest:
            name = f"{plain.__module__}:{plain.__qualname__}"  # type: ignore[attr-defined]
            logger.warning("%s was edited, so it runs itself and not %s (its digest was %s)", name, path, digest)
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


class Originals:
    """The functions that a fast path stands for: tells whether they are still the ones that it was written for.

    A function is another one if its syntax has changed (apart from docstrings), if a global name in it means something
    else, or if another function stands in its place.

    Args:
        digests: `digest` of each function, by ``module:name``.
    """

    def __init__(self, digests: Mapping[str, str]) -> None:
        self.digests = dict(digests)
        self._changed: str | None = None
        self._bindings: list[tuple[Mapping[str, Any], str, Any]] = []
        """Where each function, and what its global names mean, was found at the last comparison."""
        self._codes: list[tuple[FunctionType, CodeType, Any, Any]] = []
        """Code and defaults of each function at the last comparison."""

    def changed(self) -> str | None:
        """Name of the first function that is another one; None if there is none.

        Sources are read by the first call, and after a change; other calls only compare identities.
        """
        if not self._codes or not self._as_compared():
            self._remember()
            self._changed = next((name for name, recorded in self.digests.items() if digest(name) != recorded), None)
        return self._changed

    def _as_compared(self) -> bool:
        for place, name, value in self._bindings:
            if place.get(name) is not value:
                return False
        for function, code, defaults, named_defaults in self._codes:
            same_defaults = function.__defaults__ is defaults and function.__kwdefaults__ is named_defaults
            if function.__code__ is not code or not same_defaults:
                return False
        return True

    def _remember(self) -> None:
        bindings = {}
        self._codes = []
        for name in self.digests:
            # Where the function stands: its module's name, then its class's
            module, _, path = name.partition(":")
            function: Any = sys.modules.get(module)
            for part in path.split("."):
                owner = function
                function = getattr(owner, "__dict__", {}).get(part)
                bindings[id(owner), part] = (getattr(owner, "__dict__", {}), part, function)

            # What it does: its code and defaults, and what the global names in it are
            plain = inspect.unwrap(function)
            if inspect.isfunction(plain):
                self._codes.append((plain, plain.__code__, plain.__defaults__, plain.__kwdefaults__))
                module_names = plain.__globals__
                for key in _names_in(plain.__code__):
                    bindings[id(module_names), key] = (module_names, key, module_names.get(key))
        self._bindings = list(bindings.values())


def find(name: str) -> Any:
    """What stands at ``module:name`` now; None if nothing does."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def digest(name: str) -> str | None:
    """Digest of a function ``module:name``: of its syntax, and of what its global names mean; None without source."""
    function = find(name)
    plain = inspect.unwrap(function)
    tree = _tree(plain) if inspect.isfunction(plain) else None
    if tree is None:
        return None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    meanings = [f"{key} is {_meaning(plain.__globals__[key])}" for key in sorted(names & plain.__globals__.keys())]
    wrappers = [f"inside {wrapper}" for wrapper in _wrappers(function)]
    return _sha("\n".join([_dump(tree), *meanings, *wrappers]))


def syntax_digest(plain: Any) -> str | None:
    """Digest of a function's or class's syntax, without docstrings; None without source."""
    tree = _tree(plain)
    return None if tree is None else _sha(_dump(tree))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _tree(plain: Any) -> ast.stmt | None:
    """Syntax tree of a function or class, without docstrings and the decorator `accelerated`."""
    try:
        source = textwrap.dedent(inspect.getsource(plain))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, or not of one statement
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if ast.get_docstring(node) is not None:
                del node.body[0]
            node.decorator_list = [x for x in node.decorator_list if "accelerated" not in ast.dump(x)]
    return tree


def _dump(node: Any) -> str:
    """Like `ast.dump`, the same in all versions of Python: empty fields are left out."""
    if isinstance(node, ast.AST):
        fields = {name: x for name, x in ast.iter_fields(node) if x not in (None, []) and name != "ctx"}
        return f"{type(node).__name__}({', '.join(f'{name}={_dump(x)}' for name, x in fields.items())})"
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    return repr(node)


def _meaning(value: Any) -> str:
    """What a global name stands for: its place if it is ours, the value of a constant, else the package of its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_meaning, value))})"
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, partial):
        return f"partial {_meaning(value.func)}"
    module = getattr(value, "__module__", None) or type(value).__module__
    package = module.partition(".")[0]
    name = getattr(value, "__qualname__", None)
    if package not in PACKAGES or name is None:
        return f"something of {package}"
    place = f"{module}:{name}"
    return place if find(place) is value else f"another {place}"


def _wrappers(function: Any) -> Iterator[str]:
    """The package of each wrapper of a function, except those by `accelerated`."""
    while hasattr(function, "__wrapped__"):
        by_accelerated = isinstance(function, partial) and function.func.__module__.startswith("algos.fast.")
        if not by_accelerated:
            # The names of a wrapper are those of the function (`functools.wraps`), but not its globals.
            module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
            yield module.partition(".")[0]
        function = function.__wrapped__


@cache
def _names_in(code: CodeType) -> tuple[str, ...]:
    """Names of attributes and globals in a function, and in the functions inside it."""
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in _names_in(x)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))
