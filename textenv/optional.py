"""Import of packages that an extra installs."""

import importlib
from types import ModuleType


def package(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package; an ImportError says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name.partition('.')[0]} is not installed: pip install 'textenv[{extra}]'") from error
