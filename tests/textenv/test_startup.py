"""Processes that load torch fast have a garbage collector like any other afterwards."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys
from textenv.startup import load_torch

load_torch()
assert "torch" in sys.modules and "tensordict" in sys.modules
num_frozen = gc.get_freeze_count()
assert gc.isenabled() and num_frozen > 100_000, num_frozen

cycle = []
cycle.append(cycle)
load_torch()
assert gc.get_freeze_count() <= num_frozen
del cycle
assert gc.collect() >= 1
"""


@pytest.mark.heavy
def test_the_collector_ignores_torch_and_sees_what_comes_after_it():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
