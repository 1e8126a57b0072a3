"""Staleness of samples: bias and variance on a tree, and the script in miniature."""

import json

import pytest

from tests.helpers.models import load_example


@pytest.fixture
def study():
    return load_example("studies/staleness")


def test_only_the_product_of_all_ratios_has_no_bias(study):
    figures = study.enumerate_tree(distance=0.7)
    assert figures["product, no limit"]["bias"] < 1e-12
    assert min(row["bias"] for name, row in figures.items() if name != "product, no limit") > 0.1
    assert figures["sequence_truncate"]["variance"] < figures["product, no limit"]["variance"]


def test_without_a_gap_no_correction_has_a_bias(study):
    """Then all weights are 1, so all corrections have the variance of none."""
    figures = study.enumerate_tree(distance=0.0)
    variances = [row["variance"] for row in figures.values()]
    assert max(row["bias"] for row in figures.values()) < 1e-12
    assert variances == pytest.approx([figures["none"]["variance"]] * len(variances), rel=1e-12)


def test_without_a_gap_only_one_correction_is_run(study):
    settings = study.settings_of(corrections=["none", "opsm"], ages=[0, 1], seeds=[1, 2])
    assert [tuple(run.values()) for run in settings] == [
        ("none", 0, 1), ("none", 1, 1), ("opsm", 1, 1), ("none", 0, 2), ("none", 1, 2), ("opsm", 1, 2),
    ]  # fmt: skip


def test_the_table_has_means_over_seeds(study, call, tmp_path):
    """Of lines as they were written by earlier versions."""
    (tmp_path / "runs").mkdir()
    lines = [
        '{"correction": "none", "staleness": 4, "seed": 1, "return": 0.5, "kl": 1.0, "dropped": 0.0, "seconds": 60.1}',
        '{"correction": "none", "staleness": 4, "seed": 2, "return": 0.7, "kl": 1.0, "dropped": 0.0, "seconds": 60.1}',
        '{"correction": "opsm", "staleness": 16, "seed": 1, "return": 0.25, "kl": 1.0, "dropped": 0, "seconds": 9.9}',
    ]
    (tmp_path / "runs" / "staleness.jsonl").write_text("\n".join(lines) + "\n")
    assert call(study, "--table").splitlines()[:4] == [
        "| correction | K = 4 | K = 16 |",
        "| --- | --- | --- |",
        "| none | 0.60 [0.50, 0.70] | – |",
        "| opsm | – | 0.25 |",
    ]


def test_an_unknown_correction_is_refused_before_any_run(study, call, capsys, tmp_path):
    with pytest.raises(SystemExit):
        call(study, "--corrections", "none,magic")
    assert "'magic', expected some of none, opsm" in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.long
def test_stale_samples_are_trained_on_and_a_run_is_not_repeated(study, call, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ITERATIONS", 2)
    for _ in range(2):
        call(study, "--staleness", "0,1", "--corrections", "none,sequence_mask", "--seeds", "1")
    runs = list(study.RUNS.read().values())
    assert len((tmp_path / "runs" / "staleness.jsonl").read_text().splitlines()) == len(runs)
    assert [(run["correction"], run["staleness"]) for run in runs] == [("none", 0), ("none", 1), ("sequence_mask", 1)]
    assert f"| sequence_mask | – | {runs[2]['return']:.2f} |" in call(study, "--table")
    call(study, "--json", "staleness.json")
    assert json.loads((tmp_path / "staleness.json").read_text())["columns"] == ["correction", "K = 0", "K = 1"]
