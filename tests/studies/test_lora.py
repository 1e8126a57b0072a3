"""Adapters beside all weights: the chosen rates and the tables by hand, and the script in miniature."""

import json

import pytest

from tests.helpers.models import load_example


@pytest.fixture
def study():
    return load_example("studies/lora")


@pytest.fixture
def results():
    """pass@1 by rank, rate and seed: rank 1 is best at 1e-4, all weights at two rates alike."""
    grid = {(1, 3e-5): 0.5, (1, 1e-4): 0.7, (1, 3e-4): 0.6, (8, 1e-4): 0.4, (64, 1e-4): 0.4}
    grid |= {(0, 3e-6): 0.2, (0, 1e-5): 0.8, (0, 3e-5): 0.8}
    return {(rank, rate, 0): value for (rank, rate), value in grid.items()} | {
        (1, 1e-4, 1): 0.60, (1, 1e-4, 2): 0.72, (8, 1e-4, 1): 0.5, (64, 1e-4, 1): 0.5,
        (0, 1e-5, 1): 0.9, (0, 3e-5, 1): 0.1,
    }  # fmt: skip


def test_the_rate_is_chosen_by_the_grid_alone(study, results):
    assert study.best_rate(1, results) == 1e-4
    # Of two that are equal, the lower
    assert study.best_rate(study.ALL_WEIGHTS, results) == 1e-5


def test_the_tables_by_hand(study, results):
    columns, rows = study.grid_table(results)
    assert columns == ["", "3e-06", "1e-05", "3e-05", "0.0001", "0.0003", "0.001"]
    assert rows[0] == ["rank 1", "", "", "0.500", "0.700", "0.600", ""]
    assert rows[3] == ["all weights", "0.200", "0.800", "0.800", "", "", ""]
    _, rows = study.best_table(results)
    assert rows[0] == ["rank 1", "0.0001", "0.660 (0.600, 0.720)"]
    assert rows[3] == ["all weights", "1e-05", "0.900 (0.900)"]


def test_the_best_rates_need_a_grid(study, call, capsys):
    for option in ("--best", "--table"):
        with pytest.raises(SystemExit):
            call(study, option)
        assert "no grid of rank 1, rank 8, rank 64, all weights" in capsys.readouterr().err


@pytest.mark.long
def test_adapters_and_all_weights_are_trained_and_evaluated(study, call, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "TEST_PROMPTS", 5)
    monkeypatch.setattr(study, "RANKS", (1, study.ALL_WEIGHTS))
    monkeypatch.setattr(study, "ADAPTER_RATES", (1e-3,))
    monkeypatch.setattr(study, "ALL_RATES", (1e-4,))
    monkeypatch.setattr(study, "SEEDS", (1,))
    short_sums = [{"prompt": f"{number} + 1 =", "sum": number + 1} for number in range(50)]
    monkeypatch.setattr(study, "sums", lambda: short_sums)
    options = ["--model", "embedded", "--total-steps", "40"]
    for _ in range(2):
        call(study, *options)
    call(study, *options, "--best")
    runs = [json.loads(line) for line in (tmp_path / "runs" / "lora.jsonl").read_text().splitlines()]
    assert [(run["rank"], run["rate"], run["seed"]) for run in runs] == [
        (1, 1e-3, 0), (0, 1e-4, 0), (1, 1e-3, 1), (0, 1e-4, 1),
    ]  # fmt: skip
    assert all(0 <= run["pass@1"] <= 1 and len(run["training"]) > 0 for run in runs)
    assert f"| rank 1 | 0.001 | {runs[2]['pass@1']:.3f} (" in call(study, *options, "--best", "--table")
    call(study, *options, "--json", "lora.json")
    assert json.loads((tmp_path / "lora.json").read_text())["columns"] == ["", "0.0001", "0.001"]
