"""Python code of the user by name: functions and modules of environments, wrappers, rewards and policies."""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


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
