"""TRL's formulas, written out here, against what our configs and presets compute."""

import pytest
import torch

from algos import GRPO, GRPOConfig, collect
from tests.helpers.errors import refused
from tests.helpers.small_agents import gradients, lm_policy
from tests.helpers.text_envs import text_env
from textenv import Rewards
from textenv.envs.task import FunctionTask

STILL = dict(learning_rate=1e-30, max_grad_norm=1e9, num_episodes=8, group_size=4, num_epochs=1)
"""An update that moves nothing: its gradient can be read afterwards."""


def sampled_elsewhere(policy, gap=0.4):
    """A rollout whose log-probabilities are up to a nat from the policy's, as another engine's are, but below 0."""
    rollout = collect(text_env(), policy, num_episodes=8, group_size=4, seed=0)
    noise = gap * torch.randn(rollout.shape, generator=torch.Generator().manual_seed(0))
    rollout["log_prob"] = torch.where(rollout["mask"], (rollout["log_prob"] + noise).clamp(max=-1e-3), 0.0)
    rollout["reward"] = torch.where(rollout["mask"], torch.randn(rollout.shape, generator=torch.Generator()), 0.0)
    return rollout


# --- GRPO of TRL 1.16 ------------------------------------------------------------------------------------------------


def grpo_loss(log_prob, old, advantage, mask, *, level, low=0.2, high=0.2, weight=1.0):
    """``_compute_loss`` of its grpo_trainer.py for ``loss_type="grpo"``, without KL."""
    log_weight = log_prob - old
    if level == "sequence":
        log_weight = ((log_weight * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    ratio = log_weight.exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    per_token = -torch.min(ratio * advantage, clipped * advantage) * weight
    return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


@pytest.mark.parametrize("ours", ["clipped_policy_loss", "gspo_policy_loss"])
@pytest.mark.parametrize("high", [None, 0.28])
@pytest.mark.parametrize("most", [None, 1.2])
def test_the_clipped_losses_that_a_config_names_are_trls(ours, high, most):
    """Epsilon_high, importance_sampling_level and, with ``most``, vllm_importance_sampling_mode="token_truncate"."""
    policy = lm_policy()
    rollout = sampled_elsewhere(policy)
    options = dict(policy_loss=ours, clip_higher=high, max_importance_weight=most, ratio_tolerance=10.0)
    metrics = GRPO(text_env(), policy, GRPOConfig(**STILL, **options)).update(rollout)
    found = gradients(policy)
    policy.zero_grad()
    log_prob, mask = policy.evaluate(rollout).log_prob, rollout["mask"]
    old, weight = rollout["log_prob"], 1.0
    if most is not None:
        weight = (log_prob.detach() - old).exp().clamp(max=most)
        assert (weight[mask] == most).any() and (weight[mask] < 1).any()
        assert metrics["policy/importance_weight"] == pytest.approx(weight[mask].mean().item())
        assert metrics["policy/sampler_gap"] == pytest.approx((log_prob - old)[mask].abs().mean().item(), rel=1e-4)
        old = log_prob.detach()
    level = "sequence" if ours == "gspo_policy_loss" else "token"
    advantage = rollout["advantage"].sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    loss = grpo_loss(log_prob, old, advantage, mask, level=level, high=high or 0.2, weight=weight)
    loss.backward()
    expected = gradients(policy)
    assert max(x.abs().max() for x in found.values()) > 1e-2
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def gdpo_advantages(rewards, weights, group_size):
    """``multi_objective_aggregation="normalize_then_sum"`` of its grpo_trainer.py; NaN is None of a reward function."""

    def nanstd(x, **options):
        centred = x - x.nanmean(keepdim=True, **options)
        return (
            centred.square().nansum(keepdim=True, **options) / ((~x.isnan()).sum(keepdim=True, **options) - 1)
        ).sqrt()

    grouped = rewards.view(-1, group_size, len(weights))
    each = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, dim=1) + 1e-4)
    total = (each.view(-1, len(weights)) * torch.tensor(weights)).nansum(1)
    return (total - total.mean()) / (total.std() + 1e-4)


RIGHT = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
SHORT = [0.3, 0.25, None, 0.2, 0.1, None, 0.12, 0.4]


def several(right=RIGHT, short=SHORT, **options):
    """A rollout of 2 groups of 4 whose rewards these are, and GRPO that normalizes each of them."""
    functions = {"right": lambda completions: right, "short": (lambda completions: short, 0.5)}
    functions["logged"] = (lambda completions: [float(i) for i in range(8)], 0.0)
    env, policy = text_env(FunctionTask(["a b", "c"], Rewards(functions)), num_envs=8), lm_policy()
    agent = GRPO(env, policy, GRPOConfig(**STILL, normalize_each_reward=True), **options)
    return agent, collect(env, policy, num_episodes=8, group_size=4, seed=0)


def test_normalizing_each_reward_gives_trls_advantages():
    """Rewards of 1 and .5 of another size: the raw ones enter, None does not, and one of weight 0 adds nothing."""
    agent, rollout = several()
    agent.update(rollout)
    rewards = torch.tensor([[x, torch.nan if y is None else y, 9.0] for x, y in zip(RIGHT, SHORT, strict=True)])
    rewards[:, 2] = torch.arange(8)
    expected = gdpo_advantages(rewards, [1.0, 0.5, 0.0], 4)
    found = rollout["advantage"].sum(1) / rollout["mask"].sum(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_reward_that_is_the_same_for_all_does_not_matter_and_the_kl_is_charged_beside_the_rewards():
    """Two rewards of which one is constant: its weight is nothing's; β·KL is in deviations of a reward."""
    agent, rollout = several(short=[0.7] * 8, kl_coef=0.5)
    agent.penalty(rollout, agent.policy)
    rollout["kl"] = torch.where(rollout["mask"], torch.rand(rollout.shape, generator=torch.Generator()), 0.0)
    agent.update(rollout)
    each = torch.tensor(RIGHT).view(2, 4)
    kl = rollout["kl"].sum(1).view(2, 4)
    total = (each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-4) - 0.5 * kl
    total = (total + 0.5 * kl.mean(1, keepdim=True)).flatten()
    expected = (total - total.mean()) / (total.std() + 1e-4)
    found = rollout["advantage"].sum(1) / rollout["mask"].sum(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_one_reward_has_nothing_to_be_normalized_beside():
    agent = GRPO(text_env(), lm_policy(), GRPOConfig(**STILL, normalize_each_reward=True))
    with refused(ValueError, "normalize_each_reward is True", "single reward", "textenv.Rewards"):
        agent.learn(8)
