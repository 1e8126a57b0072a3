"""The comparison study: its statistics against numbers worked out by hand, and a small one from end to end."""

import csv
import math

import numpy as np
import pytest

from algos.comparison.compare import compare, parse_cases, train_all
from algos.comparison.summary import (
    Case,
    bootstrap_interval,
    interquartile_mean,
    normalise,
    summary,
)
from tests.helpers.finished_runs import run_of


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert interquartile_mean(np.array([9.0, 1.0, 5.0, 7.0])) == 6  # 5 and 7 stay
    assert interquartile_mean(np.array([0.0, 10.0, 20.0, 30.0, 1000.0])) == 20  # a quarter of five is one
    assert interquartile_mean(np.array([3.0])) == 3
    columns = np.array([[1.0, 0.0], [2.0, 0.0], [3.0, 8.0], [4.0, 8.0]])
    assert interquartile_mean(columns, axis=0).tolist() == [2.5, 4]


def test_the_bootstrap_of_a_mean_has_the_limits_that_theory_gives():
    x = np.random.default_rng(3).normal(2.0, 1.0, size=400)
    low, high = bootstrap_interval(x)
    # For a mean of many numbers: 1.96 standard errors to either side.
    reach = 1.96 * x.std() / math.sqrt(len(x))
    assert low == pytest.approx(x.mean() - reach, abs=0.01) and high == pytest.approx(x.mean() + reach, abs=0.01)
    assert [float(end) for end in bootstrap_interval(np.array([4.0]))] == [4, 4]
    low, high = bootstrap_interval(np.array([[0.0, 5.0], [1.0, 5.0]]))
    assert low.tolist() == [0, 5] and high.tolist() == [1, 5]


def test_the_bootstrap_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        low, high = bootstrap_interval(rng.normal(size=30), seed=trial)
        covered += low <= 0 <= high
    assert 0.88 < covered / 200 < 0.99


def test_scores_are_0_untrained_and_1_solved_or_best_seen():
    runs = [run_of(1, returns=[2.0], after=8.0, before=1.0), run_of(2, returns=[2.0], after=5.0, before=3.0)]
    score = normalise(runs)  # 0 is 2, 1 is 10
    assert score(2.0) == 0 and score(10.0) == 1 and score(4.0) == 0.25
    for run in runs:
        run.best = None
    assert normalise(runs)(8.0) == 1


def test_without_a_threshold_the_algorithms_of_an_environment_share_one_scale():
    good, poor = (run_of(1, returns=[after], after=after, best=None) for after in (8.0, 2.0))
    poor.algorithm = "a2c"
    elsewhere = run_of(1, returns=[0.0], after=50.0, best=None)
    elsewhere.env = "Other-v0"
    study = [good, poor, elsewhere]
    assert summary([poor], study=study)["normalised score"].mean == 0.25
    assert summary([good], study=study)["normalised score"].mean == 1


@pytest.mark.parametrize("best", [None, -20.0])
def test_runs_that_only_got_worse_have_no_score(tmp_path, best):
    """Divided by a negative distance, the worst would score highest."""
    from algos.comparison.report import write_report

    runs = [run_of(i, returns=[after], after=after, before=-10.0, best=best) for i, after in enumerate((-15.0, -30.0))]
    found = summary(runs)
    assert normalise(runs) is None and found["mean_return"].mean == -22.5
    assert not any("score" in name or "0.9" in name or "area" in name for name in found)
    write_report(tmp_path, runs)


def test_the_summary_of_two_runs_worked_out_by_hand():
    columns = {"update/kl": [0.1, 0.3, 0.2, 0.2]}
    runs = [
        run_of(1, returns=[0.0, 5.0, 9.0, 10.0], after=10.0, **columns),
        run_of(2, returns=[0.0, 0.0, 5.0, 9.5], after=9.0, **columns),
    ]
    found = summary(runs)
    assert found["mean_return"] == (9.5, None, None, (10.0, 9.0))
    assert found["normalised score"] == (0.95, None, None, (1.0, 0.9))
    assert found["steps to 0.9"] == (350, None, None, (300.0, 400.0)) and found["reached 0.9"].mean == 1
    assert found["update/kl"].values == pytest.approx((0.2, 0.2))
    assert found["seconds"].mean == 16 and found["time fraction: update"].mean == 0.75
    assert found["steps_per_second"].mean == 400 / 16
    assert "policy/clip_frac" not in found and "reference/kl" not in found
    # Scores 0, .5, .9 and 1 at the quarters, by lines between: (.25 + .7 + .95) / 4.
    assert found["area under the curve"].values[0] == pytest.approx(0.475, abs=1e-3)


@pytest.mark.parametrize("seeds", [1, 2, 4, 5])
def test_limits_are_given_from_five_seeds_on_and_single_values_below(seeds, tmp_path):
    from algos.comparison.report import table_rows, write_report

    runs = [run_of(seed, returns=[0.0, 5.0 + seed], after=5.0 + seed) for seed in range(seeds)]
    figure = summary(runs)["mean_return"]
    (cell,) = [row[1] for row in table_rows({"case": summary(runs)}) if row[0][0] == "return after training"]
    page = write_report(tmp_path, runs).read_text()
    if seeds < 5:
        assert figure.low is None and figure.high is None and figure.values == tuple(5.0 + s for s in range(seeds))
        assert cell[1] == ("" if seeds == 1 else ", ".join(f"{5 + s}" for s in range(seeds)))
        assert "bands are 95 % bootstrap" not in page
        assert ("each seed (5 give 95 % confidence intervals)" in page) == (seeds > 1)
    else:
        low, high = bootstrap_interval(np.array(figure.values))
        assert (figure.low, figure.high) == (low, high) and cell[1] == f"{low:.3g} to {high:.3g}"
        assert "95 % bootstrap confidence intervals" in page and "bands are 95 % bootstrap" in page


def test_a_score_that_was_never_reached_is_said_and_not_averaged():
    found = summary([run_of(1, returns=[0.0, 9.5], after=9.5), run_of(2, returns=[0.0, 1.0], after=1.0)])
    assert found["reached 0.9"].mean == 0.5 and "steps to 0.9" not in found


def test_cases_are_read_and_refused_in_words():
    assert parse_cases(["CartPole-v1", "textenv/Copy-v0:grpo,rloo"]) == [
        Case("CartPole-v1"), Case("textenv/Copy-v0", "grpo"), Case("textenv/Copy-v0", "rloo")
    ]  # fmt: skip
    for given, said in [
        (["CartPole-v1:foo"], "expected one of ppo"),
        (["textenv/Copy-v0:dqn"], "dqn is not for text"),
        (["NoSuch-v9"], "NoSuch"),
        (["CartPole-v1", "CartPole-v1:ppo"], "give each once"),
        ([], "none"),
    ]:
        with pytest.raises(ValueError, match=said):
            parse_cases(given)


@pytest.mark.parametrize("options", [{"seeds": 0}, {"seeds": 1, "total_steps": 0}])
def test_a_study_of_nothing_is_refused(tmp_path, options):
    with pytest.raises(ValueError, match="expected at least 1"):
        train_all([Case("CartPole-v1")], run_dir=tmp_path, **options)


def test_a_small_study_from_end_to_end(tmp_path):
    result = compare(["CartPole-v1:ppo,a2c,dqn"], seeds=2, total_steps=600, run_dir=tmp_path, processes=0, quiet=True)
    assert result["CartPole-v1:a2c"]["update/kl"] > 0 and "update/kl" not in result["CartPole-v1:dqn"]
    page = (tmp_path / "report.html").read_text()
    assert "CartPole-v1:dqn" in page
    with (tmp_path / "summary.csv").open(newline="") as file:
        rows = {(row["algorithm"], row["quantity"]): row for row in csv.DictReader(file)}
    scores = rows["ppo", "mean_return"]
    values = [float(word) for word in scores["values"].split()]
    assert scores["seeds"] == "2" and len(values) == 2 and float(scores["mean"]) == pytest.approx(np.mean(values))
    assert (scores["low"], scores["high"]) == ("", "") and "each seed (5 give 95 % confidence intervals)" in page
    with (tmp_path / "curves.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {(line["algorithm"], line["seed"]) for line in lines} == {
        (a, s) for a in ("ppo", "a2c", "dqn") for s in "12"
    }
    ppo = [line for line in lines if line["algorithm"] == "ppo"]
    assert all(line["update/kl"] and line["policy/entropy"] for line in ppo)


def test_a_page_shows_markup_as_text(tmp_path):
    from algos.comparison.report import write_report

    run = run_of(1, returns=[0.0, 5.0], after=5.0)
    run.env, run.samples = "<b>bold</b>", [("<script>x</script>", "a", "b")]
    page = write_report(tmp_path, [run]).read_text()
    assert "<script>x" not in page and "&lt;script&gt;x" in page and "<b>" not in page and "&lt;b&gt;bold" in page
