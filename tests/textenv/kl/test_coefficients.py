"""Coefficients of the penalty: adaptive and scheduled ones by hand, saved and restored."""

import pytest
import torch
from tensordict import TensorDict

from algos import PPO, PPOConfig
from algos.evaluation import summarise
from algos.training.save import read_description
from tests.helpers.kl_cases import control_case, perturbed, text_case
from tests.helpers.small_agents import agent_of
from textenv import (
    AdaptiveCoefficient,
    KLPenalty,
    ScheduledCoefficient,
)


def rollout_of(*rows, done=True):
    """Rows of KL values, each an episode; None is a step that was not the policy's own."""
    mask = torch.tensor([[x is not None for x in row] for row in rows])
    ended = torch.zeros_like(mask)
    ended[:, -1] = done
    kl = torch.tensor([[torch.nan if x is None else x for x in row] for row in rows])
    columns = {"kl": kl, "mask": mask, "terminated": ended, "truncated": torch.zeros_like(mask)}
    return TensorDict(columns, batch_size=list(mask.shape))


# Two episodes a rollout, so nats an episode are half the sum: 12, 6.6, 3, -1 and 6, of a target of 6.
TRACE = [
    rollout_of([5.0, None, 11.0], [8.0, None, 0.0]),
    rollout_of([5.2, 1.0, 1.0], [None, 3.0, 3.0]),
    rollout_of([2.0, 1.0, 1.0], [1.0, 0.0, 1.0]),
    rollout_of([-1.0, 0.0, 0.5], [-1.0, 0.0, -0.5]),
    rollout_of([6.0, None, 0.0], [5.0, 0.5, 0.5]),
]
# e = .2 (clipped from 1), .1, -.2 (from -.5), -.2 (from -1.17), 0; β *= 1 + .1·e.
BETAS = [0.1 * 1.02, 0.1 * 1.02 * 1.01, 0.1 * 1.02 * 1.01 * 0.98, 0.1 * 1.02 * 1.01 * 0.98**2]
BETAS.append(BETAS[-1])


def test_the_adaptive_coefficient_by_hand():
    penalty = KLPenalty(None, AdaptiveCoefficient(0.1, target=6.0))
    for rollout, expected in zip(TRACE, BETAS, strict=True):
        penalty.update(rollout)
        assert penalty.coef == pytest.approx(expected, rel=1e-6)


def test_the_adaptive_coefficient_saturates():
    for kl, factor in ((1e6, 1.02), (-1e6, 0.98), (7.2, 1.02), (4.8, 0.98), (6.6, 1.01)):
        coefficient = AdaptiveCoefficient(0.1, target=6.0)
        coefficient.update(kl=kl, steps=1)
        assert coefficient.value == pytest.approx(0.1 * factor, rel=1e-9)


def test_unfinished_episodes_count_when_they_end():
    penalty = KLPenalty(None, AdaptiveCoefficient(0.1, target=6.0))
    penalty.update(rollout_of([3.0, 1.2], done=False))
    assert penalty.coef == 0.1
    penalty.update(rollout_of([1.2, 1.2]))  # 6.6 nats in one episode
    assert penalty.coef == pytest.approx(0.101)
    penalty.update(rollout_of([3.0, 3.0]))  # the 4.2 of before are not counted twice
    assert penalty.coef == pytest.approx(0.101)


def test_the_coefficient_is_saved_with_the_agent(tmp_path):
    env, policy, _ = control_case()
    penalty = KLPenalty(policy.reference(), AdaptiveCoefficient(0.1, target=6.0))
    for rollout in TRACE[:3]:
        penalty.update(rollout)
    penalty.update(rollout_of([4.0, 1.0], done=False))
    PPO(env, policy, PPOConfig(), penalty=penalty).save(tmp_path)
    restored = KLPenalty(policy.reference(), AdaptiveCoefficient(0.1, target=6.0))
    restored.load_state_dict(read_description(tmp_path)["penalty"])
    assert restored.coef == penalty.coef != 0.1
    for rollout in TRACE[3:]:
        penalty.update(rollout)
        restored.update(rollout)
        assert restored.coef == penalty.coef
    with pytest.raises(ValueError, match="AdaptiveCoefficient expects .'value'.*another kind"):
        restored.load_state_dict(KLPenalty(None, ScheduledCoefficient(1.0, 0.0, 5)).state_dict())


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "place"), [("k1", "reward"), ("exact", "loss")])
def test_an_update_uses_the_coefficient_before_it(name, place):
    env, policy, _ = text_case()
    penalty = KLPenalty(perturbed(policy), AdaptiveCoefficient(0.2, target=0.5), name, place)
    history = [row for _ in range(3) for row in agent_of(env, policy, penalty=penalty).learn(1)]
    expected = AdaptiveCoefficient(0.2, target=0.5)
    for row in history:
        assert row["reference/coefficient"] == pytest.approx(expected.value)
        taken = row["episode/return"] - row["episode/penalised_return"]
        assert taken == pytest.approx(expected.value * row["reference/kl"] * (place == "reward"), abs=1e-5)
        if place == "loss":  # one epoch of one minibatch
            assert row["reference/loss"] == pytest.approx(expected.value * row["reference/kl_per_step"], rel=1e-4)
        expected.update(kl=row["reference/kl"], steps=0)
    assert penalty.coef == pytest.approx(expected.value) and expected.value != 0.2


def test_measuring_does_not_adapt_the_coefficient():
    env, policy, _ = text_case()
    env.penalty = KLPenalty(perturbed(policy), AdaptiveCoefficient(0.2, target=0.5))
    assert abs(summarise(env, policy, num_episodes=4)["kl"]) > 0.1
    state = env.penalty.state_dict()
    assert state.pop("reference") and state == {"coefficient": {"value": 0.2}, "open_kl": 0.0}


def test_a_scheduled_coefficient_is_linear_in_steps():
    penalty = KLPenalty(None, ScheduledCoefficient(0.4, 0.2, steps=8))
    found = []
    for _ in range(4):
        penalty.update(rollout_of([1.0, None, 1.0], [1.0, None, None]))  # three True entries
        found.append(penalty.coef)
    assert found == pytest.approx([0.325, 0.25, 0.2, 0.2])


def test_coefficients_out_of_range_are_refused():
    for make in (
        lambda: AdaptiveCoefficient(0.0, 6.0),
        lambda: AdaptiveCoefficient(0.1, -1.0),
        lambda: AdaptiveCoefficient(0.1, 6.0, gain=5.0),
        lambda: ScheduledCoefficient(0.1, -0.1, 5),
        lambda: ScheduledCoefficient(0.1, 0.1, 0),
        lambda: KLPenalty(None, float("nan")),
    ):
        with pytest.raises(ValueError, match="expected"):
            make()
