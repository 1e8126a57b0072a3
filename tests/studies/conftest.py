"""Studies are run by their command lines, in an empty folder."""

import sys

import pytest

from tests.helpers.models import EXAMPLES

# Python puts the folder of a script that it runs on the path; scripts import their neighbours
sys.path += [str(EXAMPLES / "studies"), str(EXAMPLES / "benchmarks")]


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """A function that calls a script with some options in an empty folder, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def call_script(script, *options):
        monkeypatch.setattr("sys.argv", [script.__file__, *map(str, options)])
        capsys.readouterr()
        script.main()
        return capsys.readouterr().out

    return call_script
