"""Packages of one test file, loaded when its tests run: each worker collects all files, and runs half of them."""

import importlib
import importlib.util

import pytest


class Package:
    """Stands for a module, and loads it when something of it is used."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("_"):  # pytest asks every name of a file whether it is a test or a fixture
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def installed(name, reason=None):
    """The module of this name; where its package is not installed, skip the test file that asks for it.

    Unlike `pytest.importorskip` it loads nothing yet.
    """
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(reason or f"needs the package {package}", allow_module_level=True)
    return Package(name)
