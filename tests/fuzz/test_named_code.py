"""What a run of somebody else names is neither imported nor executed, opened or started."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("every", [pytest.param(997, marks=pytest.mark.long), pytest.param(17, marks=pytest.mark.slow)])
def test_no_key_of_a_run_leads_to_code(every):
    """A part of them: ``python -m tests.fuzz.named_code`` names code at all keys."""
    command = [sys.executable, "-m", "tests.fuzz.named_code", "--every", str(every)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("0 of ")
