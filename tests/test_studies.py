"""The programs of examples/studies run, and what they compute exactly is right."""

import json

import pytest

from tests.helpers.models import EXAMPLES, load_example


def test_every_study_is_run_here():
    assert {path.stem for path in (EXAMPLES / "studies").glob("*.py")} == {"pass_at_k", "staleness"}


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


def test_the_change_of_pass_rates_is_paired_by_prompt():
    study = load_example("studies/pass_at_k")
    before = {"pass@1": [0.0, 0.2, 0.4, 0.6, 0.8]}
    after = [{"pass@1": [0.1, 0.3, 0.5, 0.7, 0.9]}, {"pass@1": [0.3, 0.5, 0.7, 0.9, 1.1]}]
    columns, rows = study.table({study.UNTRAINED: before, 1: after[0], 2: after[1]})
    assert columns == ["", "untrained", "trained, mean of 2 (each seed)", "change"]
    # Each prompt changes by .2, so the limits of the change are equal
    assert rows == [["pass@1", rows[0][1], "0.600 (0.50, 0.70)", "+0.200 [+0.200, +0.200]"]]
    assert study.is_right([" 46.", "46 or 7", "forty-six", "-46"], [46, 46, 46, 46]) == [1, 1, 0, 0]
    texts = [row["prompt"] for row in study.sums()]
    assert len(texts) == len(set(texts)) == 8100


@pytest.mark.long
def test_pass_rates_are_measured_before_and_after(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = load_example("studies/pass_at_k")
    monkeypatch.setattr(study, "TEST_PROMPTS", 5)
    monkeypatch.setattr(study, "K", (1, 2))
    monkeypatch.setattr(study, "LORA", None)
    short_sums = [{"prompt": f"{number} + 1 =", "sum": number + 1} for number in range(50)]
    monkeypatch.setattr(study, "sums", lambda: short_sums)
    options = ["--seeds", "1", "--model", "embedded", "--total-steps", "40"]
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["pass_at_k.py", *options])
        study.main()
    runs = [json.loads(line) for line in (tmp_path / "runs" / "pass_at_k.jsonl").read_text().splitlines()]
    assert [run["seed"] for run in runs] == [0, 1] and len(runs[1]["training"]) > 0
    assert {len(values) for run in runs for values in run["values"].values()} == {5}
    monkeypatch.setattr("sys.argv", ["pass_at_k.py", *options, "--table"])
    capsys.readouterr()
    study.main()
    before = runs[0]["values"]["pass@2"]
    assert f"| pass@2 | {sum(before) / 5:.3f} [" in capsys.readouterr().out
