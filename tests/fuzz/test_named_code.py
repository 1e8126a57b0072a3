"""What a run of somebody else names is neither imported nor executed, opened or started."""

import pytest

from tests.helpers.warm_start import run_program


@pytest.mark.parametrize("every", [pytest.param(997, marks=pytest.mark.long), pytest.param(17, marks=pytest.mark.slow)])
def test_no_key_of_a_run_leads_to_code(every):
    """A part of them: ``python -m tests.fuzz.named_code`` names code at all keys."""
    done = run_program("from tests.fuzz.named_code import main; main()", "--every", str(every))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("0 of ")
