"""The programs of examples/studies run, and what they compute exactly is right."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Categorical, kl_divergence

from tests.helpers.models import EXAMPLES, load_example

ROOT = EXAMPLES.parent


def test_every_study_is_run_here():
    assert {path.stem for path in (EXAMPLES / "studies").glob("*.py")} == {
        "details", "kl_gradients", "overoptimisation", "pass_at_k", "staleness",
    }  # fmt: skip


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


def test_a_detail_is_had_or_lacked_by_the_base_of_each_task():
    study = load_example("studies/details")
    names = [list(study.details_of(task)) for task in study.TASKS.values()]
    assert len(names[0]) == 15 and all(names[0] == those for those in names)
    for task in study.TASKS.values():
        for name, detail in study.details_of(task).items():
            changed, has_it = detail.change(task.base)
            assert changed != task.base, name
            assert has_it == (name == "entropy bonus" or name == "value clipped") or name in (
                "rewards scaled", "discount", "rate annealed", "Adam's ε 1e-5", "last state bootstrapped",
            )  # fmt: skip
    # What control has by default, text lacks, and the other way round
    bootstrapped = [study.details_of(task)["last state bootstrapped"] for task in study.TASKS.values()]
    has_it = [detail.change(task.base)[1] for detail, task in zip(bootstrapped, study.TASKS.values(), strict=True)]
    assert has_it == [False] * 3 + [True] * 3


def test_the_effect_of_a_detail_by_hand():
    """The base goes from 10 to a mean of 60, so the unit is 50."""
    study = load_example("studies/details")
    runs = {}
    for seed, base in ((1, 55.0), (2, 65.0)):
        for detail, change in (("base", 0.0), ("ratio clipped", -25.0), ("entropy bonus", 10.0)):
            runs["CartPole", detail, seed] = {"first": 10.0, "mean": base + change, "last": 0.0, "seconds": 2.0}
    assert study.effects(runs) == {"ratio clipped": {"CartPole": [0.5, 0.5]}, "entropy bonus": {"CartPole": [0.2, 0.2]}}
    assert study.table(runs) == (
        ["detail", "CartPole"],
        [["ratio clipped", "+0.50 [+0.50, +0.50]"], ["entropy bonus", "+0.20 [+0.20, +0.20]"]],
    )
    assert study.mean_of_curve([(0, 0.0), (50, 1.0), (100, 1.0)], 100) == pytest.approx(0.75, abs=0.01)


@pytest.mark.long
def test_details_are_trained_without_each_and_a_run_is_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = load_example("studies/details")
    short = {"CartPole": 6_000, "Empty room": 1_100, "Reviews": 4_000, "Interview": 1_500}
    tasks = {name: dataclasses.replace(study.TASKS[name], total_steps=steps) for name, steps in short.items()}
    monkeypatch.setattr(study, "TASKS", tasks)
    details = {name: detail for name, detail in study.details_of(tasks["CartPole"]).items() if name == "a critic"}
    monkeypatch.setattr(study, "details_of", lambda task: details)
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["details.py", "--seeds", "1"])
        study.main()
    assert len((tmp_path / "runs" / "details.jsonl").read_text().splitlines()) == 2 * len(tasks)
    options = ["--table", "--figure", "details.svg", "--json", "details.json"]
    monkeypatch.setattr("sys.argv", ["details.py", *options])
    study.main()
    assert "| a critic | " in capsys.readouterr().out and "<svg" in (tmp_path / "details.svg").read_text()
    assert [row[0] for row in json.loads((tmp_path / "details-base.json").read_text())["rows"]] == list(tasks)


def test_the_figures_show_the_numbers_of_the_tables(tmp_path):
    pictures = load_example("benchmarks/pictures")
    (tmp_path / "table.json").write_text(
        json.dumps(
            {
                "columns": ["", "K = 0", "K = 4"],
                "rows": [["none", "0.92 [0.90, 0.93]", "−9.63 (-24.67)"], ["x", "–", "1"]],
            }
        )
    )
    columns, rows = pictures.read_table(tmp_path / "table.json")
    assert columns == ["K = 0", "K = 4"]
    assert rows == {"none": [[0.92, 0.90, 0.93], [-9.63, -24.67]], "x": [[], [1]]}


@pytest.mark.parametrize("name", ["staleness", "pass_at_k"])
def test_a_figure_is_drawn_again_from_the_table_of_its_page(name, tmp_path):
    """The file in docs/figures is that of the present table."""
    load_example(f"studies/{name}").draw(tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    published = (ROOT / "docs" / "figures" / f"{name.replace('_', '-')}.svg").read_text()
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("", drawn) == number.sub("", published)
    coordinates = [np.array(number.findall(text), dtype=float) for text in (drawn, published)]
    assert np.allclose(*coordinates, atol=0.01)


class TreeGradients:
    """Gradients of divergences on the tree of the KL study, by torch's own distributions: of answers, and of states."""

    def __init__(self, study, *, age=0.0):
        self.study = study
        self.reference, noise, drift = study.normal_logits(7)
        self.logits = (self.reference + noise).requires_grad_()
        self.sampler = (self.logits + age * drift).detach()
        self.moments, self.whole, self.visited = study.expected_gradients(
            self.logits.detach(), self.sampler, self.reference
        )

    def of_answers(self, *, reverse=False):
        """Gradient of KL(π‖π_ref) of whole answers, or of KL(π_ref‖π)."""
        answers = [
            Categorical(logits=self.study.token_log_probs(logits).sum(1)) for logits in (self.logits, self.reference)
        ]
        return self.gradient(kl_divergence(*(answers[::-1] if reverse else answers)))

    def of_states(self, *, reverse=False):
        """The same of the next token's distribution, summed over states by how often the sampler visits them."""
        tokens = [Categorical(logits=logits) for logits in (self.logits, self.reference)]
        by_state = kl_divergence(*(tokens[::-1] if reverse else tokens))
        chance = self.study.token_log_probs(self.sampler).sum(1).exp()
        return self.gradient((chance[:, None] * by_state[self.study.STATE_OF_STEP]).sum())

    def gradient(self, divergence):
        return torch.autograd.grad(divergence, self.logits)[0].flatten()

    def assert_mean(self, pair, expected):
        torch.testing.assert_close(self.moments[pair][0], expected, atol=1e-12, rtol=1e-12)


def test_expected_gradients_of_kl_estimators_are_those_of_divergences():
    tree = TreeGradients(load_example("studies/kl_gradients"))
    whole, visited, reverse = tree.of_answers(), tree.of_states(), tree.of_states(reverse=True)
    torch.testing.assert_close(tree.whole, whole, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(tree.visited, visited, atol=1e-12, rtol=1e-12)
    for pair in ("k1, reward", "exact, both", "k2 of the answer, loss"):
        tree.assert_mean(pair, whole)
    for pair in ("k2, loss", "exact, loss", "ratio · k1, loss", "ratio · k3, loss"):
        tree.assert_mean(pair, visited)
    tree.assert_mean("k1, loss", torch.zeros_like(whole))
    tree.assert_mean("k3, loss", reverse)
    tree.assert_mean("k3, reward", whole - reverse)
    tree.assert_mean("exact, reward", whole - visited)
    tree.assert_mean("k3 of the answer, loss", tree.of_answers(reverse=True))
    # Equal in each sample, not only in the mean
    assert tree.moments["ratio · k3, loss"][1] == pytest.approx(tree.moments["k2, loss"][1], rel=1e-12)


def test_of_old_samples_only_ratios_and_the_exact_kl_are_right_at_visited_states():
    tree = TreeGradients(load_example("studies/kl_gradients"), age=0.5)
    visited = tree.of_states()
    right = {"exact, loss", "ratio · k1, loss", "ratio · k3, loss"}
    for pair in right:
        tree.assert_mean(pair, visited)
    # k1 in the loss pushes the policy away from the one that has sampled
    tokens = [Categorical(logits=logits) for logits in (tree.sampler, tree.logits)]
    chance = tree.study.token_log_probs(tree.sampler).sum(1).exp()
    distance_to_sampler = (chance[:, None] * kl_divergence(*tokens)[tree.study.STATE_OF_STEP]).sum()
    tree.assert_mean("k1, loss", -tree.gradient(distance_to_sampler))
    errors = {pair: (mean - visited).norm() / visited.norm() for pair, (mean, _) in tree.moments.items()}
    assert min(error for pair, error in errors.items() if pair not in right) > 0.1


@pytest.mark.filterwarnings("ignore:KL estimator 'k3' in the loss")
def test_k3_times_the_ratio_has_the_slope_of_k2_times_the_ratio():
    study = load_example("studies/kl_gradients")
    log_prob = torch.linspace(-2, 2, 9, dtype=torch.float64)[None].requires_grad_()
    old = torch.linspace(0.5, -0.5, 9, dtype=torch.float64)[None]
    mask = torch.ones(1, 9, dtype=torch.bool)
    part = TensorDict({"log_prob": old, "reference_log_prob": torch.zeros_like(old), "mask": mask}, batch_size=[1, 9])
    penalty = study.PENALTIES["ratio · k3, loss"](object(), 0.7)
    (slope,) = torch.autograd.grad(penalty.loss(part, log_prob=log_prob, policy=None).sum(), log_prob)
    torch.testing.assert_close(slope, 0.7 * (log_prob - old).exp().detach() * log_prob.detach())


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_a_pairs_fixed_point_has_no_expected_gradient(beta):
    study = load_example("studies/kl_gradients")
    reference, rewards = study.problem(3)
    arguments = {"reference": reference, "rewards": rewards, "beta": beta}
    missed = {}
    for pair in study.WITH_FIXED_POINT:
        logits = study.fixed_point(pair, **arguments)
        missed[pair] = study.missed_share(logits, **arguments)
        moments, _, _ = study.expected_gradients(logits, logits, reference)
        variable = logits.clone().requires_grad_()
        return_ = (study.token_log_probs(variable).sum(1).exp() * rewards).sum()
        (of_return,) = torch.autograd.grad(return_, variable)
        torch.testing.assert_close(of_return.flatten(), beta * moments[pair][0], atol=1e-10, rtol=1e-8)
    assert missed["k1, reward"] == pytest.approx(0.0, abs=1e-12) == missed["exact, both"]
    assert 0 < missed["k2, loss"] < missed["k3, loss"] < 1
    assert study.missed_share(reference.log_softmax(-1), **arguments) == pytest.approx(1.0)
    assert study.fixed_point("k2, reward", **arguments) is None
    # J* - J = β·KL(π‖π*)
    log_prob, best = (
        study.token_log_probs(study.fixed_point(pair, **arguments)).sum(1) for pair in ("k3, loss", "k1, reward")
    )
    start = study.token_log_probs(reference).sum(1)
    gains = [(x.exp() * (rewards - beta * (x - start))).sum().item() for x in (best, log_prob, start)]
    assert missed["k3, loss"] == pytest.approx((gains[0] - gains[1]) / (gains[0] - gains[2]))
    kl = study.kl_of_optimum(beta, seed=3)
    assert kl == pytest.approx(kl_divergence(Categorical(logits=best), Categorical(logits=start)).item())


def test_at_the_optimum_k1_in_the_reward_has_no_noise():
    """There, r - β·log(π/π_ref) is the same for all answers."""
    study = load_example("studies/kl_gradients")
    noise = {pair: study.noise_at_fixed_point(pair, seed=1, beta=0.3) for pair in study.WITH_FIXED_POINT}
    assert noise.pop("k1, reward") < 1e-20 and min(noise.values()) > 0.1


def test_the_tree_pays_the_reward_of_the_answer():
    study = load_example("studies/kl_gradients")
    _, rewards = study.problem(1)
    env = study.TreeEnv(rewards, len(study.ANSWERS))
    env.reset()
    for step in range(study.STEPS):
        states = env.one_hot[study.STATE_OF_STEP[:, step]]
        assert np.array_equal(env.one_hot[study.FIRST_STATE[step] + env.code], states)
        _, reward, terminated, _, _ = env.step(study.ANSWERS[:, step].numpy())
        assert terminated.all() == (step == study.STEPS - 1) == bool(reward.any())
    assert np.array_equal(reward, rewards.numpy())


@pytest.mark.long
def test_kl_penalties_are_trained_with_and_the_page_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = load_example("studies/kl_gradients")
    monkeypatch.setattr(study, "ITERATIONS", {1: 3, 16: 2})
    monkeypatch.setattr(study, "TREES", (1,))
    for updates in ("16", "16", "1"):
        monkeypatch.setattr("sys.argv", ["kl_gradients.py", "--betas", "0.3", "--seeds", "1", "--updates", updates])
        study.main()
    runs = [json.loads(line) for line in (tmp_path / "runs" / "kl_gradients.jsonl").read_text().splitlines()]
    assert [(run["pair"], run["updates"]) for run in runs] == [(pair, n) for n in (16, 1) for pair in study.PENALTIES]
    assert all(0 <= run["missed"] < 2 for run in runs)
    capsys.readouterr()
    for option in ("--table", "--enumerate"):
        monkeypatch.setattr("sys.argv", ["kl_gradients.py", option])
        study.main()
    output = capsys.readouterr().out
    assert (
        "| β = 0.3, 16 steps | β = 0.3, 1 step |" in output and "| k1, reward | 1.00, 0 | 1.00, 0 | 1.00, 0 |" in output
    )
    for name in ("a.svg", "b.svg"):
        monkeypatch.setattr("sys.argv", ["kl_gradients.py", "--json", str(tmp_path), "--figure", str(tmp_path / name)])
        study.main()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert len(json.loads((tmp_path / "kl-gradients.json").read_text())["runs"]) == 2 * len(study.PENALTIES)


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
