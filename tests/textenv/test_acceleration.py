"""Digests of functions: what changes them, and what does not."""

import sys

import pytest

from textenv.acceleration import digest

MODULE = """
SCALE = 2

def scaled(value):
    total = SCALE * value

    def twice(part):
        return part + total

    return twice(value)

def ordered(values):
    longest_first = sorted(values, key=lambda SCALE: -SCALE)
    return [SCALE * value for value in longest_first]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "digested.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("digested")
    del sys.modules["digested"]


def test_a_digest_depends_on_what_globals_mean(module):
    former = digest("digested:scaled")
    module.SCALE = 3
    assert former is not None and digest("digested:scaled") != former


def test_a_global_that_an_inner_function_hides_counts(module):
    """`SCALE` is an argument of the lambda, but a global in the function around it."""
    former = digest("digested:ordered")
    module.SCALE = 3
    assert digest("digested:ordered") != former


@pytest.mark.parametrize("name", ["value", "total", "part", "twice"])
def test_a_global_with_a_locals_name_changes_no_digest(module, name):
    former = digest("digested:scaled")
    setattr(module, name, 5)
    assert digest("digested:scaled") == former
