"""Processes that are closed off, where the system can close them."""

import pytest

from textenv.sandbox.confinement import NotConfinedError, check_system


def closed_or_skip():
    """Skip the test where the kernel has no Landlock."""
    try:
        check_system()
    except NotConfinedError as error:
        pytest.skip(f"no process can be closed off here: {error}")
