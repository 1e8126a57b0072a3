"""The notebooks: each is still its tutorial, holds what a notebook shows, and runs in a kernel."""

import re

import nbformat
import pytest

from tests.helpers.models import load_example

notebooks = load_example("notebooks")


@pytest.mark.parametrize("name", notebooks.TUTORIALS)
def test_a_notebook_is_its_tutorial_and_was_run(name):
    book, fresh = nbformat.read(notebooks.FOLDER / f"{name}.ipynb", as_version=4), notebooks.convert(name)
    assert notebooks.sources(book) == notebooks.sources(fresh), "run: python examples/notebooks.py"
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert len(code) >= 3 and [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    for target in re.findall(r"\]\(((?:\.\./)[^)#]*)", "\n".join(cell.source for cell in book.cells)):
        assert (notebooks.FOLDER / target).exists(), target


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "write-a-reward",
        # The kernel is that of the first, and tests/pages runs their code
        pytest.param("swap-in-an-environment", marks=pytest.mark.slow),
        pytest.param("control-and-text", marks=pytest.mark.slow),
    ],
)
def test_a_notebook_runs_and_shows_its_figures(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(notebooks.ROOT))
    book = notebooks.execute(notebooks.convert(name), tmp_path)
    shown = "".join(x.get("data", {}).get("text/html", "") for cell in book.cells for x in cell.get("outputs", ()))
    if name == "write-a-reward":
        assert "of 24,000 steps" in shown and shown.count('<span title="log_prob ') > 20
