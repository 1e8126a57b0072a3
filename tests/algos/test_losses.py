"""Losses against numbers worked out by hand, value and gradient, and against torchrl's."""

import inspect
import math
from typing import get_args

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from algos.advantages import discounted_returns, gae
from algos.config import AggregationName, PolicyLossName, PPOConfig
from algos.losses import (
    NAMED,
    ClipCovLoss,
    KLCovLoss,
    cispo_policy_loss,
    clipped_policy_loss,
    dual_clipped_policy_loss,
    fixed_length_mean,
    gspo_policy_loss,
    log_ratio,
    opsm_policy_loss,
    policy_gradient_loss,
    sequence_mean,
    thresholded_policy_loss,
    token_mean,
    value_loss,
)
from algos.training.metrics import minibatch_means, ratio_metrics
from tests.helpers.models import WORDS
from tests.helpers.rollouts import junk

TRUE = torch.ones((), dtype=torch.bool)


def test_a_config_names_every_loss_and_aggregation():
    assert {*get_args(PolicyLossName), *get_args(AggregationName)} == NAMED.keys()


def slopes(loss, log_ratio, advantage, mask=None, **options):
    """Loss and its gradient by the log-ratio, entry by entry."""
    log_ratio = torch.as_tensor(log_ratio, dtype=torch.float64).clone().requires_grad_()
    advantage = torch.as_tensor(advantage, dtype=torch.float64)
    mask = TRUE.expand(log_ratio.shape) if mask is None else mask
    entries = loss(log_ratio=log_ratio, advantage=advantage, mask=mask, **options)
    entries.sum().backward()
    return entries.detach(), log_ratio.grad


def check(found, values, gradients):
    """Values and gradients, within the rounding of a ratio that was given by its logarithm."""
    for one, other in zip(found, (values, gradients), strict=True):
        torch.testing.assert_close(one, torch.tensor(other, dtype=torch.float64), atol=1e-6, rtol=0)


# --- by hand: the gradient by log π is that of ratio · A, for d ratio / d log π = ratio ------------------------------


def test_the_policy_gradient_is_minus_the_advantage():
    """-A log π: .5 · 3 = 1.5 and so on; the gradient is -A whatever log π is."""
    found = slopes(policy_gradient_loss, [-0.5, -2.0, 0.0], [3.0, -1.0, 7.0])
    check(found, [1.5, -2.0, 0.0], [-3.0, 1.0, -7.0])


@pytest.mark.parametrize(("higher", "outside"), [(None, 3), (0.3, 2), (0.05, 4)])
def test_clip_frac_counts_ratios_beyond_either_bound(higher, outside):
    """Below .8 is .7; above 1.2 are 1.25 and 1.4, above 1.3 only 1.4, and above 1.05 also 1.1."""
    batch = TensorDict({"log_weight": torch.full((5,), 0.2)}, batch_size=[5])
    log_ratio = torch.tensor([0.7, 0.85, 1.1, 1.25, 1.4]).log()
    metrics = ratio_metrics(batch, log_ratio, clip_range=0.2, clip_higher=higher)
    assert metrics["policy/clip_frac"].item() == pytest.approx(outside / 5)


def test_clip_higher_widens_only_the_upper_side():
    """ε = .2 below and .28 above (DAPO), A = ±2: 1.25 · 2 still counts, 1.3 · 2 is 1.28 · 2, below it is as ever.

    A > 0: min(r·A, clip·A) is 2.5, min(2.6, 2.56) without a gradient, and min(1.4, 1.6).
    A < 0: min(-2.6, -2.56) = -2.6 with its gradient, min(-1.4, -1.6) = -1.6 without one.
    """
    ratio, advantage = torch.tensor([1.25, 1.3, 0.7, 1.3, 0.7]).double(), [2.0, 2.0, 2.0, -2.0, -2.0]
    found = slopes(clipped_policy_loss, ratio.log(), advantage, clip_range=0.2, clip_higher=0.28)
    check(found, [-2.5, -2.56, -1.4, 2.6, 1.6], [-2.5, 0.0, -1.4, 2.6, 0.0])
    found = slopes(clipped_policy_loss, ratio.log(), advantage, clip_range=0.2)
    check(found, [-2.4, -2.4, -1.4, 2.6, 1.6], [0.0, 0.0, -1.4, 2.6, 0.0])


def test_the_dual_clip_bounds_only_negative_advantages():
    """Ye et al. 2020, eq. 5, c = 3: max(min(r·A, clip(r)·A), c·A) where A < 0.

    A = -2: r = 5 gives max(-10, -6) = -6, flat; r = 2 gives max(-4, -6) = -4, slope -A·r = 4; r = .5 gives
    max(min(-1, -1.6), -6) = -1.6, flat. A = 2: r = 5 gives min(10, 2.4); r = .5 gives 1. A = 0 gives 0.
    """
    ratio = torch.tensor([5.0, 2.0, 0.5, 5.0, 0.5, 5.0]).double()
    found = slopes(dual_clipped_policy_loss, ratio.log(), [-2.0, -2.0, -2.0, 2.0, 2.0, 0.0], clip_range=0.2)
    check(found, [6.0, 4.0, 1.6, -2.4, -1.0, 0.0], [0.0, 4.0, 0.0, 0.0, -1.0, 0.0])
    found = slopes(dual_clipped_policy_loss, ratio[:2].log(), [-2.0, -2.0], clip_range=0.2, limit=1.5)
    check(found, [3.0, 3.0], [0.0, 0.0])


def test_a_row_of_too_large_a_mean_ratio_adds_nothing():
    """Means of 15.5 (out), 9 (in), 4 over the one entry that counts (in); ε = 100, so that no ratio is clipped."""
    ratio = torch.tensor([[1.0, 30.0], [2.0, 16.0], [4.0, 1.0]]).double()
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    log_ratio = torch.where(mask, ratio.log(), 0.0)
    found = slopes(thresholded_policy_loss, log_ratio, torch.full((3, 2), 0.5), mask, clip_range=100.0)
    kept = [[0.0, 0.0], [-1.0, -8.0], [-2.0, 0.0]]
    check(found, kept, kept)
    found = slopes(thresholded_policy_loss, log_ratio, torch.full((3, 2), 0.5), mask, clip_range=100.0, threshold=3.0)
    check(found, [[0.0] * 2] * 3, [[0.0] * 2] * 3)


def test_gspo_has_one_ratio_a_row_with_a_shared_slope():
    """Geometric means 1.1 of 1.21 and 1, 2 of 4 and 1, and 1 of 2 and .5; ε = .2, A = 2 (rows 0, 1) and -1 (row 2).

    Row 0: -2.2 for each step, and by each log-ratio half of what both steps' losses slope: -2.2. Row 1: clipped to 1.2.
    """
    ratio = torch.tensor([[1.21, 1.0], [4.0, 1.0], [2.0, 0.5]]).double()
    advantage = torch.tensor([[2.0, 2.0], [2.0, 2.0], [-1.0, -1.0]])
    found = slopes(gspo_policy_loss, ratio.log(), advantage, clip_range=0.2)
    check(found, [[-2.2] * 2, [-2.4] * 2, [1.0] * 2], [[-2.2] * 2, [0.0] * 2, [1.0] * 2])
    found = slopes(gspo_policy_loss, ratio.log(), advantage, clip_range=0.2, clip_higher=1.5)
    check((found[0][1], found[1][1]), [-4.0] * 2, [-4.0] * 2)


def test_cispo_weighs_the_policy_gradient_by_a_clipped_ratio():
    """MiniMax 2025, eq. 4, A = ±2, ε = .2 and .28: the gradient is -A clip(r), so it is never 0; ε = 1 has no floor."""
    ratio = torch.tensor([0.5, 1.0, 1.5, 0.5, 1.5]).double()
    found = slopes(cispo_policy_loss, ratio.log(), [2.0, 2.0, 2.0, -2.0, -2.0], clip_range=0.2, clip_higher=0.28)
    gradients = [-1.6, -2.0, -2.56, 1.6, 2.56]
    check(found, (torch.tensor(gradients).double() * ratio.log()).tolist(), gradients)
    found = slopes(cispo_policy_loss, ratio.log(), [2.0] * 5, clip_range=1.0, clip_higher=0.28)
    assert found[1].tolist() == pytest.approx([-1.0, -2.0, -2.56, -1.0, -2.56])


def test_opsm_drops_bad_rows_that_the_policy_has_left():
    """Means of log π_old - log π: log 2 in row 0 and over the one entry of row 1, 0 in row 2; δ = .5, ε = 9.

    Only rows 0 (A = -1) and 1 (A = 1) are far enough, and only a negative advantage is left out.
    """
    ratio = torch.tensor([[0.5, 0.5], [0.5, 4.0], [0.5, 2.0]]).double()
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    log_ratio = torch.where(mask, ratio.log(), 0.0)
    advantage = torch.tensor([[-1.0, -1.0], [1.0, 0.0], [-1.0, -1.0]])
    found = slopes(opsm_policy_loss, log_ratio, advantage, mask, clip_range=9.0)
    kept = [[0.0, 0.0], [-0.5, 0.0], [0.5, 2.0]]
    check(found, kept, kept)
    found = slopes(opsm_policy_loss, log_ratio, advantage, mask, clip_range=9.0, threshold=0.7)
    kept = [[0.5, 0.5], [-0.5, 0.0], [0.5, 2.0]]
    check(found, kept, kept)


COVARIANCES = dict(
    log_prob=torch.tensor([-1.0, -2.0, -3.0, -2.0]), advantage=torch.tensor([3.0, 1.0, -2.0, -2.0]), mask=TRUE.expand(4)
)
"""Means -2 and 0, so the parts of the covariance are 3, 0, 2 and 0."""


def test_clip_cov_leaves_out_some_steps_between_its_bounds():
    """Of the parts 3, 0, 2, 0 two are between 1 and 5; half of four steps are both, a quarter is one, by the seed."""
    chosen = [
        ClipCovLoss(fraction=fraction).select(**COVARIANCES, generator=torch.Generator().manual_seed(seed))
        for fraction, seed in [(0.5, 0), *((0.25, seed) for seed in range(9))]
    ]
    assert chosen[0].tolist() == [True, False, True, False]
    assert {tuple(one.tolist()) for one in chosen[1:]} == {(True, False, False, False), (False, False, True, False)}
    nothing = ClipCovLoss(low=3.5).select(**COVARIANCES, generator=torch.Generator())
    assert nothing.tolist() == [False] * 4
    found = slopes(ClipCovLoss(), [0.0] * 4, COVARIANCES["advantage"], clip_range=0.2, selected=chosen[0])
    check(found, [0.0, -1.0, 0.0, 2.0], [0.0, -1.0, 0.0, 2.0])


def test_kl_cov_charges_the_steps_of_largest_covariance():
    """Half of the steps: those of 3 and 2. At r = e the loss is -A e, and β (1 - 1e-4) more for those, slope β.

    Within rounding of r = 1 the penalty has no slope.
    """
    selected = KLCovLoss(fraction=0.5).select(**COVARIANCES, generator=torch.Generator())
    assert selected.tolist() == [True, False, True, False]
    found = slopes(KLCovLoss(coef=0.7), [1.0] * 4, COVARIANCES["advantage"], clip_range=0.2, selected=selected)
    gradients = [-3 * math.e + 0.7, -math.e, 2 * math.e + 0.7, 2 * math.e]
    check((found[0] + 0.7e-4 * selected, found[1]), gradients, gradients)
    near = slopes(KLCovLoss(), [5e-5, 0.0, -5e-5, 0.0], [0.0] * 4, clip_range=0.2, selected=selected)
    check(near, [0.0] * 4, [0.0] * 4)


@pytest.mark.parametrize(
    "make", [lambda: ClipCovLoss(fraction=0), lambda: ClipCovLoss(low=5, high=1), lambda: KLCovLoss(fraction=2),
             lambda: KLCovLoss(coef=-1)]
)  # fmt: skip
def test_numbers_that_choose_nothing_are_refused(make):
    with pytest.raises(ValueError, match="expected a fraction above 0 and at most 1"):
        make()


def test_a_class_in_place_of_its_object_is_told():
    with pytest.raises(ValueError, match=r"policy_loss is the class ClipCovLoss, expected .*ClipCovLoss\(\)"):
        PPOConfig(policy_loss=ClipCovLoss)


def test_steps_are_chosen_among_the_true_entries_only():
    mask = torch.tensor([[True, False], [True, True]])
    log_prob = torch.tensor([[-1.0, 90.0], [-3.0, -2.0]])
    advantage = torch.tensor([[1.0, 90.0], [-1.0, 0.0]])
    for loss in (ClipCovLoss(fraction=1.0, low=0.5), KLCovLoss(fraction=0.7)):
        selected = loss.select(log_prob=log_prob, advantage=advantage, mask=mask, generator=torch.Generator())
        assert selected.tolist() == [[True, False], [True, False]]


def test_for_the_threshold_a_single_step_is_a_row():
    ratio = torch.tensor([1.0, 9.0, 11.0]).double()
    found = slopes(thresholded_policy_loss, ratio.log(), [1.0, 1.0, 1.0], clip_range=100.0)
    check(found, [-1.0, -9.0, 0.0], [-1.0, -9.0, 0.0])


@pytest.mark.parametrize(
    ("loss", "options"), [(dual_clipped_policy_loss, {"limit": 1.0}), (thresholded_policy_loss, {"threshold": 0.5})]
)
def test_bounds_that_forbid_the_old_policy_are_refused(loss, options):
    with pytest.raises(ValueError, match=r"expected a ratio above 1"):
        slopes(loss, [0.0], [1.0], clip_range=0.2, **options)


def test_a_worse_clipped_value_has_no_gradient():
    """Target 3, old value 0, range .5: the clipped value is .5 for 2, .1 for .1 and -.5 for -1.

    Errors 1 against 6.25, 8.41 against 8.41 and 16 against 12.25, halved; slope value - target where it is the worse.
    """
    value = torch.tensor([2.0, 0.1, -1.0], dtype=torch.float64, requires_grad=True)
    mask, target, old = TRUE.expand(3), torch.full((3,), 3.0).double(), torch.zeros(3).double()
    entries = value_loss(value=value, value_target=target, mask=mask, old_value=old, clip_range=0.5)
    entries.sum().backward()
    check((entries.detach(), value.grad), [3.125, 4.205, 8.0], [0.0, -2.9, -4.0])


ROWS = torch.tensor([[True, True, True, True], [False, True, False, False], [False] * 4])
"""A row of 4 entries, a row of 1 and an empty row."""


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        (token_mean, [1 / 5, 1 / 5]),  # 5 entries
        (sequence_mean, [1 / 4 / 2, 1 / 1 / 2]),  # over its own length, over 2 rows that have any
        (lambda *, mask: fixed_length_mean(mask=mask, length=4), [1 / 4 / 2, 1 / 4 / 2]),  # over 4, whatever they have
    ],
    ids=["token_mean", "sequence_mean", "fixed_length_mean"],
)
def test_aggregations_weigh_entries_as_by_hand(aggregation, weights):
    """Loss of -A log π with A = 1, 2, 3, 4 and 5, log π = -1; the gradient of an entry is -A times its weight."""
    long, short = weights
    weight = aggregation(mask=ROWS)
    expected = torch.tensor([[long] * 4, [0, short, 0, 0], [0.0] * 4])
    torch.testing.assert_close(weight, expected)
    advantage = torch.tensor([[1.0, 2, 3, 4], [9, 5, 9, 9], [9, 9, 9, 9]])
    log_prob = torch.full((3, 4), -1.0, requires_grad=True)
    entries = policy_gradient_loss(log_ratio=log_prob, advantage=advantage, mask=ROWS)
    loss = (2.0 * entries * weight).sum()
    assert loss.item() == pytest.approx(2 * (10 * long + 5 * short))
    batch = TensorDict({"log_weight": token_mean(mask=ROWS)}, batch_size=ROWS.shape)
    metrics = minibatch_means(batch, {"policy/loss": entries})
    assert metrics["policy/loss"].item() == pytest.approx(15 / 5)  # the log has the mean over the entries
    loss.backward()
    torch.testing.assert_close(log_prob.grad, -2 * advantage * expected)


@pytest.mark.parametrize(
    "aggregation", [token_mean, sequence_mean, lambda *, mask: fixed_length_mean(mask=mask, length=3)]
)
def test_a_batch_without_entries_weighs_nothing(aggregation):
    assert aggregation(mask=torch.zeros(2, 3, dtype=torch.bool)).tolist() == [[0.0] * 3] * 2


CLIPPED = dict(clip_range=0.2)
POLICY_LOSSES = [
    (policy_gradient_loss, {}),
    (clipped_policy_loss, CLIPPED | dict(clip_higher=0.28)),
    (dual_clipped_policy_loss, CLIPPED | dict(limit=1.5)),
    (thresholded_policy_loss, CLIPPED | dict(threshold=1.3)),
    (gspo_policy_loss, CLIPPED | dict(clip_higher=0.28)),
    (cispo_policy_loss, CLIPPED | dict(clip_higher=0.28)),
    (opsm_policy_loss, CLIPPED | dict(threshold=0.1)),
]


@pytest.mark.parametrize(("loss", "options"), POLICY_LOSSES, ids=lambda x: getattr(x, "__name__", ""))
def test_no_policy_loss_looks_outside_the_mask(loss, options):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(6, 9, generator=generator) < 0.5
    advantage, log_ratio = (torch.randn(6, 9, generator=generator) * mask for _ in range(2))
    expected = slopes(loss, log_ratio, advantage, mask, **options)
    found = slopes(loss, log_ratio, torch.where(mask, advantage, junk(mask.shape)), mask, **options)
    assert (expected[0] != 0).sum() > 5 and (expected[0][~mask] == 0).all() and (expected[1][~mask] == 0).all()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


# --- torchrl ---------------------------------------------------------------------------------------------------------


def columns(n=200, seed=0):
    """Random states of 6 features, actions of 5, advantages, targets."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDict(
        {
            "observation": torch.randn(n, 6, generator=generator),
            "action": torch.randint(5, (n,), generator=generator),
            "advantage": torch.randn(n, 1, generator=generator),
            "value_target": torch.randn(n, 1, generator=generator),
        },
        batch_size=[n],
    )


def networks(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(6, 5), nn.Linear(6, 1)


def torchrl_networks(actor, critic):
    probabilistic = ProbabilisticTensorDictSequential(
        TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )  # fmt: skip
    return probabilistic, TensorDictModule(critic, in_keys=["observation"], out_keys=["state_value"])


def gradient_of(loss, *modules):
    return torch.autograd.grad(loss, [p for module in modules for p in module.parameters()])


@pytest.mark.parametrize("kind", ["A2CLoss", "ReinforceLoss"])
def test_policy_and_value_losses_agree_with_torchrl(kind):
    """Value and the gradient of every weight. Our entropy bonus against A2CLoss's too, with both coefficients."""
    import torchrl.objectives as objectives

    data, (actor, critic) = columns(), networks()
    options = dict(entropy_coeff=0.03, critic_coeff=0.5) if kind == "A2CLoss" else {}
    theirs = getattr(objectives, kind)(
        *torchrl_networks(actor, critic), loss_critic_type="l2", functional=False, **options
    )(data)
    expected = sum(theirs[name] for name in sorted(theirs.keys()) if name.startswith("loss_"))

    mask = TRUE.expand(len(data))
    log_probs = actor(data["observation"]).log_softmax(-1)
    log_prob = log_probs.gather(1, data["action"][:, None])[:, 0]
    policy = policy_gradient_loss(log_ratio=log_prob, advantage=data["advantage"][:, 0], mask=mask)
    error = value_loss(value=critic(data["observation"])[:, 0], value_target=data["value_target"][:, 0], mask=mask)
    # Ours is half the squared error: .5 · 2 · half is the coefficient .5 of the whole, and 2 that of 1.
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    vf_coef, ent_coef = (1.0, 0.03) if options else (2.0, 0.0)
    found = ((policy + vf_coef * error - ent_coef * entropy) * token_mean(mask=mask)).sum()
    torch.testing.assert_close(found, expected.reshape(()), atol=1e-5, rtol=0)
    for ours, other in zip(gradient_of(found, actor, critic), gradient_of(expected, actor, critic), strict=True):
        torch.testing.assert_close(ours, other, atol=1e-6, rtol=1e-4)


class Answers:
    """What torchrl's GRPOLoss asks of a distribution over whole sequences."""

    def __init__(self, logits, mask):
        self.log_probs, self.mask = logits.log_softmax(-1), mask

    def log_prob(self, action):
        return self.log_probs.gather(-1, action[..., None])[..., 0]


class Actor(nn.Module):
    """Logits that are free numbers, ``[B, T, n]``."""

    def __init__(self, logits, mask):
        super().__init__()
        self.logits, self.mask = nn.Parameter(logits.clone()), mask

    def get_dist(self, tensordict, logits_key=None):
        return Answers(self.logits, self.mask)


@pytest.mark.parametrize("high", [0.2, 0.28])
@pytest.mark.parametrize("aggregation", [token_mean, sequence_mean])
def test_the_clipped_loss_agrees_with_torchrls_grpo(aggregation, high):
    """GRPOLoss itself, on rows of unequal length: its token_mean and prompt_mean are our token and sequence means."""
    from torchrl.objectives.llm import GRPOLoss

    generator = torch.Generator().manual_seed(1)
    rows, steps, size = 6, 7, len(WORDS)
    logits = torch.randn(rows, steps, size, generator=generator)
    lengths = torch.tensor([7, 1, 4, 2, 5, 3])
    mask = torch.arange(steps) < lengths[:, None]
    action = torch.randint(size, (rows, steps), generator=generator)
    log_prob = logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]
    old = log_prob + 0.4 * torch.randn(rows, steps, generator=generator)
    advantage = torch.randn(rows, 1, generator=generator).expand(rows, steps)
    data = TensorDict(
        {("tokens", "full"): action, ("log_probs", "full"): old, "advantage": advantage[..., None]}, batch_size=[rows]
    )
    actor = Actor(logits, mask)
    how = "token_mean" if aggregation is token_mean else "prompt_mean"
    theirs = GRPOLoss(actor, clip_epsilon=(0.2, high), aggregation=how, entropy_bonus=False, masking_strategy="generic")
    expected = theirs(data).loss_objective.reshape(())

    log_prob = actor.logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]
    log_ratio = torch.where(mask, log_prob - old, 0.0)
    entries = clipped_policy_loss(log_ratio=log_ratio, advantage=advantage, mask=mask, clip_range=0.2, clip_higher=high)
    found = (entries * aggregation(mask=mask)).sum()
    assert (log_ratio.exp() > 1.28).sum() >= 3 and (log_ratio.exp() < 0.8).sum() >= 3
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    (ours,), (other,) = gradient_of(found, actor), gradient_of(expected, actor)
    torch.testing.assert_close(ours, other, atol=1e-6, rtol=0)
    assert other.abs().max() > 1e-2


FUNCTIONS = [gae, discounted_returns, log_ratio, value_loss, *(loss for loss, _ in POLICY_LOSSES)]


def arguments(function, shape=(4, 1)):
    """Valid arguments of a loss or estimator, by their names."""
    no, yes = torch.zeros(shape, dtype=torch.bool), torch.ones(shape, dtype=torch.bool)
    columns = {"terminated": no, "truncated": no, "mask": yes, "gamma": 0.9, "gae_lambda": 0.9, "clip_range": 0.2}
    columns |= {"clip_higher": None, "limit": 3.0, "threshold": 10.0}
    return {name: columns.get(name, torch.ones(shape)) for name in inspect.signature(function).parameters}


def test_losses_and_gradients_ignore_junk_off_the_mask():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 9, generator=generator) < 0.5
    names = ("log_prob", "old_log_prob", "advantage", "value", "value_target", "old_value")
    clean = {name: torch.randn(4, 9, generator=generator) * mask for name in names}
    outside = torch.where(mask, 0.0, junk(mask.shape))
    found = []
    for columns in (clean, {name: x + outside.roll(i, 0) * ~mask for i, (name, x) in enumerate(clean.items())}):
        dirty = {name: torch.where(mask, clean[name], x).requires_grad_() for name, x in columns.items()}
        ratios = log_ratio(log_prob=dirty["log_prob"], old_log_prob=dirty["old_log_prob"], mask=mask)
        loss = clipped_policy_loss(log_ratio=ratios, advantage=dirty["advantage"], mask=mask, clip_range=0.2)
        error = value_loss(**{name: dirty[name] for name in names[3:]}, mask=mask, clip_range=0.3)
        (loss + error).sum().backward()
        found.append([loss, error, dirty["log_prob"].grad, dirty["value"].grad])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and (one[~mask] == 0).all() and (one != 0).any()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mask_that_is_not_bool_raises(function, dtype):
    right = arguments(function)
    function(**right)
    with pytest.raises(TypeError, match="expected torch.bool"):
        function(**(right | {"mask": right["mask"].to(dtype)}))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_unequal_shapes_raise_and_both_are_printed(function):
    right = arguments(function)
    tensors = [name for name, x in right.items() if isinstance(x, torch.Tensor)]
    for name in tensors:
        # [B] against [B, 1] would broadcast to [B, B] without a word.
        with pytest.raises(ValueError, match=r"(?s)(?=.*\(4,\))(?=.*\(4, 1\))"):
            function(**(right | {name: right[name][:, 0]}))


def test_clipped_value_loss_without_old_value_raises():
    right = arguments(value_loss)
    with pytest.raises(ValueError, match="old_value"):
        value_loss(**(right | {"old_value": None}))


def torchrl_losses(data, *, clip_value):
    """Policy and value loss by torchrl, of a softmax policy and values that are its networks' very outputs."""
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
    from torch import nn
    from torchrl.objectives import ClipPPOLoss

    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Identity(), in_keys=["logits_in"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )
    critic = TensorDictModule(nn.Identity(), in_keys=["value_in"], out_keys=["state_value"])
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=0.2, entropy_bonus=False, critic_coeff=0.5, loss_critic_type="l2",
        normalize_advantage=False, clip_value=clip_value, reduction="none",
    )  # fmt: skip
    found = loss(data)
    return found["loss_objective"], found["loss_critic"]


@pytest.mark.parametrize("clip_value", [None, 0.3])
def test_losses_agree_with_torchrl(clip_value):
    generator = torch.Generator().manual_seed(0)
    n, mask = 400, torch.ones(400, dtype=torch.bool)
    logits, old, value, target = (torch.randn(n, k, generator=generator) for k in (5, 1, 1, 1))
    action = torch.randint(5, (n,), generator=generator)
    log_prob = logits.log_softmax(-1).gather(1, action[:, None])[:, 0]
    old_log_prob = log_prob + 0.4 * torch.randn(n, generator=generator)
    advantage = torch.randn(n, generator=generator)
    data = TensorDict(
        {"logits_in": logits, "value_in": value, "state_value": old, "action": action, "action_log_prob": old_log_prob,
         "advantage": advantage[:, None], "value_target": target}, batch_size=[n],
    )  # fmt: skip
    objective, critic = torchrl_losses(data, clip_value=clip_value)
    ratios = log_ratio(log_prob=log_prob, old_log_prob=old_log_prob, mask=mask)
    ours = clipped_policy_loss(log_ratio=ratios, advantage=advantage, mask=mask, clip_range=0.2)
    assert ((ratios.exp() - 1).abs() > 0.2).sum() > 50
    torch.testing.assert_close(ours, objective.reshape(n), atol=1e-5, rtol=0)
    found = value_loss(
        value=value[:, 0], value_target=target[:, 0], mask=mask, old_value=old[:, 0], clip_range=clip_value
    )
    torch.testing.assert_close(found, critic.reshape(n), atol=1e-5, rtol=0)
