"""Figure and table for a paper, beside numbers of the package rliable 1.2.0 (Agarwal et al. 2021) and by hand."""

import csv

import numpy as np
import pytest

from algos.lab.comparison import paper
from algos.lab.comparison.report import write_report
from algos.lab.comparison.summary import RunResult


def columns(matrix):
    """``[seeds, environments]`` by environment."""
    return {str(i): matrix[:, i] for i in range(matrix.shape[1])}


def two(seeds=7):
    rng = np.random.default_rng(3)
    first, second = rng.normal(0.6, 0.25, (seeds, 3)), rng.normal(0.5, 0.25, (seeds, 3))
    second[0, 0] = first[1, 0]  # a tie
    return columns(first), columns(second)


def test_the_figures_are_those_of_rliable():
    """Its point estimates to the last digit, its intervals (other random numbers, 4,000 resamples) to .02."""
    x, y = two()
    assert paper.everywhere(x) == pytest.approx(0.5390687003173796, abs=1e-12)
    assert paper.probability_of_improvement(x, y) == pytest.approx(0.520408163265306, abs=1e-12)
    np.testing.assert_allclose(paper.interval(paper.everywhere, x), [0.47179, 0.61579], atol=0.02)
    np.testing.assert_allclose(paper.interval(paper.probability_of_improvement, x, y), [0.35374, 0.69048], atol=0.02)


def test_by_hand():
    x, y = {"a": np.array([0.0, 1.0]), "b": np.array([2.0])}, {"a": np.array([1.0, 0.5]), "c": np.array([9.0])}
    assert paper.probability_of_improvement(x, y) == (0 + 0 + 0.5 + 1) / 4  # on a alone
    profile = dict(zip(paper.TAUS.round(2), paper.profile(x), strict=True))
    assert [profile[tau] for tau in (0.0, 0.5, 1.0)] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert paper.interval(paper.everywhere, x) is None


def test_a_score_that_is_nan_is_nobodys_win_or_loss():
    x = {"a": np.array([0.9, np.nan]), "b": np.array([2.0, 2.0])}
    better = {"a": np.array([1.0, 1.0]), "b": np.array([1.0, 1.0])}
    for first, second in ((x, better), (better, x)):
        assert np.isnan(paper.probability_of_improvement(first, second))
    assert paper.probability_of_improvement({"b": x["b"]}, better) == 1
    rows = paper.paper_rows({"x": x, "better": better})
    assert [np.isnan(row.value) for row in rows] == [True, False, True]


def test_seeds_are_drawn_in_each_environment_by_itself():
    """Environments of constant scores: pooled resampling would give the mean a spread."""
    scores = {"easy": np.ones(6), "hard": np.zeros(6)}
    low, high = paper.interval(lambda drawn: np.concatenate([*drawn.values()], axis=-1).mean(-1), scores)
    assert low == high == 0.5


def results(seeds, algorithms=("ppo", "a2c")):
    rng = np.random.default_rng(0)
    return [
        RunResult(
            env, algorithm, seed, "MLPPolicy", 10, 100.0, {"mean_return": 0.0}, {"mean_return": score}, [{"steps": 1}]
        )
        for env in ("One-v0", "Two-v0")
        for algorithm in algorithms
        for seed, score in enumerate(rng.uniform(50, 100, seeds))
    ]


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [2, 5])
def test_what_is_written(tmp_path, seeds):
    write_report(tmp_path, results(seeds))
    with (tmp_path / "paper.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["quantity"], row["algorithm"], row["over"]) for row in rows] == [
        ("interquartile mean", "ppo", ""), ("interquartile mean", "a2c", ""),
        ("probability of improvement", "ppo", "a2c"),
    ]  # fmt: skip
    assert all(bool(row["low"]) == (seeds >= 5) for row in rows)
    pdf = (tmp_path / "paper.pdf").read_bytes()
    assert "toprule" in (tmp_path / "paper.tex").read_text() and pdf[:4] == b"%PDF" and b"/Type3" not in pdf
    assert "<svg" in (tmp_path / "paper.svg").read_text()


def test_named_cases_and_environments_without_a_scale(tmp_path):
    runs = results(2, ["ppo"])
    runs[0].name = runs[1].name = "large batches"
    assert paper.scores_by_algorithm(runs).keys() == {"large batches (One-v0)", "ppo (Two-v0)"}
    for run in runs:
        run.name, run.label = f"large batches, {run.env}", "large batches"
    assert paper.scores_by_algorithm(runs).keys() == {"large batches"}
    for run in runs:
        run.best = 0.0
    write_report(tmp_path, runs)
    assert not list(tmp_path.glob("paper.*"))


def test_algorithms_of_different_tasks_are_named_so(tmp_path):
    """And one alone has no empty panel."""
    runs = results(5)
    chosen = [run for run in runs if run.algorithm == "ppo" or run.env == runs[0].env]
    paper.write_paper(tmp_path, paper.scores_by_algorithm(chosen))
    with (tmp_path / "paper.csv").open(newline="") as file:
        names = {row["algorithm"] for row in csv.DictReader(file)}
    assert len(names) == 2 and all(runs[0].env in name for name in names)
    paper.write_paper(tmp_path, paper.scores_by_algorithm([run for run in runs if run.algorithm == "ppo"]))
    assert "improvement" not in (tmp_path / "paper.csv").read_text()
