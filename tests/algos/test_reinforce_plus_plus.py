"""REINFORCE++: its advantages and its gradient against the paper's formulas, written out."""

import numpy as np
import pytest
import torch

from algos import REINFORCEPlusPlus, collect
from tests.helpers.models import make_gpt2
from tests.helpers.small_agents import gradients, lm_policy
from tests.helpers.text_envs import text_env
from textenv import KLPenalty

STILL = dict(learning_rate=1e-30, max_grad_norm=1e9, num_episodes=8, num_epochs=1, minibatch_size=8, gamma=0.9)
"""An update that moves nothing: its gradient can be read afterwards."""


def whitened_returns(reward, mask, gamma):
    """Equations 7 and 8: discounted sums of what is still to come, mean 0 and deviation 1 over all tokens."""
    returns = np.zeros(reward.shape)
    for row in range(len(reward)):
        later = 0.0
        for step in reversed(np.flatnonzero(mask[row])):
            later = reward[row, step] + gamma * later
            returns[row, step] = later
    every = returns[mask]
    return np.where(mask, (returns - every.mean()) / every.std(), 0.0)


def scored_rollout(policy, *, kl_coef):
    """Eight answers with a reward at each token, and the KL to another model charged at each."""
    rollout = collect(text_env(), policy, num_episodes=8, seed=0)
    noise = torch.randn(rollout.shape, generator=torch.Generator().manual_seed(1))
    rollout["reward"] = torch.where(rollout["mask"], noise, 0.0)
    KLPenalty(lm_policy(lambda: make_gpt2(seed=5)).reference(), kl_coef, "k1")(rollout, policy)
    return rollout


def test_the_advantage_is_the_whitened_return_with_the_kl_in_it():
    policy = lm_policy()
    rollout = scored_rollout(policy, kl_coef=0.3)
    assert (rollout["kl"][rollout["mask"]] != 0).all()
    expected = whitened_returns(rollout["reward"].double().numpy(), rollout["mask"].numpy(), gamma=0.9)
    agent = REINFORCEPlusPlus(text_env(), policy, **STILL)
    batches = []

    def recorded_loss(batch, **options):
        batches.append(batch)
        return REINFORCEPlusPlus.loss(agent, batch, **options)

    agent.loss = recorded_loss
    agent.update(rollout)
    (batch,) = batches
    np.testing.assert_allclose(batch["advantage"].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("clip_higher", [None, 0.28])
def test_the_gradient_is_that_of_the_clipped_objective(clip_higher):
    """Equation 6, with probabilities of another policy as π_old, so that some ratios are clipped."""
    policy = lm_policy()
    rollout = scored_rollout(policy, kl_coef=0.3)
    noise = 0.3 * torch.randn(rollout.shape, generator=torch.Generator().manual_seed(2))
    rollout["log_prob"] = torch.where(rollout["mask"], (rollout["log_prob"] + noise).clamp(max=-1e-3), 0.0)
    advantage = whitened_returns(rollout["reward"].double().numpy(), rollout["mask"].numpy(), gamma=0.9)
    old_log_prob = rollout["log_prob"].clone()
    agent = REINFORCEPlusPlus(text_env(), policy, **STILL, clip_higher=clip_higher, ratio_tolerance=10.0)
    agent.update(rollout)
    ours = gradients(policy)

    policy.zero_grad()
    ratio = (policy.evaluate(rollout).log_prob - old_log_prob).exp()
    clipped = ratio.clamp(0.8, 1 + (clip_higher or 0.2))
    advantage = torch.from_numpy(advantage).float()
    assert ((ratio != clipped) & rollout["mask"]).any()
    objective = torch.minimum(ratio * advantage, clipped * advantage)[rollout["mask"]].mean()
    (-objective).backward()
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
