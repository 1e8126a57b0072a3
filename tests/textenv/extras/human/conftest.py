"""Where people's answers go."""

import pytest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "answers.jsonl"
