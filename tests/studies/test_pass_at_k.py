"""Pass rates before and after training: the change by hand, and the script in miniature."""

import json

import pytest

from tests.helpers.models import load_example


@pytest.fixture
def study():
    return load_example("studies/pass_at_k")


def test_the_change_of_pass_rates_is_paired_by_prompt(study):
    before = {"pass@1": [0.0, 0.2, 0.4, 0.6, 0.8]}
    after = [{"pass@1": [0.1, 0.3, 0.5, 0.7, 0.9]}, {"pass@1": [0.3, 0.5, 0.7, 0.9, 1.1]}]
    columns, rows = study.table({study.UNTRAINED: before, 1: after[0], 2: after[1]})
    assert columns == ["", "untrained", "trained, mean of 2 (each seed)", "change"]
    # Each prompt changes by .2, so the limits of the change are equal
    assert rows == [["pass@1", rows[0][1], "0.600 (0.50, 0.70)", "+0.200 [+0.200, +0.200]"]]
    assert rows[0][1].startswith("0.400 [")


def test_the_first_number_is_the_answer(study):
    assert study.is_right([" 46.", "46 or 7", "forty-six", "-46"], [46, 46, 46, 46]) == [1, 1, 0, 0]


def test_every_sum_of_two_digits_is_there_once(study):
    rows = study.sums()
    texts = {row["prompt"] for row in rows}
    assert len(texts) == len(rows) == 90 * 90
    # 90 numbers with the mean 54.5, each 90 times in each of two places
    assert sum(row["sum"] for row in rows) == 2 * 90 * 90 * 54.5
    (row,) = [row for row in rows if " 17 + 25 =" in row["prompt"]]
    assert row["sum"] == 42


def test_the_first_lines_are_of_the_published_length(study, call, tmp_path):
    """They have neither the model nor the number of steps."""
    (tmp_path / "runs").mkdir()
    lines = [
        '{"seed": 0, "training": [], "values": {"pass@1": [0, 1, 0, 1, 0]}, "seconds": 1}',
        '{"seed": 1, "training": [], "values": {"pass@1": [1, 1, 1, 1, 1]}, "seconds": 1}',
        '{"seed": 1, "model": "smollm2", "total_steps": 9, "training": [], "values": {"pass@1": [0]}}',
    ]
    (tmp_path / "runs" / "pass_at_k.jsonl").write_text("\n".join(lines) + "\n")
    assert study.values_by_seed(model="smollm2", total_steps=9) == {1: {"pass@1": [0]}}
    assert "| trained, mean of 1 (each seed) |" in call(study, "--table")
    assert "| 1.000 (1.00) | +0.600 [" in call(study, "--table")


def test_without_the_untrained_model_there_is_no_table(study, call, capsys):
    with pytest.raises(SystemExit):
        call(study, "--table")
    assert "no untrained smollm2 with 4000 steps: run it first" in capsys.readouterr().err


@pytest.mark.long
def test_pass_rates_are_measured_before_and_after(study, call, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "TEST_PROMPTS", 5)
    monkeypatch.setattr(study, "K", (1, 2))
    monkeypatch.setattr(study, "LORA", None)
    short_sums = [{"prompt": f"{number} + 1 =", "sum": number + 1} for number in range(50)]
    monkeypatch.setattr(study, "sums", lambda: short_sums)
    options = ["--seeds", "1", "--model", "embedded", "--total-steps", "40"]
    for _ in range(2):
        call(study, *options)
    runs = [json.loads(line) for line in (tmp_path / "runs" / "pass_at_k.jsonl").read_text().splitlines()]
    assert [(run["seed"], run["model"], run["total_steps"]) for run in runs] == [
        (0, "embedded", 40),
        (1, "embedded", 40),
    ]
    assert runs[0]["training"] == [] and len(runs[1]["training"]) > 0
    assert {len(values) for run in runs for values in run["values"].values()} == {5}
    before = runs[0]["values"]["pass@2"]
    assert f"| pass@2 | {sum(before) / 5:.3f} [" in call(study, *options, "--table")
    call(study, *options, "--json", "pass-at-k.json")
    assert json.loads((tmp_path / "pass-at-k.json").read_text())["columns"][3] == "change"
