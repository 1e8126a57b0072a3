"""Over-optimisation: best of n by every sequence of draws, fits by hand, gold, and the script in miniature."""

import dataclasses
import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.helpers.models import load_example


@pytest.fixture
def study():
    return load_example("studies/overoptimisation")


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
def test_the_best_of_n_is_that_of_every_sequence_of_draws(study, score):
    probability = np.array([0.4, 0.3, 0.2, 0.1])
    value = np.array([1.0, -2.0, 0.5, 3.0])
    for n in (1, 2, 5):
        exact = best_by_enumeration(probability, np.array(score), value, n)
        assert study.best_of_n(probability, np.array(score), value, n) == pytest.approx(exact, abs=1e-12)


def test_the_kl_of_the_best_of_n_tends_to_its_formula_from_below(study):
    """Beirami et al. 2024: log n − (n−1)/n is an upper bound; it is the limit for many answers of distinct scores."""
    for n in (2, 16, 128):
        gaps = []
        for count in (100, 1_000, 100_000):
            kl, rank = study.best_of_n(np.full(count, 1 / count), np.arange(count), (np.arange(count) + 1) / count, n)
            gaps.append(study.best_of_n_kl(n) - kl)
        assert gaps[0] > gaps[1] > gaps[2] > 0 and gaps[2] < 1e-4
        assert rank == pytest.approx(n / (n + 1), abs=1e-4)  # the mean of the largest of n uniform numbers
        tied, _ = study.best_of_n(np.full(1_000, 1e-3), np.arange(1_000) // 100, np.zeros(1_000), n)
        assert tied < math.log(10) + 1e-9


def test_the_mean_of_the_best_is_that_of_all_subsets(study):
    generator = np.random.default_rng(0)
    score = generator.normal(size=(3, 8))
    value = generator.normal(size=(3, 8))
    for n in (1, 3, 8):
        means = []
        for row_score, row_value in zip(score, value, strict=True):
            subsets = itertools.combinations(range(8), n)
            means.append(np.mean([row_value[max(subset, key=row_score.__getitem__)] for subset in subsets]))
        assert study.mean_of_best(score, value, n) == pytest.approx(np.mean(means), abs=1e-12)


def test_the_best_of_many_ranks_is_that_of_a_closed_form(study):
    """The mean of the largest of n of the numbers 1 to N is n(N + 1) / (n + 1)."""
    ranks = np.random.default_rng(0).permutation(4096)[None] + 1
    for n in (2, 64, 1024):
        assert study.mean_of_best(ranks, ranks, n) == pytest.approx(n * 4097 / (n + 1), rel=1e-12)
        assert study.mean_of_best(-ranks, ranks, n) == pytest.approx(4097 / (n + 1), rel=1e-12)  # the smallest


@pytest.mark.parametrize("method", ["best_of_n", "ppo"])
def test_the_fit_has_the_coefficients_that_made_the_points(study, method):
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


def test_the_variance_that_a_fit_explains_by_hand(study):
    """The residuals (6, −6, 2) are orthogonal to d and to d² at d = 1, 2, 3, so the coefficients do not change."""
    d = np.array([1.0, 2.0, 3.0])
    residual = 0.05 * np.array([6.0, -6.0, 2.0])
    gold = d * (1.3 - 0.2 * d) + residual  # 1.4, 1.5, 2.2
    alpha, beta, explained = study.fit(d**2, gold, method="best_of_n")
    assert (alpha, beta) == pytest.approx((1.3, 0.2))
    # Σ residual² = .05² · 76 = .19; the mean of the golds is 1.7, and Σ (gold − 1.7)² = .09 + .04 + .25 = .38
    assert explained == pytest.approx(1 - 0.19 / 0.38)


def test_a_fit_uses_iterations_up_to_a_kl_of_50(study):
    kl = [0.0, 1.0, 4.0, 50.0, 50.5]
    gold = [7.0, 1.0, 1.5, 0.0, 100.0]
    for method in ("best_of_n", "ppo"):
        assert study.fit(kl, gold, method=method) == pytest.approx(study.fit(kl[1:4], gold[1:4], method=method))


def test_a_kl_is_compared_with_the_three_nearest_iterations(study):
    points = [[kl, 2.0, gold] for kl, gold in ((0.0, 9.0), (3.0, 1.0), (4.0, 2.0), (5.0, 3.0), (16.0, 9.0))]
    assert study.at_kl(points, 4.0) == pytest.approx([4.0, 2.0, 2.0])


def test_penalised_runs_are_compared_at_their_last_kl(study):
    free = [[kl, 2.0, gold] for kl, gold in ((0.0, 9.0), (3.0, 1.0), (4.0, 2.0), (5.0, 3.0), (16.0, 9.0))]
    settings = {"width": 32, "pairs": 300, "seed": 1}
    runs = {
        (32, 300, 0.0, 1, 1): settings | {"ppo": free},
        (32, 300, 0.02, 1, 1): settings | {"ppo": [[4.0, 2.5, 2.25]] * 5},
    }
    # The mean of the five iterations without a penalty, 4.8, is the best of their means of five
    _, (row,) = study.penalty_table(runs)
    assert row[3:] == ["2.00 [2.00, 2.00]", "2.25 [2.25, 2.25]", "+0.25 (+0.25)", "–", "-2.55 (-2.55)", "+0.50 (+0.50)"]
    runs[32, 300, 0.0, 3, 1] = settings | {"ppo": [[4.0, 2.0, 2.5]] * 5}
    _, (row,) = study.penalty_table(runs)
    assert row[6] == "-0.25 (-0.25)"
    # Another seed has no run without a penalty
    runs[32, 300, 0.02, 1, 2] = settings | {"seed": 2, "ppo": [[9.0, 9.0, 9.0]] * 5}
    assert study.penalty_table(runs)[1] == [row]


def test_iterations_are_averaged_in_bins_of_a_quarter(study):
    """√KL of 1, 1.1 and .9 round to 4 quarters; 2 is alone."""
    points = [[1.0, 1.0, 0.0], [1.21, 2.0, 0.0], [0.81, 3.0, 3.0], [4.0, 9.0, 9.0]]
    assert study.binned(points) == [pytest.approx([3.02 / 3, 2.0, 1.0], abs=1e-4)]


def test_rows_of_the_gold_table_by_hand(study):
    """PPO's gold is 0, 0, 0, 0, 5, 5, -10: the means of five are 1, 2 and 0."""
    ppo = [[4.0, 1.0, gold] for gold in (0, 0, 0, 0, 5, 5, -10)]
    ppo[-1] = [24.0, 6.0, -10.0]
    entry = {"accuracy": 0.8, "correlation": 0.7, "best_of_n": [[0.2, 1.0, 0.5], [1.0, 2.0, 1.5]], "ppo": ppo}
    # The last mean of five has a KL of (4 · 4 + 24) / 5 = 8 and a proxy of 2
    assert study.gold_figures(entry) == pytest.approx([0.8, 0.7, 1.5, 2.0, 2.0, 0.0, 2.0, math.sqrt(8)])


def test_gold_pays_for_words_once(study):
    worth = study.taste()
    assert len(worth) > 100 and {"superb", "every", "paris"} <= worth.keys()
    assert study.raw_gold(" Superb, truly.") == pytest.approx(worth["superb"] + worth["truly"])
    assert study.raw_gold("superb superb") == pytest.approx(worth["superb"] - 0.5)
    assert study.raw_gold("x " * 25) == -0.5 * (24 + 5)


def test_the_worth_of_words_has_no_order(study):
    """The exact sum, rounded once: two answers of the same words are worth the same in every process."""
    words = sorted(study.taste())
    for start in range(0, 100, 5):
        chosen = words[start : start + 15]
        exact = float(sum(Fraction(study.taste()[word]) for word in chosen))
        assert study.raw_gold(" ".join(chosen)) == exact


def test_gold_is_in_deviations_of_the_pool(study):
    """Raw golds 1 and 3: mean 2, deviation 1."""
    pool = study.Pool([[1], [2]], np.array([[1.0, 3.0]]))
    assert pool.gold("x " * 25) == pytest.approx(-0.5 * (24 + 5) - 2)


def test_the_proxy_has_mean_0_and_deviation_1_on_the_pool(study):
    class Lengths:
        """A reward model that scores the length."""

        def score_rows(self, rows):
            return torch.tensor([float(len(row)) for row in rows])

        def __call__(self, prompts, completions, **columns):
            return [len(completion) for completion in completions]

    pool = study.Pool([[1], [1, 2, 3]], np.array([[0.0, 0.0]]))
    proxy = study.Proxy(Lengths(), pool)
    assert proxy.pool_scores.tolist() == [[-1.0, 1.0]]
    assert proxy(["p"], ["1234"], None, None, None, None) == [2.0]


def test_a_run_of_an_earlier_version_is_read(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    line = '{"width": 4, "pairs": 1000, "kl_coef": 0.0, "slowdown": 1, "seed": 3, "ppo": [[0, 0, 0]]}'
    (tmp_path / "runs" / "overoptimisation.jsonl").write_text(line + "\n")
    assert list(study.by_seed(study.RUNS.read(), 4, 1000)) == [3]


def test_settings_of_a_seed(study):
    settings = [tuple(run.values()) for run in study.settings_of([7])]
    assert len(settings) == len(set(settings)) == 8 + 4 + 1  # reward models, penalties, and one that is slower
    assert {seed for *_, seed in settings} == {7} and (32, 1000, 0.0, 3, 7) in settings


def test_without_runs_nothing_is_written(study, call, capsys, tmp_path):
    with pytest.raises(SystemExit):
        call(study, "--table", "gold", "--json", "gold.json")
    assert "has no runs of these seeds" in capsys.readouterr().err and not list(tmp_path.glob("*.json"))


@pytest.mark.long
def test_the_chosen_answer_of_a_pair_has_more_gold(study):
    pairs = study.sample_pairs("test", 20, 1)
    golds = [(study.raw_gold(pair["chosen"]), study.raw_gold(pair["rejected"])) for pair in pairs]
    assert all(chosen >= rejected for chosen, rejected in golds) and any(a > b for a, b in golds)


@pytest.mark.long
def test_policies_are_optimised_for_a_reward_model(study, call, tmp_path, monkeypatch):
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
    monkeypatch.setattr(study, "DATA", tmp_path)
    for _ in range(2):
        call(study, "--seeds", "1")
    runs = [json.loads(line) for line in (tmp_path / "runs" / "overoptimisation.jsonl").read_text().splitlines()]
    settings = [(run["width"], run["pairs"], run["kl_coef"], run["slowdown"]) for run in runs]
    assert settings == [(4, 20, 0.0, 1), (4, 40, 0.0, 1), (8, 40, 0.0, 1), (4, 40, 0.1, 1), (4, 40, 0.0, 3)]
    assert [len(run["ppo"]) for run in runs] == [5, 5, 5, 5, 15]
    assert all(run["ppo"][0][0] == pytest.approx(0, abs=1e-4) for run in runs)
    # The best of 8 has more proxy than that of 2
    assert all(run["best_of_n"][1][1] > run["best_of_n"][0][1] > 0 for run in runs[:3])

    # Tables and figure
    call(study, "--table", "gold", "--json", "overoptimisation.json")
    assert "| 8 | 40 |" in call(study, "--table", "coefficients")
    assert "| 4 | 40 | 0.1 |" in call(study, "--table", "penalty")
    for name in ("one.svg", "two.svg"):
        call(study, "--figure", name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
