"""Every command that reads a run ends with a result or a sentence, whatever is wrong with the run's files."""

import pytest

from tests.fuzz.damaged_runs import attempt, cases, make_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    ("first", "every"),
    [pytest.param(0, 2999, marks=pytest.mark.long), pytest.param(1, 97, marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_a_damaged_run_ends_in_a_sentence(runs, tmp_path, first, every):
    """A part of them: ``python tests/fuzz/damaged_runs.py`` tries all."""
    problems = {}
    tried = [*cases(runs)][first::every]
    assert len({case.command for case in tried}) > 5
    for case in tried:
        problem = attempt(case, runs[case.kind], tmp_path / "scratch")
        if problem:
            problems[str(case)] = problem
    assert problems == {}
