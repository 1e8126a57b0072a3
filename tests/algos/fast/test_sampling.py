"""NumPy draws the actions that torch draws."""

import inspect

import numpy as np
import pytest
import torch
from gymnasium import spaces

from algos import MLPPolicy
from algos.fast import sampling
from algos.policies import distributions
from tests.helpers.rollouts import draws


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "best"])
def test_numpy_draws_torchs_actions_from_its_noise(deterministic):
    logits, masked = 3 * draws(40, 5, dtype=torch.float32), draws(40, 5) > -0.5
    masked[:, 2] = True
    plain = inspect.unwrap(distributions.draw)
    for some in (logits, logits.masked_fill(~masked, torch.finfo(torch.float32).min)):
        one, other = (torch.Generator().manual_seed(5) for _ in range(2))
        for _ in range(20):
            action, log_prob = sampling.draw(plain, some, one, deterministic)
            expected, expected_log_prob = plain(some, other, deterministic)
            assert torch.equal(action, expected) and action.dtype == torch.int64
            torch.testing.assert_close(log_prob, expected_log_prob, atol=1e-5, rtol=0)
        assert torch.equal(one.get_state(), other.get_state())


def test_non_finite_logits_draw_as_torch_unwarned():
    """It is found, and named, where the rollout is checked."""
    policy = MLPPolicy(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3))
    for bad in (float("nan"), float("inf"), 3e38):
        policy.actor[0].weight.data.fill_(bad)
        step = policy.act(np.ones((2, 2), dtype=np.float32))
        assert step.action.shape == (2,)
    policy.actor[-1].bias.data[1] = float("inf")
    assert policy.act(np.ones((2, 2), dtype=np.float32)).log_prob.isnan().all()
