"""Packages of one test file, loaded when its tests run: each worker collects all files, and runs half of them."""

import importlib
import importlib.util

import pytest


class LazyModule:
    """Stands for a module, and loads it when something of it is used."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("_"):  # pytest asks every name of a file whether it is a test or a fixture
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def lazy_import(name, reason=None):
    """Return the module of this name, which is loaded at its first use (`pytest.importorskip` loads it at once).

    Where its package is not installed, the test file that asks for it is skipped.
    """
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(reason or f"needs the package {package}", allow_module_level=True)
    return LazyModule(name)
