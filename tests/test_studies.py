"""The programs of examples/studies run, and what they compute exactly is right."""

import json

import pytest

from tests.helpers.models import EXAMPLES, load_example


def test_every_study_is_run_here():
    assert {path.stem for path in (EXAMPLES / "studies").glob("*.py")} == {"staleness"}


def test_only_the_product_of_all_ratios_has_no_bias():
    figures = load_example("studies/staleness").enumerate_tree(distance=0.7)
    assert figures["product, no limit"]["bias"] < 1e-12
    assert min(row["bias"] for name, row in figures.items() if name != "product, no limit") > 0.1
    assert figures["sequence_truncate"]["variance"] < figures["product, no limit"]["variance"]


@pytest.mark.long
def test_stale_samples_are_trained_on_and_a_run_is_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = load_example("studies/staleness")
    monkeypatch.setattr(study, "ITERATIONS", 2)
    options = ["--staleness", "0,1", "--corrections", "none,sequence_mask", "--seeds", "1"]
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["staleness.py", *options])
        study.main()
    runs = [json.loads(line) for line in (tmp_path / "runs" / "staleness.jsonl").read_text().splitlines()]
    assert [(run["correction"], run["staleness"]) for run in runs] == [("none", 0), ("none", 1), ("sequence_mask", 1)]
    monkeypatch.setattr("sys.argv", ["staleness.py", "--table"])
    capsys.readouterr()
    study.main()
    assert f"| sequence_mask | – | {runs[2]['return']:.2f} |" in capsys.readouterr().out
