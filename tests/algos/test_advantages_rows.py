"""Advantages of episodes of several rows are those of the same episodes in one row each."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional as F  # noqa: N812

from algos import GRPO, REINFORCE, RLOO, PPOConfig, REINFORCEPlusPlus
from algos.advantages import add_advantages
from algos.policies.fitted_value import FOLDS, FittedValue
from algos.policies.normalizers import RewardNormalizer
from algos.policies.policy import LinearValue
from algos.ranks import collectives
from algos.training.metrics import EpisodeMeter
from tests.helpers.cut_episodes import Reads, cut_episodes
from tests.helpers.small_agents import lm_policy
from tests.helpers.text_envs import text_env
from textenv.rollout import episode_of_row, in_order, join_column, number_in_episode, split_column

GAMMA, LAMBDA = 0.9, 0.8
SEEDS = range(12)


def learner(values, **options):
    """As much of an agent as advantages need."""
    config = PPOConfig(num_steps=None, num_episodes=6, gamma=GAMMA, gae_lambda=LAMBDA, **options)
    normalizer = RewardNormalizer(GAMMA) if config.normalize_rewards else None
    return SimpleNamespace(
        config=config, reward_normalizer=normalizer, fitted_value=None, vine=None, policy=Reads(values)
    )


@pytest.mark.parametrize("bootstrap_truncated", [False, True])
@pytest.mark.parametrize("options", [{}, {"normalize_rewards": True}, {"whiten_rewards": True}], ids=str)
def test_gae_of_cut_episodes_is_that_of_whole_ones(options, bootstrap_truncated):
    several_rows = 0
    for seed in SEEDS:
        pair = cut_episodes(seed)
        several_rows += len(pair.cut) - len(pair.whole)
        common = options | {"bootstrap_truncated": bootstrap_truncated}
        one, several = learner(pair.whole_values, **common), learner(pair.cut_values, **common)
        add_advantages(one, pair.whole)
        add_advantages(several, pair.cut)
        for name in ("advantage", "value_target"):
            expected = pair.moved(pair.whole[name])
            torch.testing.assert_close(pair.cut[name], expected, atol=1e-5, rtol=1e-5)
            assert pair.cut[name].any()
        if one.reward_normalizer is not None:
            assert one.reward_normalizer.moments.count > 0
            torch.testing.assert_close(
                several.reward_normalizer.moments.variance, one.reward_normalizer.moments.variance
            )
    assert several_rows > 3 * len(SEEDS)


@pytest.mark.parametrize("seed", range(4))
def test_gae_over_rows_agrees_with_torchrl(seed):
    """Of the True entries of an episode one behind the other, with the rewards of the gaps added to them."""
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    pair = cut_episodes(seed)
    add_advantages(learner(pair.cut_values, bootstrap_truncated=True), pair.cut)
    for row, mask in enumerate(pair.whole["mask"]):
        steps = mask.nonzero().flatten().tolist()
        stops = [*steps[1:], pair.whole.shape[1]]
        rewards = [pair.whole["reward"][row, a:b].sum() for a, b in zip(steps, stops, strict=True)]
        end = steps[-1]
        after = [*steps[1:], end + 1]
        terminated = torch.zeros(len(steps), 1, dtype=torch.bool)
        terminated[-1] = pair.whole["terminated"][row, end]
        done = torch.zeros_like(terminated)
        done[-1] = True
        expected, target = generalized_advantage_estimate(
            GAMMA, LAMBDA, pair.whole_values[row, steps][:, None], pair.whole_values[row, after][:, None],
            torch.stack(rewards)[:, None], done=done, terminated=terminated,
        )  # fmt: skip
        for i, t in enumerate(steps):
            index = pair.place[row, t]
            torch.testing.assert_close(pair.cut["advantage"][index], expected[i, 0], atol=1e-5, rtol=0)
            torch.testing.assert_close(pair.cut["value_target"][index], target[i, 0], atol=1e-5, rtol=0)


ALGORITHMS = {
    "reinforce": (REINFORCE, dict(gamma=GAMMA, normalize_advantage=False)),
    "reinforce_plus_plus": (REINFORCEPlusPlus, dict(gamma=GAMMA, num_epochs=1, minibatch_size=100)),
    "rloo": (RLOO, dict(group_size=2)),
    "grpo": (GRPO, dict(group_size=2)),
    "grpo, each reward": (GRPO, dict(group_size=2, normalize_each_reward=True)),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_count_each_episode_once(name):
    algorithm, options = ALGORITHMS[name]
    for seed in range(4):
        pair = cut_episodes(seed)
        advantages = []
        for rollout in (pair.whole, pair.cut):
            agent = algorithm(text_env(), lm_policy(seed=1), num_steps=None, num_episodes=6, **options)
            with torch.no_grad():
                rollout["log_prob"] = agent.policy.evaluate(rollout).log_prob * rollout["mask"]
            generator = torch.Generator().manual_seed(seed)
            parts = torch.randn(6, 2, 2, generator=generator).abs()[episode_of_row(rollout)]
            rollout["reward_parts"] = parts[:, None].expand(*rollout.shape, 2, 2)
            agent.update(rollout)
            advantages.append(rollout["advantage"])
        torch.testing.assert_close(advantages[1], pair.moved(advantages[0]), atol=1e-5, rtol=1e-5)
        assert advantages[1].any()


def fitted_values(rollout, features, returns):
    """Values of all steps ``[B, T]``, and the head after the fit."""
    head = LinearValue(lambda rollout: [features], [torch.zeros(features.shape[-1])], torch.zeros(1))
    value, _ = FittedValue()(SimpleNamespace(linear_value=head), rollout, returns)
    return value, head


@pytest.mark.parametrize("seed", range(4))
def test_values_are_fitted_without_the_own_episode(seed):
    """Of another row of the same episode neither: its return is partly the same. All other episodes count."""
    rollout = cut_episodes(seed).cut
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(rollout), rollout.shape[1] + 1, 3, generator=generator)
    returns = torch.randn(rollout.shape, generator=generator)
    is_first_fold = (episode_of_row(rollout) % FOLDS == 0)[:, None]
    first, _ = fitted_values(rollout, features, returns)
    second, _ = fitted_values(rollout, features, torch.where(is_first_fold, returns + 3, returns))
    first_fold = rollout["mask"] & is_first_fold
    elsewhere = rollout["mask"] & ~is_first_fold
    assert torch.equal(first[first_fold], second[first_fold]) and first_fold.sum() > 3
    assert (first[elsewhere] != second[elsewhere]).all() and elsewhere.any(1).sum() > 3


@pytest.mark.parametrize("seed", range(4))
def test_values_that_are_linear_are_found(seed):
    """For each episode by the others, and by the head, which is fitted to all; the ridge makes a small bias."""
    rollout = cut_episodes(seed).cut
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(rollout), rollout.shape[1] + 1, 2, generator=generator)
    slope = torch.tensor([2.0, -1.0])
    expected = features @ slope + 5
    mask = rollout["mask"]
    value, head = fitted_values(rollout, features, expected[:, :-1])
    torch.testing.assert_close(value[mask], expected[:, :-1][mask], atol=0.02, rtol=0)
    torch.testing.assert_close(head.weights[0], slope, atol=0.01, rtol=0)
    torch.testing.assert_close(head.bias, torch.tensor([5.0]), atol=0.01, rtol=0)


def test_episodes_are_metered_not_rows():
    for seed in SEEDS:
        pair = cut_episodes(seed)
        of_whole = zip(*EpisodeMeter().finished(pair.whole), strict=True)
        of_cut = zip(*EpisodeMeter().finished(pair.cut), strict=True)
        for (total, length), (total_of_rows, length_of_rows) in zip(sorted(of_whole), sorted(of_cut), strict=True):
            assert total == pytest.approx(total_of_rows) and length == length_of_rows


def test_columns_are_joined_and_split_again():
    for seed in SEEDS:
        pair = cut_episodes(seed)
        column = torch.randn(*pair.cut.shape, 2)
        assert torch.equal(split_column(join_column(column, pair.cut), pair.cut), column)
        joined = join_column(pair.cut["observation"], pair.cut)
        for row, mask in enumerate(join_column(pair.cut["mask"], pair.cut)):
            assert joined[row][mask].tolist() == pair.whole["observation"][row][pair.whole["mask"][row]].tolist()
        ordered = in_order(pair.cut)
        assert (episode_of_row(ordered).diff() >= 0).all() and len(ordered) == len(pair.cut)
        assert (number_in_episode(ordered).diff()[episode_of_row(ordered).diff() == 0] == 1).all()


def test_rows_of_workers_keep_their_episodes():
    """Also where all episodes of one worker have one row each."""
    pair = cut_episodes(0)
    others = TensorDict({name: pair.whole[name] for name in pair.whole.keys()}, batch_size=pair.whole.shape)
    episode = episode_of_row(pair.cut)
    joined = collectives.join_rows([others.clone(), pair.cut.clone(), others.clone()])
    expected = [*range(6), *(6 + episode).tolist(), *range(12, 18)]
    assert episode_of_row(joined).tolist() == expected
    assert joined["group"][:, 0].unique().tolist() == list(range(9))
    width = pair.cut.shape[1] - pair.whole.shape[1]
    assert torch.equal(joined["mask"][:6], F.pad(pair.whole["mask"], (0, width)))
