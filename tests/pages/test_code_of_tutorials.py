"""Tutorials and concepts: their code runs as it stands."""

import pytest

from tests.helpers.pages import TUTORIALS, check_code, lengths


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "divide_steps_by"), lengths(TUTORIALS))
def test_the_code_of_a_page_runs(page, divide_steps_by):
    check_code(page, divide_steps_by=divide_steps_by)
