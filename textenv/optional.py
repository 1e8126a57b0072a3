"""Import of packages that an extra installs."""

import importlib
import shlex
from importlib.metadata import PackageNotFoundError, requires
from types import ModuleType


def package(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package; an ImportError says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name.partition('.')[0]} is not installed (extra {extra}): {install_command(extra)}"
        ) from error


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, wherever this package itself came from.

    Example:
        >>> install_command("lora")
        "pip install 'peft>=0.17'"
    """
    from packaging.requirements import Requirement

    try:
        lines = requires("textenv") or []
    except PackageNotFoundError:  # the source is on the path, but not installed
        return f"pip install '.[{extra}]'"
    packages = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            requirement.marker = None
            packages.append(str(requirement))
    return shlex.join(["pip", "install", *packages])
