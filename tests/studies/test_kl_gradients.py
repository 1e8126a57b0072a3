"""Gradients of KL estimators: by finite differences and torch's distributions, fixed points, and trainings."""

import itertools
import json

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Categorical, kl_divergence

from algos import MLPPolicy
from tests.helpers.models import load_example


@pytest.fixture
def study():
    return load_example("studies/kl_gradients")


STATES = [state for length in range(4) for state in itertools.product(range(4), repeat=length)]
"""Every beginning of an answer, in the order of the rows of a table of logits."""
ANSWERS = list(itertools.product(range(4), repeat=4))
ROWS = np.array([[STATES.index(answer[:step]) for step in range(4)] for answer in ANSWERS])
ESTIMATES = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(-d) - 1 + d}


class HandTree:
    """The tree again, in NumPy, without autograd, critic and the library's estimators.

    A gradient is the slope of `objective` at the policy, by finite differences.
    """

    def __init__(self, reference, sampler):
        self.reference = self.tables(reference)
        self.sampler = self.tables(sampler)

    @staticmethod
    def tables(logits):
        """Log-probabilities of each token in each state, and of those of each answer."""
        of_states = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return of_states, of_states[ROWS, np.array(ANSWERS)]

    def state_kl(self, of_states):
        kl = (np.exp(of_states) * (of_states - self.reference[0])).sum(1)
        return kl[ROWS]

    def objective(self, pair, logits):
        """What a pair makes smaller, in expectation over the sampler's answers."""
        if pair == "exact, both":
            return self.objective("exact, reward", logits) + self.objective("exact, loss", logits)
        of_states, log_prob = self.tables(logits)
        chance = np.exp(self.sampler[1].sum(1))
        ratio = np.exp(log_prob - self.sampler[1])
        log_ratio = log_prob - self.reference[1]
        name, where = pair.split(", ")

        # Charges of the sampler, each paid by all tokens up to its own
        if where == "reward":
            if name == "exact":
                charge = self.state_kl(self.sampler[0])
            else:
                charge = ESTIMATES[name](self.sampler[1] - self.reference[1])
            to_go = np.array([[row[step:].sum() for step in range(4)] for row in charge])
            return chance @ (ratio * to_go).sum(1)

        # Charges of the policy
        if name == "exact":
            return chance @ self.state_kl(of_states).sum(1)
        if name.endswith(" of the answer"):
            return chance @ ESTIMATES[name[:2]](log_ratio.sum(1))
        if name == "k3 up to 10":
            return chance @ np.minimum(ESTIMATES["k3"](log_ratio), 10).sum(1)
        if name.startswith("ratio · "):
            return chance @ (ratio * ESTIMATES[name[-2:]](log_ratio)).sum(1)
        return chance @ ESTIMATES[name](log_ratio).sum(1)

    def kl_of_answers(self, logits):
        answers = self.tables(logits)[1].sum(1)
        return np.exp(answers) @ (answers - self.reference[1].sum(1))


def slope(function, logits, direction, size=1e-5):
    return (function(logits + size * direction) - function(logits - size * direction)) / (2 * size)


@pytest.mark.parametrize("age", [0.0, 0.5])
def test_expected_gradients_are_slopes_of_the_expected_charge(study, age):
    reference, noise, drift = study.normal_logits(3)
    logits = reference + noise
    sampler = logits + age * drift
    moments, answer_gradient, state_gradient = study.expected_gradients(logits, sampler, reference)
    tree = HandTree(reference.numpy(), sampler.numpy())
    assert moments.keys() == set(study.PAIRS)
    generator = np.random.default_rng(0)
    for _ in range(2):
        direction = generator.normal(size=logits.shape)
        functions = {pair: lambda x, pair=pair: tree.objective(pair, x) for pair in study.PAIRS}
        gradients = {pair: mean for pair, (mean, _) in moments.items()}
        functions |= {"whole": tree.kl_of_answers, "visited": functions["exact, loss"]}
        gradients |= {"whole": answer_gradient, "visited": state_gradient}
        for name, function in functions.items():
            expected = slope(function, logits.numpy(), direction)
            assert (gradients[name].numpy() @ direction.ravel()) == pytest.approx(expected, rel=1e-6, abs=1e-7), name


def test_moments_by_hand(study):
    """Mean (2.5, 3); squared distances 1.5² + 3² and .5² + 1²."""
    gradients = torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    mean, variance = study.moments_of(gradients, torch.tensor([0.25, 0.75], dtype=torch.float64))
    assert mean.tolist() == [2.5, 3.0] and variance == 0.25 * 11.25 + 0.75 * 1.25


def test_a_perfect_critic_leaves_what_a_token_changes(study):
    """Advantages have mean 0 in each state, and differ as the charges of this and later tokens do."""
    reference, noise, _ = study.normal_logits(2)
    chance = study.answer_log_probs(reference).exp()
    charges = noise[study.STATE_OF_STEP, study.ANSWERS]
    advantages = study.advantages_of(charges, chance)
    for row in range(len(STATES)):
        answer, step = (row == ROWS).nonzero()
        of_state = advantages[answer, step]
        assert (chance[answer] @ of_state).item() == pytest.approx(0.0, abs=1e-12)
        to_go = torch.stack([charges[a, t:].sum() for a, t in zip(answer, step, strict=True)])
        torch.testing.assert_close(of_state - of_state[0], to_go - to_go[0])


@pytest.fixture
def uniform_rollout(study):
    """Every answer once, as a uniform policy draws them; that policy, and the one that it has left."""
    reference, _ = study.problem(4)
    env = study.TreeEnv(torch.zeros(256), 256)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, hidden=())
    with torch.no_grad():
        policy.actor[0].weight.copy_(reference.T)
        policy.actor[0].bias.zero_()
    left = policy.reference()
    with torch.no_grad():
        policy.actor[0].weight.zero_()
    rollout = TensorDict(
        {
            "observation": torch.eye(85)[ROWS],
            "action": torch.tensor(ANSWERS),
            "mask": torch.ones(256, 4, dtype=torch.bool),
            "reward": torch.zeros(256, 4),
            "log_prob": torch.full((256, 4), -np.log(4)),
        },
        batch_size=[256, 4],
    )
    return rollout, policy, left, reference


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:KL estimator", "ignore:'unchecked_k1' is linear")
def test_what_is_trained_has_the_gradient_that_is_enumerated(study, uniform_rollout):
    """β times that of the pair: of the loss, and of the charges in the reward, which later tokens pay too."""
    rollout, policy, left, reference = uniform_rollout
    uniform = torch.zeros_like(reference)
    moments, _, _ = study.expected_gradients(uniform, uniform, reference)
    for pair, make_penalty in study.PENALTIES.items():
        part = rollout.clone()
        penalty = make_penalty(left, 0.5)
        penalty(part, policy)
        log_prob = policy.evaluate(part).log_prob
        to_go = part["reward"].flip(1).cumsum(1).flip(1)
        loss = -(log_prob * to_go).sum() / 256
        if penalty.place == "loss":
            loss = loss + penalty.loss(part, log_prob=log_prob, policy=policy).sum() / 256
        (gradient,) = torch.autograd.grad(loss, policy.actor[0].weight)
        expected = torch.zeros(85 * 4)
        if pair != "no penalty":
            expected = 0.5 * moments[pair][0].float()
        torch.testing.assert_close(gradient.T.flatten(), expected, atol=1e-5, rtol=1e-5)


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


def test_expected_gradients_of_kl_estimators_are_those_of_divergences(study):
    tree = TreeGradients(study)
    of_answers = tree.of_answers()
    of_states = tree.of_states()
    reverse = tree.of_states(reverse=True)
    torch.testing.assert_close(tree.whole, of_answers, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(tree.visited, of_states, atol=1e-12, rtol=1e-12)
    for pair in ("k1, reward", "exact, both", "k2 of the answer, loss"):
        tree.assert_mean(pair, of_answers)
    for pair in ("k2, loss", "exact, loss", "ratio · k1, loss", "ratio · k3, loss"):
        tree.assert_mean(pair, of_states)
    tree.assert_mean("k1, loss", torch.zeros_like(of_answers))
    tree.assert_mean("k3, loss", reverse)
    tree.assert_mean("k3, reward", of_answers - reverse)
    tree.assert_mean("exact, reward", of_answers - of_states)
    tree.assert_mean("k3 of the answer, loss", tree.of_answers(reverse=True))
    # Equal in each sample, not only in the mean
    assert tree.moments["ratio · k3, loss"][1] == pytest.approx(tree.moments["k2, loss"][1], rel=1e-12)


def test_of_old_samples_only_ratios_and_the_exact_kl_are_right_at_visited_states(study):
    tree = TreeGradients(study, age=0.5)
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
def test_k3_times_the_ratio_has_the_slope_of_k2_times_the_ratio(study):
    log_prob = torch.linspace(-2, 2, 9, dtype=torch.float64)[None].requires_grad_()
    old = torch.linspace(0.5, -0.5, 9, dtype=torch.float64)[None]
    mask = torch.ones(1, 9, dtype=torch.bool)
    part = TensorDict({"log_prob": old, "reference_log_prob": torch.zeros_like(old), "mask": mask}, batch_size=[1, 9])
    penalty = study.PENALTIES["ratio · k3, loss"](object(), 0.7)
    (slope,) = torch.autograd.grad(penalty.loss(part, log_prob=log_prob, policy=None).sum(), log_prob)
    torch.testing.assert_close(slope, 0.7 * (log_prob - old).exp().detach() * log_prob.detach())


@pytest.mark.heavy
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_a_pairs_fixed_point_has_no_expected_gradient(study, beta):
    reference, rewards = study.problem(3)
    for pair in study.WITH_FIXED_POINT:
        logits = study.fixed_point(pair, reference=reference, rewards=rewards, beta=beta)
        moments, _, _ = study.expected_gradients(logits, logits, reference)
        variable = logits.clone().requires_grad_()
        return_ = (study.token_log_probs(variable).sum(1).exp() * rewards).sum()
        (of_return,) = torch.autograd.grad(return_, variable)
        torch.testing.assert_close(of_return.flatten(), beta * moments[pair][0], atol=1e-10, rtol=1e-8)
    assert study.fixed_point("k2, reward", reference=reference, rewards=rewards, beta=beta) is None


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_the_missed_share_is_that_of_the_possible_gain(study, beta):
    """J = E[r] - β·KL(π‖π_ref), which is β·log E_ref[exp(r/β)] at its largest."""
    reference, rewards = study.problem(3)
    arguments = {"reference": reference, "rewards": rewards, "beta": beta}
    start = study.answer_log_probs(reference)
    largest = beta * (start.exp() @ (rewards / beta).exp()).log().item()
    at_start = (start.exp() @ rewards).item()
    missed = {}
    for pair in study.WITH_FIXED_POINT:
        logits = study.fixed_point(pair, **arguments)
        answers = study.answer_log_probs(logits)
        objective = (answers.exp() @ (rewards - beta * (answers - start))).item()
        missed[pair] = study.missed_share(logits, **arguments)
        assert missed[pair] == pytest.approx((largest - objective) / (largest - at_start), abs=1e-12)
    assert missed["k1, reward"] == pytest.approx(0.0, abs=1e-12) == missed["exact, both"]
    assert 0 < missed["k2, loss"] < missed["k3, loss"] < 1
    assert study.missed_share(reference, **arguments) == pytest.approx(1.0)


def test_the_kl_of_the_optimum(study):
    """Of π* ∝ π_ref·exp(r/β), by torch's distributions."""
    reference, rewards = study.problem(3)
    start = study.answer_log_probs(reference)
    best = Categorical(logits=start + rewards / 0.3)
    assert study.kl_of_optimum(0.3, seed=3) == pytest.approx(kl_divergence(best, Categorical(logits=start)).item())


def test_at_the_optimum_k1_in_the_reward_has_no_noise(study):
    """There, r - β·log(π/π_ref) is the same for all answers."""
    noise = {pair: study.noise_at_fixed_point(pair, seed=1, beta=0.3) for pair in study.WITH_FIXED_POINT}
    assert noise.pop("k1, reward") < 1e-20 and min(noise.values()) > 0.1


def test_the_tree_pays_the_reward_of_the_answer(study):
    _, rewards = study.problem(1)
    env = study.TreeEnv(rewards, len(study.ANSWERS))
    env.reset()
    for step in range(study.STEPS):
        states = env.one_hot[study.STATE_OF_STEP[:, step]]
        assert np.array_equal(env.one_hot[study.FIRST_STATE[step] + env.code], states)
        _, reward, terminated, _, _ = env.step(study.ANSWERS[:, step].numpy())
        assert terminated.all() == (step == study.STEPS - 1) == bool(reward.any())
    assert np.array_equal(reward, rewards.numpy())


def test_a_run_of_an_earlier_version_is_read(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    line = '{"pair": "ratio · k3, loss", "beta": 0.1, "updates": 16, "seed": 2, "missed": 0.05, "kl": 1.4}'
    (tmp_path / "runs" / "kl_gradients.jsonl").write_text(line + "\n", encoding="utf-8")
    assert list(study.RUNS.read()) == [("ratio · k3, loss", 0.1, 16, 2)]


def test_the_table_of_trainings_has_percent_and_formulas(study):
    settings = {"pair": "k2, loss", "beta": 0.1, "updates": 16}
    runs = [
        settings | {"seed": 1, "missed": 0.05, "kl": 1.0, "formula": 0.04},
        settings | {"seed": 2, "missed": 0.152, "kl": 2.0, "formula": 0.08},
        settings | {"seed": 1, "missed": -1e-9, "kl": 9.0, "formula": None, "updates": 1},
    ]
    columns, rows = study.trained_table(runs)
    assert columns[1:] == ["β = 0.1, 16 steps", "β = 0.1, 1 step", "KL in nats, β = 0.1"]
    (row,) = [row for row in rows if row[0] == "k2, loss"]
    assert row[1:] == ["10 [5.0, 15]; 6.0", "0.0 [0.0, 0.0]", "1.50"]
    (row,) = [row for row in rows if row[0] == "k1, loss"]
    assert row[1:] == ["–", "–", "–"]


def test_an_unknown_pair_is_refused(study, call, capsys):
    with pytest.raises(SystemExit):
        call(study, "--pairs", "k2, loss;k4, loss")
    assert "--pairs has 'k4, loss', expected some of 'no penalty', " in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--table"], ["--json", "."]])
def test_without_runs_nothing_is_written(study, call, capsys, tmp_path, options):
    with pytest.raises(SystemExit):
        call(study, *options)
    assert "runs/kl_gradients.jsonl has no runs" in capsys.readouterr().err and not list(tmp_path.glob("*.json"))


@pytest.mark.long
def test_kl_penalties_are_trained_with_and_the_page_is_made(study, call, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ITERATIONS", {1: 3, 16: 2})
    monkeypatch.setattr(study, "TREES", (1,))
    for updates in (16, 16, 1):
        call(study, "--betas", "0.3", "--seeds", "1", "--updates", updates)
    runs = [json.loads(line) for line in (tmp_path / "runs" / "kl_gradients.jsonl").read_text().splitlines()]
    assert [(run["pair"], run["updates"]) for run in runs] == [(pair, n) for n in (16, 1) for pair in study.PENALTIES]
    assert all(0 <= run["missed"] < 2 for run in runs)
    assert "| β = 0.3, 16 steps | β = 0.3, 1 step |" in call(study, "--table")
    assert "| k1, reward | 1.00, 0 | 1.00, 0 | 1.00, 0 |" in call(study, "--enumerate")
    call(study, "--json", tmp_path, "--figure", "a.svg")
    monkeypatch.setattr(study, "DATA", tmp_path)
    call(study, "--figure", "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert len(json.loads((tmp_path / "kl-gradients.json").read_text())["runs"]) == 2 * len(study.PENALTIES)


@pytest.mark.long
def test_training_ends_near_the_closed_form(study, monkeypatch):
    """One step on each rollout: k1 in the reward at the optimum, k2 in the loss at its own fixed point."""
    monkeypatch.setattr(study, "ITERATIONS", {1: 200})
    for pair in ("k1, reward", "k2, loss"):
        run = {"pair": pair, "beta": 0.3, "updates": 1, "seed": 1}
        run |= study.train(**run)
        assert run["missed"] == pytest.approx(study.with_formula(run)["formula"], abs=5e-3), pair
