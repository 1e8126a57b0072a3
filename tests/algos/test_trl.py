"""TRL's formulas, written out here, against what our configs and presets compute."""

import pytest
import torch

from algos import GRPO, GRPOConfig, collect
from tests.helpers.small_agents import gradients, lm_policy
from tests.helpers.text_envs import text_env

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
