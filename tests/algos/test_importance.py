"""Importance weights: their expected gradient and its variance by every sequence, and what an agent does with them."""

import math
from typing import get_args

import pytest
import torch

from algos import GRPO, PPO, GRPOConfig, PPOConfig, collect, importance
from algos.config import ImportanceWeightsName
from algos.importance import NAMED, weights_of, with_importance_weights
from tests.helpers.errors import refused
from tests.helpers.small_agents import cartpole, lm_policy, mlp_for
from tests.helpers.text_envs import text_env

ACTIONS, STEPS = 3, 3


def table(distance=0.6):
    """Log-probabilities of each step of every sequence, float64 ``[27, 3]``: π's and the sampler's; and the returns.

    Each step has its own distribution whatever came before.
    """
    generator = torch.Generator().manual_seed(1)
    sequences = torch.cartesian_prod(*[torch.arange(ACTIONS)] * STEPS)
    logits = torch.randn(STEPS, ACTIONS, generator=generator, dtype=torch.float64)
    noise = distance * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    columns = torch.arange(STEPS)
    policy, sampler = (x.log_softmax(-1)[columns, sequences] for x in (logits, logits + noise))
    returns = torch.randn(len(sequences), generator=generator, dtype=torch.float64)

    # ∇ log π of each step by the logits of its own distribution: one-hot minus probabilities
    gradient = torch.zeros(len(sequences), STEPS, STEPS, ACTIONS, dtype=torch.float64)
    for step in range(STEPS):
        gradient[:, step, step] = torch.eye(ACTIONS, dtype=torch.float64)[sequences[:, step]] - logits.softmax(-1)[step]
    return policy, sampler, gradient.flatten(2) * returns[:, None, None]


def expected(weight, sampler, gradients):
    """Mean of the weighted gradient over what the sampler does, and its variance (trace of the covariance)."""
    chance = sampler.sum(1).exp()
    estimates = (weight[..., None] * gradients).sum(1)
    mean = chance @ estimates
    return mean, (chance @ (estimates - mean).square().sum(1)).item()


LIMIT = 1.2
ORACLES = {
    "token_truncate": lambda p, m: (p / m).clamp(max=LIMIT),
    "token_mask": lambda p, m: torch.where(p <= LIMIT * m, p / m, 0.0),
    "two_sided_token_mask": lambda p, m: torch.where((p <= LIMIT * m) & (p >= 0.5 * m), p / m, 0.0),
    "sequence_truncate": lambda p, m: torch.minimum(p.prod(1), LIMIT * m.prod(1))[:, None] / m.prod(1)[:, None],
    "sequence_mask": lambda p, m: (p.prod(1) * (p.prod(1) <= LIMIT * m.prod(1)) / m.prod(1))[:, None],
    "geometric_truncate": lambda p, m: (p.prod(1) / m.prod(1)).pow(1 / STEPS).clamp(max=LIMIT)[:, None],
    "geometric_mask": lambda p, m: (
        (p.prod(1) <= LIMIT**STEPS * m.prod(1)) & (m.prod(1) <= LIMIT**STEPS * p.prod(1))
    ).double()[:, None],
}
"""The weights by their definition, from the probabilities of π and the sampler ``[27, 3]``."""


def test_a_config_names_every_function_and_each_has_an_oracle():
    assert {*get_args(ImportanceWeightsName)} == NAMED.keys() == ORACLES.keys()


@pytest.mark.parametrize("name", sorted(NAMED))
def test_the_expected_gradient_is_that_of_the_definition(name):
    """Also where the mask is False: those entries hold anything, and weigh nothing."""
    policy, sampler, gradients = table()
    mask = torch.ones(policy.shape, dtype=torch.bool)
    weight = NAMED[name](log_ratio=policy - sampler, mask=mask, limit=LIMIT)
    oracle = ORACLES[name](policy.exp(), sampler.exp()).expand(weight.shape)
    assert len(weight.unique()) > 1
    torch.testing.assert_close(expected(weight, sampler, gradients), expected(oracle, sampler, gradients))

    wider = torch.cat([policy - sampler, torch.full((27, 1), 7.0).double()], dim=1)
    mask = torch.cat([mask, torch.zeros(27, 1, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(
        NAMED[name](log_ratio=wider, mask=mask, limit=LIMIT), torch.nn.functional.pad(weight, (0, 1))
    )


def test_only_the_product_of_all_ratios_has_no_bias_and_bounds_buy_less_variance():
    policy, sampler, gradients = table()
    mask = torch.ones(policy.shape, dtype=torch.bool)
    exact, _ = expected(torch.ones_like(policy), policy, gradients)  # as if π had sampled
    bias = {}
    variance = {}
    cases = {
        "none": torch.ones_like(policy),
        "product": importance.sequence_truncate(log_ratio=policy - sampler, mask=mask, limit=math.inf),
        "ratio": importance.token_truncate(log_ratio=policy - sampler, mask=mask, limit=math.inf),
        "bounded product": importance.sequence_truncate(log_ratio=policy - sampler, mask=mask, limit=LIMIT),
        "bounded ratio": importance.token_truncate(log_ratio=policy - sampler, mask=mask, limit=LIMIT),
    }
    for name, weight in cases.items():
        mean, variance[name] = expected(weight, sampler, gradients)
        bias[name] = ((mean - exact).norm() / exact.norm()).item()
    assert bias["product"] < 1e-12
    assert min(bias[name] for name in cases if name != "product") > 1e-2
    assert variance["bounded product"] < variance["product"]
    assert variance["bounded ratio"] < variance["ratio"] < variance["product"]


@pytest.mark.parametrize("name", sorted(NAMED))
def test_weights_stay_finite_whatever_the_ratio_and_are_1_without_a_gap(name):
    mask = torch.ones(3, 2, dtype=torch.bool)
    extreme = NAMED[name](log_ratio=torch.tensor([[900.0, 900.0], [-900.0, -900.0], [0.0, 0.0]]), mask=mask)
    assert extreme.isfinite().all() and (extreme >= 0).all()
    assert extreme[2].tolist() == [1.0, 1.0]


# --- in an agent -----------------------------------------------------------------------------------------------------


def test_a_limit_alone_means_truncated_ratios_and_a_name_alone_its_own_limit():
    ratio = torch.tensor([[5.0, 2.5]]).log()
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert weights_of(PPOConfig()) is None
    limit_alone = weights_of(PPOConfig(max_importance_weight=3.0))
    assert limit_alone(log_ratio=ratio, mask=mask).tolist() == [[3.0, pytest.approx(2.5)]]
    name_alone = weights_of(PPOConfig(importance_weights="token_truncate"))
    assert name_alone(log_ratio=ratio, mask=mask).tolist() == [[2.0, 2.0]]
    both = GRPOConfig(importance_weights="sequence_mask", max_importance_weight=13.0)
    assert weights_of(both)(log_ratio=ratio, mask=mask).tolist() == [[pytest.approx(12.5, rel=1e-5)] * 2]


def sampled_with_a_gap(policy, env, **options):
    """A rollout whose log-probabilities are not the policy's."""
    rollout = collect(env, policy, seed=0, **options)
    noise = 0.3 * torch.randn(rollout.shape, generator=torch.Generator().manual_seed(0))
    rollout["log_prob"] = torch.where(rollout["mask"], (rollout["log_prob"] + noise).clamp(max=-1e-3), 0.0)
    return rollout


def test_rows_are_answers_for_a_language_model_and_single_steps_in_control():
    policy = lm_policy()
    rollout = sampled_with_a_gap(policy, text_env(), num_episodes=8)
    config = GRPOConfig(importance_weights="sequence_mask", max_importance_weight=1.3)
    weighed, metrics = with_importance_weights(rollout, policy=policy, config=config)
    mask = rollout["mask"]
    ratio = torch.where(mask, weighed["log_prob"] - rollout["log_prob"], 0.0).sum(1).exp()
    kept = torch.where(ratio <= 1.3, ratio, 0.0)
    assert 0 < (kept == 0).sum() < 8
    torch.testing.assert_close(weighed["importance_weight"], kept[:, None] * mask)
    dropped = ((kept == 0)[:, None] & mask).sum() / mask.sum()
    assert metrics["policy/importance_dropped"] == pytest.approx(dropped.item())

    env = cartpole()
    network = mlp_for(env)
    rollout = sampled_with_a_gap(network, env, num_steps=6)
    config = PPOConfig(importance_weights="sequence_truncate")
    weighed, _ = with_importance_weights(rollout, policy=network, config=config)
    ratio = (weighed["log_prob"] - rollout["log_prob"]).exp()
    torch.testing.assert_close(weighed["importance_weight"], ratio.clamp(max=3.0))


@pytest.mark.parametrize("name", sorted(NAMED))
def test_an_agent_trains_with_each_of_them(name):
    agent = GRPO(text_env(), lm_policy(), num_episodes=8, group_size=4, importance_weights=name)
    (metrics,) = agent.learn(8)
    assert metrics["policy/importance_weight"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["policy/importance_dropped"] == 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda *, log_ratio, mask: None, "returned None, expected one number"),
        (lambda *, log_ratio, mask: log_ratio.sum(-1), r"returned shape \(8,\), expected"),
        (lambda *, log_ratio, mask: log_ratio - 1, r"returned -\d.*, expected one number of at least 0"),
        (
            lambda *, log_ratio, mask: torch.full_like(log_ratio, torch.nan),
            "returned nan, expected one number",
        ),
    ],
)
def test_a_function_of_ones_own_is_checked(function, message):
    agent = PPO(text_env(), lm_policy(), num_steps=None, num_episodes=8, importance_weights=function)
    with refused(ValueError, "importance_weights " + message):
        agent.learn(8)


def test_limits_that_would_drop_every_step_are_refused():
    for name, limit in (("geometric_mask", 0.9), ("two_sided_token_mask", 0.4)):
        agent = GRPO(text_env(), lm_policy(), importance_weights=name, max_importance_weight=limit, num_episodes=8)
        with refused(ValueError, f"max_importance_weight is {limit}, expected more than"):
            agent.learn(8)


def test_wrong_choices_are_told_before_the_training():
    with refused(ValueError, "importance_weights is 'tis', expected a function, or one of 'token_truncate'"):
        PPOConfig(importance_weights="tis")
    with refused(ValueError, "max_importance_weight is 2.0, but .* has no argument limit"):
        PPOConfig(importance_weights=lambda *, log_ratio, mask: log_ratio.exp(), max_importance_weight=2.0)
