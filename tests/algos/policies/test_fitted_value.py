"""`FittedValue`: the fit of a linear value head, against numpy's least squares."""

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import algos
from algos import PPO, LMPolicy, presets
from algos.policies.critic import fresh_head
from algos.policies.fitted_value import FOLDS, RIDGES, FittedValue
from algos.training.metrics import rollout_metrics
from tests.helpers.small_agents import agent_of, lm_policy
from tests.helpers.text_envs import play, text_env
from textenv.rollout import sequences

ANSWERS = [(5, 1, 7), (7,), (3, 3, 3, 3, 3)]


def returns_of_features(rows=64, steps=9, width=12):
    """Features whose most telling directions vary least, returns linear in them, and a mask with holes."""
    draw = torch.Generator().manual_seed(3)
    scale = torch.logspace(0, -1.5, width)
    hidden = torch.randn(rows, steps + 1, width, generator=draw) * scale + 5
    slope = torch.randn(width, generator=draw) / scale
    target = (hidden[:, :-1] - 5) @ slope + 0.7 + torch.randn(rows, 1, generator=draw)
    mask = torch.rand(rows, steps, generator=draw) < 0.8
    return hidden, torch.where(mask, target, torch.nan), mask  # what is outside the mask must not be read


def fit(hidden, target, mask, *, head=None, fitted_value=None):
    head = fresh_head(hidden.shape[-1], torch.device("cpu")) if head is None else head
    fitted_value = FittedValue() if fitted_value is None else fitted_value
    return fitted_value.fit([head.weight[0]], head.bias, [hidden], returns=target, mask=mask)


def explained(value, target, mask):
    return 1 - (target - value)[mask].square().mean() / target[mask].var()


def test_one_fit_explains_returns_of_unseen_rows():
    hidden, target, mask = returns_of_features()
    head, slow = fresh_head(12, torch.device("cpu")), fresh_head(12, torch.device("cpu"))
    value = fit(hidden, target, mask, head=head)
    assert value.shape == (64, 10) and explained(value[:, :-1], target, mask) > 0.8
    assert explained(head(hidden)[:, :-1, 0], target, mask) > 0.8
    adam = torch.optim.Adam(slow.parameters(), 3e-3)
    for _ in range(8):  # an iteration of presets.TEXT, at ten times its rate
        adam.zero_grad()
        (slow(hidden)[:, :-1, 0] - target)[mask].square().mean().backward()
        adam.step()
    assert explained(slow(hidden)[:, :-1, 0], target, mask) < 0.2


def test_a_folds_values_are_ridge_regression_on_others():
    """Compared with numpy's least squares, in which further rows stand for the penalty."""
    hidden, target, mask = returns_of_features()
    value = fit(hidden, target, mask)
    own = torch.arange(64) % FOLDS == 1
    x, every = (hidden[rows][:, :-1][mask[rows]].double().numpy() for rows in (~own, slice(None)))
    y, center, gaps = target[~own][mask[~own]].double().numpy(), every.mean(0), []
    for strength in RIDGES:
        weight = strength * ((x - x.mean(0)) ** 2).sum(0).mean()
        rows = np.vstack([np.c_[x - center, np.ones(len(x))], np.c_[weight**0.5 * np.eye(12), np.zeros(12)]])
        solution = np.linalg.lstsq(rows, np.r_[y, np.zeros(12)], rcond=None)[0]
        expected = (hidden[own].double().numpy() - center) @ solution[:-1] + solution[-1]
        gaps.append(abs(value[own].numpy() - expected).max())
    assert min(gaps) < 1e-2 and np.median(gaps) > 0.1, gaps


@pytest.mark.heavy
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 64])
def test_no_value_depends_on_the_return_of_its_own_row(rows, known):
    """Neither through the fit nor through the strength that is chosen for it, whether earlier rollouts are known."""
    hidden, target, mask = returns_of_features(rows=rows)
    for row in range(min(rows, 8)):
        other, found = target.clone(), []
        other[row] += 30.0
        for returns in (target, other):
            earlier = FittedValue()
            if known:
                fit(hidden + 0.1, target, mask, fitted_value=earlier)
            found.append(fit(hidden, returns, mask, fitted_value=earlier))
        assert torch.equal(found[0][row], found[1][row]), "the same computation, of the same numbers"
        assert rows == 1 or not torch.allclose(found[0], found[1], atol=0.1), "others' values do"


def test_earlier_rollouts_help_until_they_mislead():
    hidden, target, mask = returns_of_features(rows=16)
    for change, better in ((0.0, True), (50.0, False)):
        earlier = FittedValue()
        for part in range(5):
            draw = torch.Generator().manual_seed(part)
            moved = hidden + 0.05 * torch.randn(hidden.shape, generator=draw)
            fit(moved, target + (change if part < 4 else 0.0), mask, fitted_value=earlier)
        values = [fit(hidden, target, mask, fitted_value=each) for each in (earlier, None)]
        errors = [(value[:, :-1] - target)[mask].square().mean() for value in values]
        assert errors[0] < (errors[1] if better else 1.5 * errors[1])


def test_features_count_alike_whatever_their_size():
    hidden, target, mask = returns_of_features()
    first, second = hidden.split([5, 7], dim=-1)
    values = []
    for size in (1.0, 1e4):
        weights, bias = [torch.zeros(5), torch.zeros(7)], torch.zeros(1)
        values.append(FittedValue().fit(weights, bias, [first, size * second], returns=target, mask=mask))
        own = first @ weights[0] + size * second @ weights[1] + bias
        assert explained(own[:, :-1], target, mask) > 0.8
    torch.testing.assert_close(*values, rtol=0, atol=1e-2)


@pytest.mark.parametrize("case", ["nan", "no entry"])
def test_a_rollout_that_says_nothing_changes_nothing(case):
    hidden, target, mask = returns_of_features()
    head = torch.nn.Linear(12, 1)
    before, value = head.weight.clone(), head(hidden).squeeze(-1)
    target = target + torch.nan if case == "nan" else target
    mask = mask & (case != "no entry")
    torch.testing.assert_close(fit(hidden, target, mask, head=head), value)
    assert torch.equal(head.weight, before)


def test_equations_without_a_solution_give_the_mean():
    """As after a collapse, when every answer is the same: next to 2^26, float32 loses the ridge on any processor."""
    mask, fitted_value = torch.ones(64, 4, dtype=torch.bool), FittedValue()
    apart = torch.tensor([1.0, -1.0]).repeat(32)[:, None, None].expand(64, 5, 1)
    fit(apart, torch.zeros(64, 4), mask, fitted_value=fitted_value)
    alike = torch.full((64, 5, 1), 2.0**13)
    value = fit(alike, torch.full((64, 4), 3.0), mask, fitted_value=fitted_value)
    torch.testing.assert_close(value, torch.full((64, 5), 3.0))


@pytest.mark.heavy
@pytest.mark.parametrize("critic", [None, "copy"])
def test_an_agent_fits_the_head_to_its_first_rollout(critic):
    policy = LMPolicy.load("embedded", critic=critic, seed=1)
    agent = PPO(gymnasium.make_vec("textenv/Reviews-v0", num_envs=64, kl_coef=0.1), policy, presets.TEXT)
    rollout = agent.collect()
    agent.update(rollout)
    assert rollout_metrics(rollout)["value/explained_variance"] > 0.3


def fitted():
    env, policy = text_env(), lm_policy()
    agent = agent_of(env, policy, fit_value_head=True)
    agent.update(agent.collect())
    return agent, policy


def test_fitted_features_are_last_state_and_answer_sum():
    _, policy = fitted()
    rollout = play(text_env(), ANSWERS)
    tokens, start = sequences(rollout), rollout["mask"].int().argmax(1) + 1
    values, embedding = policy.values(rollout)[0], policy.lm.model.get_input_embeddings()
    assert policy.token_head.abs().sum() > 0
    for row in range(len(tokens)):
        for position in rollout["mask"][row].nonzero()[:, 0].tolist():
            state = policy.lm.hidden(tokens[row : row + 1, : position + 1])[0, -1]
            answer = embedding(tokens[row, start[row] : position + 1]).sum(0)
            expected = policy.value_head(state)[0] + answer @ policy.token_head
            torch.testing.assert_close(values[row, position], expected.detach(), rtol=1e-4, atol=1e-4)
    evaluated = policy.evaluate(rollout).value.detach()
    torch.testing.assert_close(evaluated[rollout["mask"]], values[rollout["mask"]], rtol=1e-4, atol=1e-4)


def test_a_fitted_head_is_saved_and_0_4_is_read(tmp_path):
    agent, policy = fitted()
    agent.save(tmp_path)
    loaded = algos.load(tmp_path)
    assert torch.equal(loaded.token_head, policy.token_head)
    former = agent.state_dict()
    former["policy"] = {name: x.clone() for name, x in former["policy"].items() if name != "token_head"}
    agent.load_state_dict(former)
    assert not policy.token_head.any() and policy.value_head.weight.any()
    file = tmp_path / "policy" / "value_head.safetensors"
    save_file({name: x for name, x in load_file(file).items() if name != "tokens"}, file, metadata={"options": "{}"})
    assert not algos.load(tmp_path).token_head.any()


def test_a_policy_without_a_linear_head_says_so():
    with pytest.raises(ValueError, match="MLPPolicy has no linear value head to fit: set fit_value_head=False"):
        PPO(gymnasium.make_vec("CartPole-v1", num_envs=2), num_steps=4, fit_value_head=True)
