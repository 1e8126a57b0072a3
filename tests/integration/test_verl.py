"""Losses, advantages and importance weights against verl's and TRL's own functions, on equal numbers."""

import pytest
import torch

from algos import importance, losses
from algos.advantages import discounted_returns, whiten
from algos.losses import ClipCovLoss, KLCovLoss
from tests.helpers.packages import lazy_import

WHY = "pip install --no-deps -c constraints.txt verl trl codetiming omegaconf, as make does"
trl = lazy_import("trl.trainer.grpo_trainer", reason=WHY)
core_algos = lazy_import("verl.trainer.ppo.core_algos", reason=WHY)
rollout_corr_helper = lazy_import("verl.trainer.ppo.rollout_corr_helper", reason=WHY)

SHAPE = 7, 9


def numbers(seed=0):
    """Mask, old and new log-probabilities and advantages of some rows; 0 outside the mask, as verl has them."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(SHAPE, generator=generator) < 0.7
    mask[:, 0] = True
    old = -3 * torch.rand(SHAPE, generator=generator) * mask
    advantage = torch.randn(SHAPE, generator=generator) * mask
    new = old + 0.3 * torch.randn(SHAPE, generator=generator) * mask
    return mask, old, new, advantage


def gradient_of_verl(name, **options):
    """Gradient of a loss of verl by the new log-probabilities, mean over the tokens."""
    mask, old, new, advantage = numbers()
    new.requires_grad_()
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2, clip_ratio_low=0.2,
        clip_ratio_high=0.28, policy_loss=PolicyLossConfig(**options),
    )  # fmt: skip
    loss, _ = core_algos.get_policy_loss_fn(name)(old, new, advantage, mask.float(), "token-mean", config)
    loss.backward()
    return new.grad


def our_gradient(policy_loss, **options):
    """The same of a loss of ours, which is given its chosen steps if it chooses any."""
    mask, old, new, advantage = numbers()
    if hasattr(policy_loss, "select"):
        options["selected"] = policy_loss.select(
            log_prob=new, advantage=advantage, mask=mask, generator=torch.Generator()
        )
        assert 1 < options["selected"].sum() < mask.sum()
    new.requires_grad_()
    log_ratio = losses.log_ratio(log_prob=new, old_log_prob=old, mask=mask)
    loss = policy_loss(log_ratio=log_ratio, advantage=advantage, mask=mask, clip_range=0.2, **options)
    (loss * losses.token_mean(mask=mask)).sum().backward()
    return new.grad


@pytest.mark.parametrize(
    ("name", "policy_loss", "theirs", "ours"),
    [
        ("vanilla", losses.dual_clipped_policy_loss, {}, {"clip_higher": 0.28}),
        ("cispo", losses.cispo_policy_loss, {}, {"clip_higher": 0.28}),
        ("kl_cov", KLCovLoss(fraction=0.1, coef=0.5), {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.5}, {}),
        # All steps between the bounds, so that no random choice differs
        ("clip_cov", ClipCovLoss(fraction=1.0, low=0.1, high=5.0),
         {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}, {"clip_higher": 0.28}),
    ],
)  # fmt: skip
def test_the_gradient_of_a_loss_is_verls(name, policy_loss, theirs, ours):
    expected = gradient_of_verl(name, **theirs)
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(our_gradient(policy_loss, **ours), expected, atol=1e-7, rtol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("threshold", [0.01, 0.02])
def test_opsm_leaves_out_the_rows_that_trl_does(threshold):
    mask, old, new, _ = numbers()
    advantage = torch.randn(SHAPE[0], 1, generator=torch.Generator().manual_seed(1))
    kept = trl.GRPOTrainer.get_off_policy_mask(
        advantages=advantage, per_token_logps=new, sampling_per_token_logps=old, mask=mask.float(),
        off_policy_threshold=threshold,
    )  # fmt: skip
    assert 0 < kept.sum() < SHAPE[0]
    arguments = dict(log_ratio=new - old, advantage=advantage * mask, mask=mask, clip_range=0.2)
    expected = losses.clipped_policy_loss(**arguments) * kept
    assert torch.equal(losses.opsm_policy_loss(**arguments, threshold=threshold), expected)


@pytest.mark.parametrize(
    ("mode", "weights_of_steps"),
    [("token", importance.token_truncate), ("sequence", importance.sequence_truncate)],
)
def test_truncated_weights_are_verls(mode, weights_of_steps):
    mask, old, new, _ = numbers()
    expected, _ = rollout_corr_helper.compute_rollout_correction_weights(
        new - old, mask.float(), rollout_is=mode, rollout_is_threshold=1.2
    )
    found = weights_of_steps(log_ratio=new - old, mask=mask, limit=1.2)
    assert (found[mask] == 1.2).any() and (found[mask] < 1.2).any()
    torch.testing.assert_close(found, expected * mask)


def test_the_geometric_mask_is_verls():
    """Its ``seq_mean_k1`` keeps rows whose geometric mean is between two bounds."""
    mask, old, new, _ = numbers()
    expected, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        new - old, mask.float(), "seq_mean_k1", f"{1 / 1.1}_1.1"
    )
    assert 0 < expected.sum() < mask.sum()
    assert torch.equal(importance.geometric_mask(log_ratio=new - old, mask=mask, limit=1.1), expected)


def test_the_advantages_of_reinforce_plus_plus_are_verls():
    """But for the deviation, which there has n - 1 in place of n."""
    mask, _, _, reward = numbers()
    config = type("Config", (), {"gamma": 0.9})()
    expected, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(reward, mask.float(), config=config)
    ends = torch.zeros_like(mask)
    ends[:, -1] = True
    returns = discounted_returns(reward=reward, terminated=ends, truncated=torch.zeros_like(ends), mask=mask, gamma=0.9)
    count = mask.sum()
    torch.testing.assert_close(whiten(returns, mask=mask), expected * (count / (count - 1)).sqrt(), atol=1e-5, rtol=0)
