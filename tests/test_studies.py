"""The programs of examples/studies run, and what they compute exactly is right."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from tests.helpers.models import EXAMPLES, load_example


def test_every_study_is_run_here():
    assert {path.stem for path in (EXAMPLES / "studies").glob("*.py")} == {"overoptimisation", "pass_at_k", "staleness"}


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


def best_by_enumeration(probability, score, value, n):
    """KL and mean value of the best of n draws, by every sequence of draws; of equal scores, each is as likely."""
    chance = np.zeros(len(probability))
    for draws in itertools.product(range(len(probability)), repeat=n):
        best = [answer for answer in draws if score[answer] == max(score[list(draws)])]
        for answer in best:
            chance[answer] += probability[list(draws)].prod() / len(best)
    positive = chance > 0
    return (chance[positive] * np.log(chance[positive] / probability[positive])).sum(), chance @ value


@pytest.mark.parametrize("score", [[2.0, 0.5, 1.0, 3.0], [1.0, 0.5, 1.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
def test_the_best_of_n_is_that_of_every_sequence_of_draws(score):
    study = load_example("studies/overoptimisation")
    probability = np.array([0.4, 0.3, 0.2, 0.1])
    value = np.array([1.0, -2.0, 0.5, 3.0])
    for n in (1, 2, 5):
        exact = best_by_enumeration(probability, np.array(score), value, n)
        assert study.best_of_n(probability, np.array(score), value, n) == pytest.approx(exact, abs=1e-12)


def test_the_kl_of_the_best_of_n_tends_to_its_formula_from_below():
    """Beirami et al. 2024: log n − (n−1)/n is an upper bound; it is the limit for many answers of distinct scores."""
    study = load_example("studies/overoptimisation")
    for n in (2, 16, 128):
        gaps = []
        for count in (100, 1_000, 100_000):
            kl, rank = study.best_of_n(np.full(count, 1 / count), np.arange(count), (np.arange(count) + 1) / count, n)
            gaps.append(study.best_of_n_kl(n) - kl)
        assert gaps[0] > gaps[1] > gaps[2] > 0 and gaps[2] < 1e-4
        assert rank == pytest.approx(n / (n + 1), abs=1e-4)  # the mean of the largest of n uniform numbers
        tied, _ = study.best_of_n(np.full(1_000, 1e-3), np.arange(1_000) // 100, np.zeros(1_000), n)
        assert tied < math.log(10) + 1e-9


def test_the_mean_of_the_best_is_that_of_all_subsets():
    study = load_example("studies/overoptimisation")
    generator = np.random.default_rng(0)
    score = generator.normal(size=(3, 8))
    value = generator.normal(size=(3, 8))
    for n in (1, 3, 8):
        means = []
        for row_score, row_value in zip(score, value, strict=True):
            subsets = itertools.combinations(range(8), n)
            means.append(np.mean([row_value[max(subset, key=row_score.__getitem__)] for subset in subsets]))
        assert study.mean_of_best(score, value, n) == pytest.approx(np.mean(means), abs=1e-12)


@pytest.mark.parametrize("method", ["best_of_n", "ppo"])
def test_the_fit_has_the_coefficients_that_made_the_points(method):
    study = load_example("studies/overoptimisation")
    kl = np.linspace(0, 40, 30)
    gold = study.curve(1.3, 0.6, np.sqrt(kl.clip(1e-9)), method=method)
    assert study.fit(kl, gold, method=method) == pytest.approx((1.3, 0.6, 1.0))
    noise = np.random.default_rng(0).normal(size=30)
    alpha, beta, explained = study.fit(kl, gold + 0.1 * noise, method=method)
    assert (alpha, beta) == pytest.approx((1.3, 0.6), abs=0.1) and 0.8 < explained < 1
    d = np.linspace(0.01, 20, 20_000)
    largest = d[study.curve(1.3, 0.6, d, method=method).argmax()]
    assert study.peak(1.3, 0.6, method=method) == pytest.approx(largest, abs=2e-3)
    assert study.peak(1.3, -0.1, method=method) == math.inf


def test_penalised_runs_are_compared_at_their_last_kl():
    study = load_example("studies/overoptimisation")
    free = [[kl, 2.0, gold] for kl, gold in ((0.0, 9.0), (3.0, 1.0), (4.0, 2.0), (5.0, 3.0), (16.0, 9.0))]
    assert study.at_kl(free, 4.0) == pytest.approx([4.0, 2.0, 2.0])
    settings = {"width": 32, "pairs": 300, "seed": 1}
    runs = {
        (32, 300, 0.0, 1, 1): settings | {"ppo": free},
        (32, 300, 0.02, 1, 1): settings | {"ppo": [[4.0, 2.5, 2.25]] * 5},
    }
    _, (row,) = study.penalty_table(runs)
    # The mean of the five iterations without a penalty is the best of their means of five
    assert row[3:] == ["2.00 [2.00, 2.00]", "2.25 [2.25, 2.25]", "+0.25 (+0.25)", "–", "-2.55 (-2.55)", "+0.50 (+0.50)"]


def test_gold_pays_for_words_once():
    study = load_example("studies/overoptimisation")
    worth = study.taste()
    assert len(worth) > 100 and {"superb", "every", "paris"} <= worth.keys()
    assert study.raw_gold(" Superb, truly.") == pytest.approx(worth["superb"] + worth["truly"])
    assert study.raw_gold("superb superb") == pytest.approx(worth["superb"] - 0.5)
    assert study.raw_gold("x " * 25) == -0.5 * (24 + 5)


@pytest.mark.long
def test_policies_are_optimised_for_a_reward_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = load_example("studies/overoptimisation")
    for name, number in (("POOL_PROMPTS", 2), ("POOL_ANSWERS", 16), ("HELD_OUT_PAIRS", 10), ("ITERATIONS", 5)):
        monkeypatch.setattr(study, name, number)
    small_config = dataclasses.replace(study.PPO_CONFIG, num_episodes=8, minibatch_size=8)
    monkeypatch.setattr(study, "PPO_CONFIG", small_config)
    monkeypatch.setattr(study, "NEW_TOKENS", 6)
    monkeypatch.setattr(study, "BIN", 100)  # few iterations: all in one bin
    monkeypatch.setattr(study, "N", (2, 8))
    monkeypatch.setattr(study, "BY_DATA", [(4, 20), (4, 40)])
    monkeypatch.setattr(study, "BY_SIZE", [(4, 40), (8, 40)])
    monkeypatch.setattr(study, "PENALISED", [(4, 40)])
    monkeypatch.setattr(study, "KL_COEFS", (0.1,))
    monkeypatch.setattr(study, "SLOWER", [(4, 40)])
    monkeypatch.setattr(study, "DATA", tmp_path / "data.json")
    for options in (["--seeds", "1"], ["--seeds", "1"], ["--table", "gold", "--json", "data.json"]):
        monkeypatch.setattr("sys.argv", ["overoptimisation.py", *options])
        study.main()
    runs = [json.loads(line) for line in (tmp_path / "runs" / "overoptimisation.jsonl").read_text().splitlines()]
    settings = [(run["width"], run["pairs"], run["kl_coef"], run["slowdown"]) for run in runs]
    assert settings == [(4, 20, 0.0, 1), (4, 40, 0.0, 1), (8, 40, 0.0, 1), (4, 40, 0.1, 1), (4, 40, 0.0, 3)]
    assert [len(run["ppo"]) for run in runs] == [5, 5, 5, 5, 15]
    assert all(run["ppo"][0][0] == pytest.approx(0, abs=1e-4) for run in runs)
    # The best of 8 has more proxy than that of 2
    assert all(run["best_of_n"][1][1] > run["best_of_n"][0][1] > 0 for run in runs[:3])

    for options in (["--table", "coefficients"], ["--table", "penalty"], ["--figure", "one.svg"]):
        monkeypatch.setattr("sys.argv", ["overoptimisation.py", *options])
        study.main()
    assert "| 8 | 40 |" in capsys.readouterr().out
    figure = (tmp_path / "one.svg").read_text()
    monkeypatch.setattr("sys.argv", ["overoptimisation.py", "--figure", "two.svg"])
    study.main()
    assert figure == (tmp_path / "two.svg").read_text()
