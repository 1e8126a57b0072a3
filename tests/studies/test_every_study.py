"""What holds of all studies: each has tests, and its figure is that of its page's table."""

import json
import re

import numpy as np
import pytest

from tests.helpers.models import EXAMPLES, load_example

STUDIES = sorted(path.stem for path in (EXAMPLES / "studies").glob("*.py"))
FIGURES = EXAMPLES.parent / "docs" / "figures"


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_tests(name):
    path = EXAMPLES.parent / "tests" / "studies" / f"test_{name}.py"
    assert f'load_example("studies/{name}")' in path.read_text()


def assert_published(path, name):
    """The file in docs/figures is that of the present table."""
    drawn = path.read_text()
    published = (FIGURES / f"{name}.svg").read_text()
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("", drawn) == number.sub("", published)
    coordinates = [np.array(number.findall(text), dtype=float) for text in (drawn, published)]
    assert np.allclose(*coordinates, atol=0.01)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["details", "kl-gradients", "lora", "overoptimisation", "pass-at-k", "staleness"])
def test_a_figure_is_drawn_again_from_the_table_of_its_page(name, call, tmp_path):
    call(load_example(f"studies/{name.replace('-', '_')}"), "--figure", "figure.svg")
    assert_published(tmp_path / "figure.svg", name)


@pytest.mark.heavy
@pytest.mark.parametrize("name", load_example("benchmarks/result_figures").DRAWINGS)
def test_a_figure_of_another_page_is_that_of_its_table_too(name, tmp_path):
    load_example("benchmarks/result_figures").DRAWINGS[name](tmp_path / "figure.svg")
    assert_published(tmp_path / "figure.svg", name)


def test_the_figures_show_the_numbers_of_the_tables(tmp_path):
    pictures = load_example("benchmarks/pictures")
    table = {
        "columns": ["", "K = 0", "K = 4"],
        "rows": [["none", "0.92 [0.90, 0.93]", "−9.63 (-24.67)"], ["x", "–", "16,500 [20,810, 9]"]],
    }
    (tmp_path / "table.json").write_text(json.dumps(table))
    columns, rows = pictures.read_table(tmp_path / "table.json")
    assert columns == ["K = 0", "K = 4"]
    assert rows == {"none": [[0.92, 0.90, 0.93], [-9.63, -24.67]], "x": [[], [16_500, 20_810, 9]]}
