"""GAE and whitening, by hand, by torchrl, and outside the mask."""

import inspect

import pytest
import torch
from tensordict import TensorDict

from algos import advantages, losses
from algos.advantages import (
    discounted_returns,
    gae,
    lambda_by_length,
    leave_one_out,
    standardize_in_group,
    subtract_mean,
    whiten,
)
from tests.helpers.rollouts import junk, random_rollout
from textenv.rollout import following, masked_mean

GAMMA, LAMBDA = 0.9, 0.8


def random_columns(rows, steps, seed=0):
    """Random figures and ends; nothing is padded."""
    generator = torch.Generator().manual_seed(seed)
    columns = {name: torch.randn(rows, steps, generator=generator) for name in ("reward", "value", "next_value")}
    end = torch.rand(rows, steps, generator=generator)
    return columns | {"terminated": end < 0.1, "truncated": end > 0.9}


def gae_by_hand(columns):
    """One sequence without gaps, in plain Python: Schulman et al. 2016, eq. 16."""
    advantage, found = 0.0, []
    for t in reversed(range(len(columns["reward"]))):
        r, v, after, stop, cut = (columns[k][t].item() for k in ("reward", "value", "next_value", *ENDS))
        delta = r + (0.0 if stop else GAMMA * after) - v
        advantage = delta + (0.0 if stop or cut else GAMMA * LAMBDA * advantage)
        found.append(advantage)
    return torch.tensor(found[::-1])


ENDS = ("terminated", "truncated")


def test_gae_equals_hand_worked_numbers():
    """γ .5, λ .5; rewards 1 2 4, values 1 1 1, V after 1 1 8; terminated, truncated or not at the last."""
    for stop, cut, last in [(True, False, 3.0), (False, True, 7.0), (False, False, 7.0)]:
        advantage, target = gae(
            reward=torch.tensor([[1.0, 2.0, 4.0]]), value=torch.ones(1, 3), next_value=torch.tensor([[1.0, 1.0, 8.0]]),
            terminated=torch.tensor([[False, False, stop]]), truncated=torch.tensor([[False, False, cut]]),
            mask=torch.ones(1, 3, dtype=torch.bool), gamma=0.5, gae_lambda=0.5,
        )  # fmt: skip
        second = 1.5 + 0.25 * last
        assert advantage.tolist() == [[0.5 + 0.25 * second, second, last]]
        assert torch.equal(target, advantage + 1)


@pytest.mark.parametrize("seed", range(3))
def test_gae_agrees_with_torchrl(seed):
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    columns = random_columns(5, 40, seed)
    assert columns["terminated"].any() and columns["truncated"].any()
    mask = torch.ones(5, 40, dtype=torch.bool)
    found = gae(**columns, mask=mask, gamma=GAMMA, gae_lambda=LAMBDA)
    wide = {name: x.unsqueeze(-1) for name, x in columns.items()}
    expected = generalized_advantage_estimate(
        GAMMA, LAMBDA, wide["value"], wide["next_value"], wide["reward"],
        done=wide["terminated"] | wide["truncated"], terminated=wide["terminated"],
    )  # fmt: skip
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.squeeze(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_gae_on_a_padded_batch_equals_gae_row_by_row(seed):
    """Rows of length 1 to 9, each ended at its last step; whatever stands in the padding, flags included."""
    lengths, steps = [9, 1, 4, 6], 9
    columns = random_columns(4, steps, seed)
    end = torch.tensor(lengths)[:, None] - 1
    position = torch.arange(steps)
    mask = position <= end
    columns["terminated"] = columns["terminated"] & (position != end) | (position == end) & (end % 2 == 0)
    columns["truncated"] = columns["truncated"] & (position != end) | (position == end) & (end % 2 == 1)
    dirty = dict(columns)
    for name in ("reward", "value", "next_value"):
        dirty[name] = torch.where(mask, columns[name], junk(mask.shape, seed))
    for name in ENDS:
        dirty[name] = torch.where(mask, columns[name], junk(mask.shape, seed).isfinite())
    advantage, target = gae(**dirty, mask=mask, gamma=GAMMA, gae_lambda=LAMBDA)
    for row, length in enumerate(lengths):
        expected = gae_by_hand({name: x[row, :length] for name, x in columns.items()})
        torch.testing.assert_close(advantage[row, :length], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(target[row, :length], expected + columns["value"][row, :length], atol=1e-5, rtol=0)
        assert (advantage[row, length:] == 0).all() and (target[row, length:] == 0).all()


def gap_row(seed, steps=24):
    """One row with gaps: rewards and ends on False entries belong to the True entry before them.

    An episode ends inside the gap of 10 to 13, and what follows in that gap is a reset; another ends at the last entry.
    Returns the columns, and the compressed sequence that says the same without gaps.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(1, steps, generator=generator) < 0.5
    mask[0, [3, 9, 14]], mask[0, 10:14], mask[0, -1] = True, False, False
    columns = random_columns(1, steps, seed)
    columns["terminated"], columns["truncated"] = torch.zeros_like(mask), torch.zeros_like(mask)
    columns[ENDS[seed % 2]][0, [11, -1]] = True
    values = torch.randn(1, steps + 1, generator=generator)
    chosen = mask[0].nonzero()[:, 0].tolist()
    later = [*chosen[1:], steps]
    short = {name: x[0, chosen].clone() for name, x in columns.items()}
    for i, (here, after) in enumerate(zip(chosen, later, strict=True)):
        after = 12 if here == 9 else after  # the state that the first episode ended in
        short["reward"][i] = columns["reward"][0, here:after].sum()
        short["value"][i], short["next_value"][i] = values[0, here], values[0, after]
        for name in ENDS:
            short[name][i] = columns[name][0, here:after].any()
    done = columns["terminated"] | columns["truncated"]
    columns["value"] = torch.where(mask, values[:, :-1], junk(mask.shape, seed))
    columns["next_value"] = following(values, mask=mask, done=done)
    columns["next_value"] = torch.where(mask, columns["next_value"], junk(mask.shape, seed + 1))
    return columns, mask, short


@pytest.mark.parametrize("seed", range(8))
def test_gae_with_gaps_equals_gae_on_true_entries(seed):
    columns, mask, short = gap_row(seed)
    advantage, target = gae(**columns, mask=mask, gamma=GAMMA, gae_lambda=LAMBDA)
    expected = gae_by_hand(short)
    torch.testing.assert_close(advantage[mask], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(target[mask], expected + short["value"], atol=1e-5, rtol=0)
    assert (advantage[~mask] == 0).all() and (target[~mask] == 0).all()


def test_episodes_of_one_row_stay_apart():
    """Two episodes in one row with a False reset row between them: its reward and what follows do not leak back."""
    columns = random_columns(1, 7, 5)
    columns["terminated"] = torch.tensor([[False, False, True, False, False, False, False]])
    columns["truncated"] = torch.tensor([[False, False, False, False, False, False, True]])
    mask = torch.tensor([[True, True, True, False, True, True, True]])
    advantage, _ = gae(**columns, mask=mask, gamma=GAMMA, gae_lambda=LAMBDA)
    for rows in (slice(0, 3), slice(4, 7)):
        expected = gae_by_hand({name: x[0, rows] for name, x in columns.items()})
        torch.testing.assert_close(advantage[0, rows], expected, atol=1e-5, rtol=0)


def test_whitening_is_over_the_mask_alone():
    generator = torch.Generator().manual_seed(0)
    x, mask = torch.randn(6, 30, generator=generator) * 7 + 3, torch.rand(6, 30, generator=generator) < 0.6
    dirty = torch.where(mask, x, junk(mask.shape))
    white, kept = whiten(dirty, mask=mask), whiten(dirty, mask=mask, shift_mean=False)
    for found, mean in [(white, 0.0), (kept, x[mask].mean().item())]:
        assert found[mask].mean().item() == pytest.approx(mean, abs=1e-5)
        assert found[mask].var(correction=0).item() == pytest.approx(1.0, abs=1e-5)
        assert (found[~mask] == 0).all()
    torch.testing.assert_close(white[mask].argsort(), x[mask].argsort())


def test_whitening_equal_entries_gives_zero():
    one = torch.tensor([[5.0, torch.nan]])
    assert whiten(one, mask=torch.tensor([[True, False]])).tolist() == [[0.0, 0.0]]
    for value in (0.1, 1 / 3, 1000.1):
        equal = torch.full((7, 143), value)
        assert whiten(equal, mask=torch.ones_like(equal, dtype=torch.bool)).abs().max() == 0


@pytest.mark.parametrize("module", [advantages, losses])
def test_tensors_are_passed_by_name(module):
    public = [f for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
    public = [f for f in public if not f.__name__.startswith("_")]
    assert len(public) >= 2
    for function in public:
        kinds = {name: p.kind for name, p in inspect.signature(function).parameters.items()}
        named = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
        by_position = [name for name, kind in kinds.items() if kind not in named]
        assert set(by_position) <= {"x", "agent", "rollout"}, f"{function.__name__} takes {by_position} by position"


@pytest.mark.parametrize("function", [whiten, masked_mean], ids=lambda f: f.__name__)
def test_a_mask_of_a_mean_that_is_not_bool_raises(function):
    with pytest.raises(TypeError, match="expected torch.bool"):
        function(torch.ones(3), mask=torch.ones(3))


@pytest.mark.parametrize("function", [whiten, masked_mean], ids=lambda f: f.__name__)
def test_a_mean_refuses_a_mask_of_another_shape(function):
    with pytest.raises(ValueError, match=r"(?s)(?=.*\(3,\))(?=.*\(3, 1\))"):
        function(torch.arange(3.0)[:, None], mask=torch.tensor([True, True, False]))


def gae_one_by_one(rollout, value, next_value, gamma, decay):
    """Entry by entry: rewards and ends on False entries go to the last True entry of the episode; then eq. 16."""
    advantage = torch.zeros_like(value)
    for slot in range(len(value)):
        chain, target = [], None  # of True entries: [t, reward, terminated, truncated]
        for t in range(value.shape[1]):
            entry = rollout[slot, t]
            if entry["mask"]:
                target = [t, 0.0, False, False]
                chain.append(target)
            if target is not None:
                target[1] += entry["reward"].item()
                target[2] |= bool(entry["terminated"])
                target[3] |= bool(entry["truncated"])
                if entry["terminated"] or entry["truncated"]:
                    target = None
        trace = 0.0
        for t, reward, terminated, truncated in reversed(chain):
            delta = reward + gamma * next_value[slot, t].item() * (not terminated) - value[slot, t].item()
            trace = delta + (0.0 if terminated or truncated else gamma * decay * trace)
            advantage[slot, t] = trace
    return advantage


def test_gae_equals_the_recursion_entry_by_entry():
    """Junk on False entries after an episode's end has no effect, not even a warning."""
    generator = torch.Generator().manual_seed(0)
    for rows, steps in [(1, 1), (3, 14), (5, 6)] * 3:
        rollout = random_rollout(generator, rows, steps)
        value, next_value = torch.randn(2, rows, steps, generator=generator).unbind()
        columns = {name: rollout[name] for name in ("reward", "terminated", "truncated", "mask")}
        expected = gae_one_by_one(rollout, value, next_value, 0.9, 0.8)
        junk = torch.where(rollout["mask"], value, torch.inf)
        advantage, target = gae(**columns, value=junk, next_value=next_value, gamma=0.9, gae_lambda=0.8)
        torch.testing.assert_close(advantage, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(target, torch.where(rollout["mask"], expected + value, 0.0), atol=1e-5, rtol=0)


def test_each_row_may_have_a_lambda_of_its_own():
    generator = torch.Generator().manual_seed(0)
    rollout = random_rollout(generator, 3, 8)
    value, next_value = torch.randn(2, 3, 8, generator=generator).unbind()
    columns = {name: rollout[name] for name in ("reward", "terminated", "truncated", "mask")}
    decays = torch.tensor([0.0, 0.5, 1.0])
    each, _ = gae(**columns, value=value, next_value=next_value, gamma=0.9, gae_lambda=decays[:, None].expand(3, 8))
    for row, decay in enumerate(decays.tolist()):
        alone, _ = gae(**columns, value=value, next_value=next_value, gamma=0.9, gae_lambda=decay)
        torch.testing.assert_close(each[row], alone[row])


def test_lambda_grows_with_the_length_of_an_answer():
    """VAPO, eq. 9, α = .05: 1 - 1/(.05 · 40) = .5 for 40 tokens, .75 for 80, and not below 0 for 10."""
    mask = torch.zeros(3, 80, dtype=torch.bool)
    mask[0, 7:47] = True
    mask[1] = True
    mask[2, :10] = True
    decay = lambda_by_length(mask, alpha=0.05)
    torch.testing.assert_close(decay, torch.tensor([[0.5], [0.75], [0.0]]).expand(3, 80))


ALL = {"counts": torch.ones(6, dtype=torch.bool)}


def test_returns_and_the_mean_of_a_batch_by_hand():
    """γ = .5, rewards 1 2 4 to a limit and 8 to an end: 1 + .5 (2 + .5·4) = 3, 4, 4; 8; their mean is 19/4."""
    terminated = torch.tensor([[False, False, False], [True, False, False]])
    truncated = torch.tensor([[False, False, True], [False, False, False]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    reward = torch.tensor([[1.0, 2.0, 4.0], [8.0, torch.nan, 9.0]])
    found = discounted_returns(reward=reward, terminated=terminated, truncated=truncated, mask=mask, gamma=0.5)
    assert found.tolist() == [[3.0, 4.0, 4.0], [8.0, 0.0, 0.0]]
    junk = torch.where(mask, found, torch.nan)
    assert subtract_mean(junk, mask=mask).tolist() == [[-1.75, -0.75, -0.75], [3.25, 0.0, 0.0]]


def test_baselines_by_hand():
    """Group 7: 1, 2, 6; group -1: 4, 8; row 3 is alone in its group.

    The others' means are 4, 3.5, 1.5 and 8, 4. The mean of 3 is 3, the sum of squares 4 + 1 + 9 = 14, over n - 1 = 2.
    """
    score, group = torch.tensor([1.0, 4.0, 2.0, 5.0, 6.0, 8.0]), torch.tensor([7, -1, 7, 0, 7, -1])
    found = leave_one_out(score=score, group=group, **ALL)
    torch.testing.assert_close(found, torch.tensor([-3.0, -4.0, -1.5, 0.0, 4.5, 4.0]))
    found = standardize_in_group(score=score, group=group, scale=False, **ALL)
    torch.testing.assert_close(found, torch.tensor([-2.0, -2.0, -1.0, 0.0, 3.0, 2.0]))
    three, two = 7**0.5 + 1e-4, 8**0.5 + 1e-4
    expected = torch.tensor([-2 / three, -2 / two, -1 / three, 0.0, 3 / three, 2 / two])
    torch.testing.assert_close(standardize_in_group(score=score, group=group, **ALL), expected)


def test_standardised_groups_agree_with_torchrl():
    """Up to TRL's 1e-4 beside the deviation, which torchrl has not."""
    from torchrl.objectives.llm import MCAdvantage

    score = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    transform = MCAdvantage(grpo_size=8)
    for row in score:
        trajectories = [TensorDict({("next", "reward"): x.reshape(1, 1)}, batch_size=[1]) for x in row]
        expected = transform._trajectory_advantage(trajectories)["advantage"].reshape(-1)
        found = standardize_in_group(score=row, group=torch.zeros(8).long(), counts=torch.ones(8).bool())
        torch.testing.assert_close(found, expected, atol=0, rtol=1e-3)


BASELINES = [
    leave_one_out,
    standardize_in_group,
    lambda **columns: standardize_in_group(**columns, scale=False),
]


@pytest.mark.parametrize("baseline", BASELINES)
def test_names_of_groups_and_order_do_not_matter(baseline):
    generator = torch.Generator().manual_seed(0)
    score, counts = torch.randn(24, generator=generator), torch.rand(24, generator=generator) < 0.8
    group = torch.arange(6).repeat_interleave(4)
    expected = baseline(score=score, group=group, counts=counts)
    order = torch.randperm(24, generator=generator)
    found = baseline(score=score[order], group=(10 - 7 * group)[order], counts=counts[order])
    torch.testing.assert_close(found, expected[order])
    assert expected.count_nonzero() == counts.sum()


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("baseline", BASELINES)
def test_rows_that_do_not_count_move_no_baseline(baseline, junk):
    counts = torch.tensor([True, False, True, True, False, True])
    score, group = torch.tensor([1.0, junk, 2.0, 4.0, junk, 8.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    found = baseline(score=score, group=group, counts=counts)
    assert (found[~counts] == 0).all()
    expected = baseline(score=score[counts], group=group[counts], counts=counts[counts])
    assert torch.equal(found[counts], expected) and (expected != 0).all()


@pytest.mark.parametrize("size", [2, 3, 7, 64])
@pytest.mark.parametrize("reward", [0.0, 0.1, -7.3, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("baseline", BASELINES)
def test_equal_scores_give_exactly_nothing(baseline, reward, size):
    """The rounding of their mean is no signal, though a deviation of 0 would make one of it."""
    score, group = torch.full((size + 2,), reward), torch.zeros(size + 2).long()
    score[-1], group[-2:] = reward + 1, 1
    found = baseline(score=score, group=group, counts=torch.ones(size + 2).bool())
    assert (found[:-2] == 0).all() and (found[-2:] != 0).all()
