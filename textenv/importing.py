"""Import the user's Python code by name: rewards, wrappers, environments and policies.

A file gets a module name of its own, ``textenv.importing.FOLDER.STEM`` with the escaped path of its folder. So it hides
no module of the standard library, of a package or of another folder. What it defines can be pickled: a process that
unpickles it imports this module first, which finds the file by the path in the name.

An import in a file, also one inside a function that is called later, looks beside the file first. Only names of modules
of the standard library are never looked for there. Two folders may have files of the same name.

Three classes do this: `_OwnNames` finds files by their own names, `_Loader` runs them with imports that look beside the
file, and `_PlainNames` finds them by their plain names where only a string names them.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from urllib.parse import quote, unquote_to_bytes

__path__: list[str] = []
"""Makes this module a package for Python: the user's files are its submodules."""
USER_FILES = f"{__name__}."
"""How the module names of the user's files begin."""
HUB_PREFIX = "hf:"
"""How names of data sets begin; without it, a name is a file, and no network is asked for a misspelt one."""
_NEVER_BESIDE = sys.stdlib_module_names | {"textenv", "algos"}
"""Modules that a file of the same name beside the user's file never replaces."""
_folders: list[Path] = []
"""Folders from which code was imported, in the order of their first import."""


def load_function(name: str) -> Callable[..., object]:
    """Load the function named by ``"file.py:name"`` or ``"package.module:name"``.

    ``"textenv.rewards:name"`` names a factory: it is called, and the reward function that it makes is returned.

    Raises:
        ValueError: if the name has another form, if the module is missing or raises at import, or if it has no such
            function.

    Example:
        >>> load_function("textenv.rewards:unfinished").__name__
        'unfinished'
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name or not function_name.isidentifier():
        raise ValueError(
            f"function is {name!r}, expected file.py:name or package.module:name, such as my_rewards.py:score or "
            "minigrid.wrappers:ImgObsWrapper"
        )
    if module_name.endswith(".py"):
        module = _read_file(Path(module_name))
    else:
        module = read_module(module_name)

    # Find the function, or say which ones there are
    function = getattr(module, function_name, None)
    if not callable(function):
        kind = "no function"
        if function is not None:
            kind = f"a {type(function).__name__}, not a function,"
        names = ", ".join(_functions_of(module))
        raise ValueError(f"{module_name} has {kind} named {function_name!r}; its functions are {names}")
    if module_name == "textenv.rewards":
        return _made_by(function)
    return function


def _made_by(factory: Callable[..., Callable[..., object]]) -> Callable[..., object]:
    """Return the reward function that a factory makes; a ValueError if it needs arguments."""
    needed = []
    for parameter in inspect.signature(factory).parameters.values():
        is_single = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_single and parameter.default is parameter.empty:
            needed.append(parameter.name)
    if needed:
        name = factory.__name__
        raise ValueError(
            f"textenv.rewards:{name} needs {', '.join(needed)}: write my_reward = {name}(...) with them into a file, "
            "and give my_rewards.py:my_reward"
        )
    return factory()


def _functions_of(module: ModuleType) -> list[str]:
    """Return the names of the functions and classes that a module defines itself."""
    names = []
    for name, value in vars(module).items():
        if isinstance(value, (FunctionType, type)) and value.__module__ == module.__name__:
            names.append(name)
    return names


def absolute_name(name: str) -> str:
    """Return the name of a model, function (``rewards.py:f=0.5``) or data set (``hf:folder:config``).

    The path of an existing file or folder is made absolute.
    """
    if name.startswith(HUB_PREFIX):
        folder, colon, config = name.removeprefix(HUB_PREFIX).partition(":")
        if folder and Path(folder).is_dir():
            return f"{HUB_PREFIX}{Path(folder).resolve()}{colon}{config}"
        return name
    if name and Path(name).exists():
        return str(Path(name).resolve())
    path, _, function = name.rpartition(":")
    if path and Path(path).exists():
        return f"{Path(path).resolve()}:{function}"
    return name


def name_of(function: Callable[..., object]) -> str:
    """Return the name by which `load_function` finds a function: ``"file.py:name"`` or ``"package.module:name"``."""
    if isinstance(function, partial):
        return name_of(function.func)
    module_name = function.__module__
    loader = _loader_of(module_name)
    if loader is not None:
        module_name = loader.path
    function_name = getattr(function, "__name__", type(function).__name__)
    return f"{module_name}:{function_name}"


def _loader_of(module_name: str) -> _Loader | None:
    """Return the loader of a module that was imported from a user's file; None for others."""
    module = sys.modules.get(module_name)
    loader = getattr(module, "__loader__", None)
    return loader if isinstance(loader, _Loader) else None


def read_module(name: str) -> ModuleType:
    """Import a module; ``name.py`` or the package ``name`` in the current folder goes before an installed one.

    Raises:
        ValueError: with the reason, if the import fails; if a file in the current folder has the name of a module of
            the standard library, or of one that was imported from another current folder.
    """
    if name.startswith(USER_FILES):
        raise ValueError(f"module is {name!r}, expected a name such as package.module, or a file such as my_rewards.py")
    module_name = name.removesuffix(".py")
    top = _top_name(module_name)
    folder = Path.cwd()
    file = _source(folder, top)
    if file is not None:
        _check_unambiguous(top, file)
    with _import_errors_explained(name, folder):
        _remember(folder)
        if file is not None and top not in sys.modules and top not in _NEVER_BESIDE:
            _import_first(top, file)
        return importlib.import_module(module_name)


def _top_name(module_name: str) -> str:
    """Return the first part of a module's name."""
    top, _, _ = module_name.partition(".")
    return top


def _check_unambiguous(top: str, file: Path) -> None:
    """Raise a ValueError if another module has the name of this file."""
    advice = f"rename the file, or name a function in it as {file.name}:FUNCTION"
    if top in sys.stdlib_module_names:
        raise ValueError(f"{top} is a module of the standard library, which {file} does not replace: {advice}")
    loader = _loader_of(top)
    if loader is not None and loader.path != str(file):
        raise ValueError(f"{top} was imported from {loader.path} before, so {file} cannot be: {advice}")


def _import_first(name: str, file: Path) -> None:
    """Import a file of the current folder, so that it is found by its plain name before an installed module is."""
    if file.name != "__init__.py":
        sys.modules[name] = importlib.import_module(_own_name(file))
        return
    # A package and its parts have their plain names only
    spec = spec_from_file_location(name, file, loader=_Loader(name, str(file), file.parent.parent))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _read_file(path: Path) -> ModuleType:
    """Import a file; run it again only if it was modified, because it may load a model."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give the path of a Python file, then ':' and a function in it")
    path = path.resolve()
    name = _own_name(path)
    loader = _loader_of(name)
    if loader is not None and loader.modified != path.stat().st_mtime_ns:
        del sys.modules[name]
    with _import_errors_explained(str(path), path.parent):
        return importlib.import_module(name)


@contextmanager
def _import_errors_explained(what: str, folder: Path) -> Iterator[None]:
    """Turn any exception into a ValueError that says what could not be imported, and why."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error} (looked for in {folder} and on PYTHONPATH)"
        raise ValueError(f"{what} could not be imported: {reason}") from error


def _package_of(folder: Path) -> str:
    """Return the name of the package that holds the files of a folder."""
    return USER_FILES + _escaped(os.fspath(folder))


def _own_name(file: Path) -> str:
    """Return the module name of a user's file."""
    return f"{_package_of(file.parent)}.{_escaped(file.stem)}"


def _escaped(path: str) -> str:
    """Escape a path, which may have dots, to one part of a module's name."""
    return quote(os.fsencode(path)).replace(".", "%2E")


def _unescaped(part: str) -> str:
    """Return the path, or a part of one, that `_escaped` has escaped."""
    return os.fsdecode(unquote_to_bytes(part))


def _source(folder: Path, name: str) -> Path | None:
    """Return the file of a module in a folder, ``name.py`` or ``name/__init__.py``; None if there is neither."""
    for file in (folder / f"{name}.py", folder / name / "__init__.py"):
        if file.is_file():
            return file
    return None


def _remember(folder: Path) -> None:
    """Let `_PlainNames` look for modules in this folder from now on."""
    if folder not in _folders:
        _folders.append(folder)


class _OwnNames(MetaPathFinder):
    """Finds the user's files by their own names. Asked before Python's finders, which would not use `_Loader`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a user's folder, file or package; None for another module."""
        if not name.startswith(USER_FILES):
            return None
        folder_part, _, inside = name.removeprefix(USER_FILES).partition(".")
        folder = Path(_unescaped(folder_part))
        if not inside:
            return self._spec_of_folder(name, folder)

        # A file of this folder
        file = None
        if "." not in inside:
            file = _source(folder, _unescaped(inside))

        # A package without __init__.py, or a module inside a package
        if file is None:
            spec = PathFinder.find_spec(name, path, target)
            if spec is None or not isinstance(spec.loader, SourceFileLoader):
                return spec
            file = Path(spec.loader.path)
        return spec_from_file_location(name, file, loader=_Loader(name, str(file), folder))

    def _spec_of_folder(self, name: str, folder: Path) -> ModuleSpec | None:
        """Return the spec of a package that holds the files of a folder; None if there is no such folder."""
        if not (folder.is_absolute() and folder.is_dir()):
            return None
        _remember(folder)
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


class _PlainNames(MetaPathFinder):
    """Finds modules in `_folders` that no other finder finds, such as one that only a string names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, or None."""
        if "." in name:
            return None
        for folder in _folders:
            file = _source(folder, name)
            if file is None:
                continue
            if file.name == "__init__.py":
                return spec_from_file_location(name, file, loader=_Loader(name, str(file), folder))
            return ModuleSpec(name, _SameModule(_own_name(file)), origin=str(file))
        return None


class _SameModule(Loader):
    """Loader that gives a module a second name, its plain one, as in ``entry_point="my_envs:Chase"``."""

    def __init__(self, own_name: str) -> None:
        self.own_name = own_name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that has the own name, imported if necessary."""
        module = importlib.import_module(self.own_name)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec, which Python has replaced. The module has run already."""
        module.__spec__ = self.own_spec


class _Loader(SourceFileLoader):
    """Loader of a user's file, whose imports look in a folder first."""

    def __init__(self, name: str, path: str, folder: Path) -> None:
        super().__init__(name, path)
        self.folder = folder
        self.modified = 0
        """Time at which the file was modified, in nanoseconds since 1970."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the file. Stored bytecode is not used: it counts as up to date for a second after an edit."""
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        """Run the file with an ``__import__`` of its own, which each of its import statements calls."""
        self.modified = os.stat(self.path).st_mtime_ns
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": self._import}
        super().exec_module(module)

    def _import(
        self, name: str, globals: Mapping[str, object] | None = None, locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (), level: int = 0,
    ) -> object:  # fmt: skip
        """Import what is beside the file; else do as the built-in ``__import__``."""
        top = _top_name(name)
        is_relative = level > 0
        if not is_relative and self._is_beside(top):
            return self._import_beside(name, fromlist)
        try:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        except ModuleNotFoundError as error:
            # A folder beside the file without __init__.py is a package, too
            if is_relative or error.name != top or not (self.folder / top).is_dir():
                raise
            return self._import_beside(name, fromlist)

    def _is_beside(self, top: str) -> bool:
        """Return True if a module of this name is beside the file and not imported yet by its plain name."""
        if top in _NEVER_BESIDE:
            return False
        neighbour = _source(self.folder, top)
        if neighbour is None or str(neighbour) == self.path:  # a file may use a package of its own name
            return False
        imported_file = getattr(sys.modules.get(top), "__file__", None)
        if imported_file is None:
            return True
        return Path(imported_file).resolve() != neighbour.resolve()

    def _import_beside(self, name: str, fromlist: Sequence[str] | None) -> object:
        """Import a module beside the file; return what the import statement needs: the module, or its top package."""
        package = _package_of(self.folder)
        own_name = f"{package}.{name}"
        if fromlist:
            return builtins.__import__(own_name, fromlist=fromlist)
        importlib.import_module(own_name)
        return sys.modules[f"{package}.{_top_name(name)}"]


sys.meta_path.insert(0, _OwnNames())
sys.meta_path.append(_PlainNames())
