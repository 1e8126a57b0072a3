"""The comparison study: its statistics against numbers worked out by hand, and a small one from end to end."""

import csv
import io
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from algos import presets
from algos.config import PPOConfig
from algos.lab.comparison.compare import compare, parse_cases, train_all
from algos.lab.comparison.report import summaries_table, write_report
from algos.lab.comparison.runs import read_runs
from algos.lab.comparison.summary import Case, by_case, case_name, normalise, summary
from algos.lab.comparison.words import in_words
from algos.statistics.intervals import bootstrap_interval, interquartile_mean
from algos.training.signals import Interrupted
from tests.helpers.compared import NamedPPO, OnlyGood, short_cartpole
from tests.helpers.finished_runs import run_of
from tests.helpers.warm_start import run_program

ROOT = Path(__file__).parents[4]


def test_the_interquartile_mean_omits_end_quarters():
    assert interquartile_mean(np.array([9.0, 1.0, 5.0, 7.0])) == 6  # 5 and 7 stay
    assert interquartile_mean(np.array([0.0, 10.0, 20.0, 30.0, 1000.0])) == 20  # a quarter of five is one
    assert interquartile_mean(np.array([3.0])) == 3
    columns = np.array([[1.0, 0.0], [2.0, 0.0], [3.0, 8.0], [4.0, 8.0]])
    assert interquartile_mean(columns, axis=0).tolist() == [2.5, 4]


def test_the_interquartile_mean_of_nan_is_nan():
    """Sorted, NaN comes last: it was omitted with the best quarter."""
    diverged = np.array([[0.9, 0.9, 0.9, 0.9, math.nan], [0.0, 1.0, 2.0, 3.0, 100.0]])
    np.testing.assert_array_equal(interquartile_mean(diverged), [math.nan, 2.0])
    assert math.isnan(interquartile_mean(diverged[0]))


def test_the_bootstrap_of_a_mean_agrees_with_theory():
    x = np.random.default_rng(3).normal(2.0, 1.0, size=400)
    low, high = bootstrap_interval(x)
    # For a mean of many numbers: 1.96 standard errors to either side.
    reach = 1.96 * x.std() / math.sqrt(len(x))
    assert low == pytest.approx(x.mean() - reach, abs=0.01) and high == pytest.approx(x.mean() + reach, abs=0.01)
    assert [float(end) for end in bootstrap_interval(np.array([4.0]))] == [4, 4]
    low, high = bootstrap_interval(np.array([[0.0, 5.0], [1.0, 5.0]]))
    assert low.tolist() == [0, 5] and high.tolist() == [1, 5]


def test_the_bootstrap_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        low, high = bootstrap_interval(rng.normal(size=30), seed=trial)
        covered += low <= 0 <= high
    assert 0.88 < covered / 200 < 0.99


def test_scores_run_from_0_untrained_to_1_solved():
    runs = [
        run_of(1, returns=[2.0], after=8.0, before=1.0),
        run_of(2, returns=[2.0], after=5.0, before=3.0),
    ]
    score = normalise(runs)  # 0 is 2, 1 is 10
    assert score(2.0) == 0 and score(10.0) == 1 and score(4.0) == 0.25
    for run in runs:
        run.best = None
    assert normalise(runs)(8.0) == 1


def test_without_a_threshold_algorithms_share_a_scale():
    good, poor = (run_of(1, returns=[after], after=after, best=None) for after in (8.0, 2.0))
    poor.algorithm = "a2c"
    elsewhere = run_of(1, returns=[0.0], after=50.0, best=None)
    elsewhere.env = "Other-v0"
    study = [good, poor, elsewhere]
    assert summary([poor], study=study)["normalised score"].mean == 0.25
    assert summary([good], study=study)["normalised score"].mean == 1


@pytest.mark.parametrize("order", [1, -1])
def test_a_return_of_nan_leaves_the_scale_of_the_others(order, tmp_path):
    """The best of the evaluations is 8, whichever run comes first."""
    runs = [run_of(seed, returns=[1.0], after=after, best=None) for seed, after in enumerate((8.0, 4.0, math.nan))]
    runs[-1].algorithm = "a2c"
    runs = runs[::order]
    assert normalise(runs)(4.0) == 0.5
    *_, pair = in_words(runs, {name: summary(of_case, study=runs) for name, of_case in by_case(runs).items()})
    assert pair.endswith("unknown, because a return after training is NaN.")
    write_report(tmp_path, runs)
    for run in runs:
        run.after = {"mean_return": math.nan}
    assert normalise(runs) is None


@pytest.mark.heavy
@pytest.mark.parametrize("best", [None, -20.0])
def test_runs_that_only_got_worse_have_no_score(tmp_path, best):
    """Divided by a negative distance, the worst would score highest."""

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


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [1, 4, 5])
def test_limits_need_five_seeds(seeds, tmp_path):
    from algos.lab.comparison.report import table_rows

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


def test_sample_efficiency_is_over_the_steps_that_all_cases_have():
    """The same curve for 200 and for 400 steps: a longer training is no more efficient."""
    short = run_of(1, returns=[0.0, 5.0], after=5.0)
    long = run_of(1, returns=[0.0, 5.0, 10.0, 10.0], after=10.0)
    longer_game = run_of(1, returns=[0.0, 10.0, 10.0, 10.0, 10.0], after=10.0)
    long.algorithm, longer_game.env = "a2c", "Other-v0"
    study = [short, long, longer_game]
    # Scores 0 up to 100 steps, then a line to .5 at 200: ½ · ½ · .5
    for run in (short, long):
        area = summary([run], study=study)["area under the curve"].mean
        assert area == pytest.approx(0.125, abs=3e-3)
    # Elsewhere up to 500: 0 up to 100, a line to 1 at 200, then 1
    area = summary([longer_game], study=study)["area under the curve"].mean
    assert area == pytest.approx((0 + 0.5 + 3) / 5, abs=3e-3)
    assert summary([long])["area under the curve"].mean == pytest.approx((0 + 0.25 + 0.75 + 1) / 4, abs=3e-3)


def test_a_score_never_reached_is_not_averaged():
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


def test_a_case_names_its_policy():
    parsed = parse_cases(["CartPole-v1:ppo,a2c:mlp,lstm", "gymnasium:Acrobot-v1:ppo:lstm", "gymnasium:Acrobot-v1:a2c"])
    assert parsed == [
        *(Case("CartPole-v1", algorithm, policy) for algorithm in ("ppo", "a2c") for policy in ("mlp", "lstm")),
        Case("gymnasium:Acrobot-v1", "ppo", "lstm"),
        Case("gymnasium:Acrobot-v1", "a2c"),
    ]
    assert [str(case) for case in parsed[1:3]] == ["CartPole-v1:ppo:lstm", "CartPole-v1:a2c:mlp"]
    assert parsed[4].env_id == "Acrobot-v1" and str(parsed[4]) == "gymnasium:Acrobot-v1:ppo:lstm"
    assert parsed[1].recipe == replace(presets.RECURRENT, env="CartPole-v1")
    # A recipe's own policy needs no name, and so the runs of earlier versions keep their folders
    for case in [
        *parse_cases("Pendulum-v1:sac,td3"),
        *parse_cases("Pendulum-v1:sac:sac"),
    ]:  # both
        assert case.algorithm_name in ("sac", "td3") and case.env_id == "Pendulum-v1"
    cases = parse_cases(["CartPole-v1:dqn:q", "Pendulum-v1:ppo:gsde", "CartPole-v1:ppo:auto"])
    assert [str(case) for case in cases] == ["CartPole-v1:dqn", "Pendulum-v1:ppo", "CartPole-v1:ppo"]


def test_a_case_is_named_without_an_environment():
    made = []
    gymnasium.register("Dear-v0", lambda: made.append("made"))
    try:
        assert case_name("Dear-v0", "ppo", "lstm") == "Dear-v0:ppo:lstm"
        assert case_name("Dear-v0", "dqn", "q") == case_name("Dear-v0", "dqn", "auto") == "Dear-v0:dqn"
    finally:
        del gymnasium.registry["Dear-v0"]
    assert made == []


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("CartPole-v1:lstm", "write CartPole-v1:ppo:lstm"),
        ("gymnasium:CartPole-v1:lstm", "write gymnasium:CartPole-v1:ppo:lstm"),
        ("CartPole-v1:ppo:foo", "policy is 'foo', expected one of auto, mlp"),
        ("CartPole-v1:ppo:a2c", "policy is 'a2c', expected one of auto, mlp"),
        ("CartPole-v1:foo:lstm", "algorithm is 'foo', expected one of ppo"),
        ("CartPole-v1:ppo:mlp:a2c", "expected ENV, ENV:ALGO,ALGO or"),
        ("a:b:CartPole-v1:ppo:mlp", "expected ENV, ENV:ALGO,ALGO or"),
        ("textenv/Copy-v0:dqn:mlp", "dqn is not for text"),
    ],
)
def test_a_wrong_case_says_how_to_write_it(text, advice):
    with pytest.raises(ValueError, match=advice):
        parse_cases(text)


def test_a_finished_run_says_its_policy_beside_others():
    runs = [run_of(seed, returns=[1.0], after=1.0) for seed in (1, 2)]
    for run, policy in zip(runs, ("", ":lstm"), strict=True):
        run.name = f"my:Some-v0:ppo{policy}"
    assert [run.line for run in runs] == ["ppo", "ppo:lstm"] and len(by_case(runs)) == 2


def test_a_case_is_a_recipe_and_a_name():
    recipe = presets.recipe("Acrobot-v1")
    assert Case(recipe=recipe) == Case("Acrobot-v1") and str(Case(recipe=recipe)) == "Acrobot-v1:ppo"
    assert Case(recipe=recipe, num_envs=3, name="three").recipe == replace(recipe, num_envs=3)
    assert {Case("Acrobot-v1"): 1}[Case(recipe=recipe)] == 1
    assert replace(Case(recipe=recipe), total_steps=7).recipe.total_steps == 7
    with pytest.raises(AttributeError, match="Case.config is now Case.recipe.config"):
        _ = Case("Acrobot-v1").config


@pytest.mark.parametrize("options", [{}, {"env": "Acrobot-v1"}, {"algorithm": "a2c"}])
def test_a_case_has_either_an_environment_or_a_recipe(options):
    recipe = presets.recipe("Acrobot-v1") if options else None
    with pytest.raises(TypeError, match="either an environment .* or a recipe"):
        Case(**options, recipe=recipe)


def no_wrapper(env):
    return env


@pytest.mark.long
def test_what_is_wrapped_keeps_its_presets_arguments(tmp_path):
    options = {"total_steps": 64, "processes": 0, "quiet": True, "wrappers": [no_wrapper]}
    compare("CliffWalking-v1", seeds=1, run_dir=tmp_path, **options)
    (record,) = tmp_path.glob("*/comparison.json")
    arguments = json.loads(record.read_text())["settings"]["env_kwargs"]
    assert arguments == {
        "max_episode_steps": 200,
        "wrappers": [{"import": "tests.algos.lab.comparison.test_compare:no_wrapper"}],
    }


def test_a_study_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="seeds is 0, expected at least 1"):
        train_all([Case("CartPole-v1")], run_dir=tmp_path, seeds=0)


@pytest.mark.parametrize("total_steps", [0, True, 64.5, "64"])
def test_a_length_that_is_no_integer_is_refused(tmp_path, total_steps):
    """By a comparison and by a training of its own, in the same words; True trained for one iteration."""
    expected = f"total_steps is {total_steps!r}, expected an integer of at least 1"
    with pytest.raises(ValueError, match=expected):
        train_all([Case("CartPole-v1")], run_dir=tmp_path, seeds=1, total_steps=total_steps)
    with pytest.raises(ValueError, match=expected):
        train_all([Case("CartPole-v1", total_steps=total_steps)], run_dir=tmp_path, seeds=1)
    with pytest.raises(ValueError, match=expected):
        Case("CartPole-v1").recipe.build(seed=1).learn(total_steps)
    assert not list(tmp_path.iterdir())


@pytest.mark.heavy
def test_a_small_study_from_end_to_end(tmp_path):
    result = compare(["CartPole-v1:ppo,a2c,dqn"], seeds=2, total_steps=200, run_dir=tmp_path, processes=0, quiet=True)
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


@pytest.mark.heavy
def test_a_page_shows_markup_as_text(tmp_path):

    run = run_of(1, returns=[0.0, 5.0], after=5.0)
    run.env, run.samples = "<b>bold</b>", [("<script>x</script>", "a", "b")]
    page = write_report(tmp_path, [run]).read_text()
    assert "<script>x" not in page and "&lt;script&gt;x" in page and "<b>" not in page and "&lt;b&gt;bold" in page


SMALL = PPOConfig(num_steps=16, minibatch_size=32, num_epochs=1)


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


BRIEF = {"max_episode_steps": 20}
"""Arguments of an environment: each run is evaluated twice, by 20 episodes."""


def lambdas(*values, env="CartPole-v1", **options):
    options |= dict(num_envs=2, total_steps=64, env_kwargs=BRIEF)
    return [Case(env, config=replace(SMALL, gae_lambda=x), name=f"λ = {x}", **options) for x in values]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two named cases of PPO on two environments, which share the names."""
    folder = tmp_path_factory.mktemp("study")
    cases = [*lambdas(0.9, 0.5), *lambdas(0.9, 0.5, env="Acrobot-v1")]
    return folder, compare(cases, seeds=[7, 3], run_dir=folder, processes=0, quiet=True)


@pytest.mark.heavy
def test_the_files_name_the_cases(study):
    folder, _ = study
    for name in ("curves.csv", "summary.csv"):
        rows = rows_of(folder / name)
        assert {(row["environment"], row["case"]) for row in rows} == {
            (env, f"{name}, {env}") for env in ("CartPole-v1", "Acrobot-v1") for name in ("λ = 0.9", "λ = 0.5")
        }
    assert {row["seed"] for row in rows_of(folder / "curves.csv")} == {"3", "7"}


@pytest.mark.heavy
def test_environments_share_names_of_cases(study):
    folder, report = study
    assert {"λ = 0.9, CartPole-v1", "λ = 0.5, Acrobot-v1"} < report.keys()
    page = (folder / "report.html").read_text()
    assert "λ = 0.9, Acrobot-v1" in page
    # A figure for a paper has both environments of a name together: none of them has a scale after 64 steps.
    runs = read_runs([folder])
    assert len(runs) == 8 and {run.line for run in runs} == {"λ = 0.9", "λ = 0.5"}


def test_a_report_is_printed_as_a_table(study, monkeypatch):
    _, report = study
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = str(report).splitlines()
    assert sum(line.count("λ = 0.9, CartPole-v1") for line in lines) == 1
    assert not isinstance(report["report"], dict) and json.loads(json.dumps(report)).keys() == report.keys()


def test_a_table_in_a_file_is_as_wide_as_its_contents(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    runs = [run_of(seed, returns=[0.0, 5.0], after=5.0 + seed, **{"reference/kl": [0.1, 0.2]}) for seed in (1, 2)]
    name = "a case whose name is long enough to need more than the eighty characters of a narrow terminal"
    with redirect_stdout(io.StringIO()) as file:
        print(summaries_table({name: summary(runs)}))
    assert name in file.getvalue() and "normalised score" in file.getvalue()


@pytest.mark.heavy
def test_finished_runs_are_kept_and_others_are_refused(tmp_path):
    def trained(cases, **options):
        return train_all(cases, run_dir=tmp_path, processes=0, quiet=True, **options)

    (first,) = trained(lambdas(0.9), seeds=1)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.jsonl")}
    again, second = trained(lambdas(0.9), seeds=2)
    assert (again, second.seed) == (first, 2) and {path: path.stat().st_mtime_ns for path in files} == files
    other = replace(lambdas(0.9)[0], config=replace(SMALL, gae_lambda=0.9, gamma=0.5))
    with pytest.raises(FileExistsError, match=r"other settings \(config.gamma: None, not 0.5\)"):
        trained([other], seeds=1)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    (replaced,) = trained([other], seeds=1, overwrite=True)
    assert replaced.history[0]["value/loss"] != first.history[0]["value/loss"]


@pytest.mark.long
def test_a_second_call_adds_seeds_and_cases(tmp_path):
    def compared(cases, **options):
        return compare(cases, run_dir=tmp_path, processes=0, quiet=True, **options)

    first = compared(lambdas(0.9), seeds=[1, 5])
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-[15]/metrics.jsonl")}
    assert len(files) == 2
    more = compared(lambdas(0.9, 0.5), seeds=2)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert more.keys() > {"λ = 0.9", "λ = 0.5"}
    # Another seed of the same case stays in the report; of another config it does not
    rows = {(row["case"], row["seed"]) for row in rows_of(tmp_path / "curves.csv")}
    assert rows == {("λ = 0.5", "1"), ("λ = 0.5", "2"), ("λ = 0.9", "1"), ("λ = 0.9", "2"), ("λ = 0.9", "5")}
    other = replace(lambdas(0.9)[0], config=replace(SMALL, gae_lambda=0.9, gamma=0.5))
    replaced = compared([other], seeds=1, overwrite=True)
    assert {row["seed"] for row in rows_of(tmp_path / "curves.csv") if row["case"] == "λ = 0.9"} == {"1"}
    assert replaced["λ = 0.9"]["steps"] == first["λ = 0.9"]["steps"]


def test_a_folder_of_another_run_is_refused_and_stays(tmp_path):
    (tmp_path / "CartPole-v1-ppo-1").mkdir()
    (tmp_path / "CartPole-v1-ppo-1" / "metrics.jsonl").write_text('{"steps": 1}\n')
    with pytest.raises(FileExistsError, match="not one of compare"):
        compare("CartPole-v1", seeds=1, run_dir=tmp_path, processes=0, quiet=True)
    assert (tmp_path / "CartPole-v1-ppo-1" / "metrics.jsonl").read_text() == '{"steps": 1}\n'


@pytest.mark.long
@pytest.mark.bits
def test_an_interrupted_comparison_ends_as_without(tmp_path):
    """Killed in the middle of its second run of three: then bits as without, and the first run is not repeated."""
    options = dict(seeds=3, total_steps=800, processes=0, quiet=True)
    case = Case("CartPole-v1", "a2c", num_envs=4, env_kwargs=BRIEF)
    whole = compare(case, run_dir=tmp_path / "whole", **options)
    program = (
        "import os, algos\n"
        f"case = algos.Case('CartPole-v1', 'a2c', num_envs=4, env_kwargs={BRIEF})\n"
        f"options = {options!r} | dict(run_dir={str(tmp_path / 'cut')!r})\n"
        "from algos.lab.comparison import one_run as module\n"
        "report = module.update_kl\n"
        "def stop(agent, rollout):\n"
        "    if agent.config.seed == 2 and agent.progress > 0.5: os._exit(9)\n"
        "    return report(agent, rollout)\n"
        "module.update_kl = stop\n"
        "algos.compare(case, **options)\n"
    )
    done = run_program(program)
    assert done.returncode == 9, done.stderr
    (first,) = (tmp_path / "cut").glob("*-1/metrics.jsonl")
    written = first.stat().st_mtime_ns
    assert list((tmp_path / "cut").glob("*-2/checkpoints/step-*")) and not list((tmp_path / "cut").glob("*-3"))
    cut = compare(case, run_dir=tmp_path / "cut", **options)
    assert first.stat().st_mtime_ns == written
    for name in ("mean_return", "return before", "last return", "update/kl", "steps"):
        assert cut["CartPole-v1:a2c"][name] == whole["CartPole-v1:a2c"][name], name


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_an_error_names_the_signal_that_stopped_it(name, tmp_path):
    sent = []

    class Stops(gymnasium.Wrapper):
        def step(self, action):
            if not sent and list(tmp_path.glob("*-1/metrics.jsonl")):  # after the first iteration
                sent.append(name)  # once: the second would end the process
                os.kill(os.getpid(), getattr(signal, name))
            return super().step(action)

    options = dict(seeds=2, total_steps=10_000, processes=0, quiet=True)
    with pytest.raises(Interrupted, match="0 of 2 runs have finished") as stopped:
        compare("CartPole-v1", run_dir=tmp_path, wrappers=[Stops], **options)
    assert stopped.value.name == name


UNENDING = dict(total_steps=10**8, quiet=True)
"""Of a comparison that only a signal ends."""


def wait_for_checkpoints(run_dir, number):
    """Wait until so many runs have one: all workers train."""
    end = time.monotonic() + 120
    while len([*run_dir.glob("*/checkpoints/step-*")]) < number and time.monotonic() < end:
        time.sleep(0.1)


@contextmanager
def comparison_in_a_process(tmp_path, *, processes):
    """Folder, and process, of a comparison of twice as many runs as it has workers, as soon as they train."""
    run_dir = tmp_path / "runs"
    program = (
        "import algos\n"
        "if __name__ == '__main__':\n"
        f"    options = dict(run_dir={str(run_dir)!r}, seeds={2 * processes}, processes={processes}, **{UNENDING})\n"
        "    algos.compare('CartPole-v1', **options)\n"
    )
    (tmp_path / "program.py").write_text(program)
    options = dict(cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    with subprocess.Popen([sys.executable, "program.py"], start_new_session=True, **options) as process:
        try:
            wait_for_checkpoints(run_dir, processes)
            yield run_dir, process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_signal_to_a_comparison_reaches_workers(tmp_path):
    """They went on with all jobs that waited for them, after it had gone."""
    with comparison_in_a_process(tmp_path, processes=2) as (run_dir, process):
        process.terminate()
        _, error = process.communicate(timeout=120)  # which waits for all that write there
    assert process.returncode != 0
    assert "stopped: 0 of 4 runs have finished; the same command goes on" in error
    assert len([*run_dir.glob("*")]) == 2, "a job that waited was begun"


@pytest.mark.long
def test_workers_end_with_a_comparison_that_is_killed(tmp_path):
    with comparison_in_a_process(tmp_path, processes=1) as (run_dir, process):
        before = {path.name for path in run_dir.glob("*/checkpoints/step-*")}
        process.kill()
        process.communicate(timeout=120)  # until all that write there have ended
    after = {path.name for path in run_dir.glob("*/checkpoints/step-*")}
    assert len(after - before) >= 1, "the worker wrote no checkpoint"
    assert len([*run_dir.glob("*")]) == 1, "a job that waited was begun"


def compare_until(kill, run_dir):
    """Compare four runs in two processes; as soon as both train, a thread kills what it is given: a list of them."""
    others = multiprocessing.active_children()

    def wait_and_kill():
        wait_for_checkpoints(run_dir, 2)
        kill([child for child in multiprocessing.active_children() if child not in others])

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    try:
        compare("CartPole-v1", run_dir=run_dir, seeds=4, processes=2, **UNENDING)
    finally:
        thread.join()
        assert not {*multiprocessing.active_children()} - {*others}, "a worker goes on"


@pytest.mark.long
def test_ctrl_c_reaches_workers(tmp_path):
    """They went on with all jobs that waited for them, with the comparison waiting."""
    with pytest.raises(Interrupted, match="stopped: 0 of 4 runs have finished; the same command goes on") as stopped:
        compare_until(lambda workers: os.kill(os.getpid(), signal.SIGINT), tmp_path)
    assert stopped.value.name == "SIGINT"
    assert len([*tmp_path.glob("*")]) == 2, "a job that waited was begun"


@pytest.mark.long
def test_a_killed_worker_ends_it_in_a_sentence(tmp_path):
    with pytest.raises(ChildProcessError, match="a process of the comparison was killed, perhaps for want") as error:
        compare_until(lambda workers: workers[0].kill(), tmp_path)
    assert "0 of 4 runs have finished; the same command goes on" in error.value.__notes__[-1]


def test_an_algorithm_is_a_class_too(tmp_path):
    (run,) = train_all(
        [Case("CartPole-v1", OnlyGood, num_envs=2, total_steps=64)], run_dir=tmp_path, seeds=1, processes=0, quiet=True
    )
    assert (run.case, run.line, type(run.history[0]["value/loss"])) == ("CartPole-v1:OnlyGood", "OnlyGood", float)
    assert Case("CartPole-v1", NamedPPO).recipe.config == Case("CartPole-v1", "ppo").recipe.config
    with pytest.raises(TypeError, match="expected one of ppo.* or a class that inherits algos.Agent"):
        Case("CartPole-v1", dict)


@pytest.mark.long
def test_other_processes_import_own_algorithms(tmp_path):
    cases = [
        Case("CartPole-v1", OnlyGood, num_envs=2, total_steps=64),
        Case(short_cartpole, NamedPPO, config=SMALL, num_envs=2, total_steps=64),
    ]
    report = compare(cases, seeds=1, run_dir=tmp_path, processes=1, quiet=True)
    assert {"CartPole-v1:OnlyGood", "short_cartpole:NamedPPO"} < report.keys()
    assert {row["algorithm"] for row in rows_of(tmp_path / "curves.csv")} == {"OnlyGood", "NamedPPO"}


@pytest.mark.heavy
def test_pass_rates_before_and_after_are_in_all_tables(tmp_path, monkeypatch):
    options = dict(seeds=1, run_dir=tmp_path, processes=0, quiet=True, total_steps=200, num_prompts=5)
    case = Case("textenv/Periods-v0", config=PPOConfig(num_steps=None, num_episodes=8, minibatch_size=8))
    report = compare(case, k=(1, 3), success=0.25, **options)
    metrics = report["textenv/Periods-v0:ppo"]
    assert 0 < metrics["pass@1 before"] <= metrics["pass@3 before"] <= 1 and metrics["pass@1"] <= metrics["pass@3"]
    for width in ("80", "160"):
        monkeypatch.setenv("COLUMNS", width)
        assert "pass@3" in str(report)
    assert {"pass@3 before", "pass@3", "maj@3", "greedy"} <= {
        row["quantity"] for row in rows_of(tmp_path / "summary.csv")
    }
    page = (tmp_path / "report.html").read_text()
    assert "pass@3 before training" in page and "pass@3 after training" in page

    # A run with other samples is another one
    with pytest.raises(FileExistsError, match=r"sampling.k: \[1, 3\], not \[1\]"):
        compare(case, k=1, success=0.25, **options)
    assert compare(case, k=(3, 1), success=0.25, **options)["textenv/Periods-v0:ppo"] == metrics


@pytest.mark.heavy
def test_pass_rates_that_cannot_be_are_refused_before_training(tmp_path):
    options = dict(seeds=1, run_dir=tmp_path / "study", processes=0, quiet=True)
    with pytest.raises(ValueError, match="is a control environment, which has no prompts"):
        compare("CartPole-v1", k=2, **options)
    with pytest.raises(ValueError, match="by is 'level', expected a column of the prompts, which have none"):
        compare("textenv/Periods-v0:ppo", k=2, by="level", **options)
    with pytest.raises(ValueError, match="its functions cannot be sent to other processes"):
        compare("textenv/Periods-v0:ppo", k=2, answer=lambda text: text, **(options | {"processes": 1}))
    assert not list((tmp_path / "study").glob("*"))


def test_an_unimportable_class_is_said_before_training(tmp_path):
    case = Case(lambda num_envs: short_cartpole(num_envs), config=SMALL, total_steps=64)
    with pytest.raises(ValueError, match="give processes=0, or define them in a file"):
        compare(case, seeds=1, run_dir=tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seeds", [[], [1, 1], [-1], "12", 1.5, True, None, [1.0]])
def test_seeds_are_a_number_or_a_list(tmp_path, seeds):
    with pytest.raises(ValueError, match=r"number of runs of each case, or a list of different seeds"):
        compare("CartPole-v1", seeds=seeds, run_dir=tmp_path, quiet=True)


@pytest.mark.heavy
def test_a_running_comparison_is_read_by_its_names(tmp_path):
    compare(lambdas(0.9), seeds=1, run_dir=tmp_path, processes=0, quiet=True)
    (tmp_path / "report.json").unlink()
    (record,) = tmp_path.glob("*/comparison.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"result": None}))
    (record.parent / "config.json").unlink()
    (run,) = read_runs([tmp_path])
    assert (run.case, run.env, run.algorithm, run.seed, run.line) == ("λ = 0.9", "CartPole-v1", "ppo", 1, "λ = 0.9")
    record.write_text('{"name": 3}')
    with pytest.raises(ValueError, match="damaged"):
        read_runs([tmp_path])


def test_reports_of_version_0_9_are_read(tmp_path):
    rows = []
    for name in ("PPO (zoo)", "Some-v0:ppo"):
        run = run_of(1, returns=[0.0], after=5.0)
        row = vars(run) | {"name": name, "folder": f"/moved/{name}-1"}
        del row["label"]
        rows.append(row)
        (tmp_path / f"{name}-1").mkdir()
    (tmp_path / "report.json").write_text(json.dumps(rows))
    runs = read_runs([tmp_path])
    assert [run.line for run in runs] == ["PPO (zoo)", "ppo"]
    assert [run.folder for run in runs] == [str(tmp_path / "PPO (zoo)-1"), str(tmp_path / "Some-v0:ppo-1")]
