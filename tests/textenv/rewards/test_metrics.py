"""Metrics of rewards: variety, repetition and components, by hand."""

import numpy as np
import pytest

from algos import PPO, LMPolicy, PPOConfig
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.text_envs import BAD, EOS, GOOD, REWARDED, figures_of, good, make_env, rewarded
from textenv import Rewards
from textenv.rewards.metrics import correlation, distinct, repeated, reward_metrics


def test_named_components_are_logged_by_name():
    """Share and correlation by hand: lengths 2, 3, 5, 1; 'good' 1, 1, 0, 0; 'short' -.1 a token."""

    def by_answer(completion_ids):
        return [{"good": ids.count(GOOD), "short": -0.1 * len(ids)} for ids in completion_ids]

    def by_column(completion_ids):
        return {"good": [ids.count(GOOD) for ids in completion_ids], "short": [-0.1 * len(x) for x in completion_ids]}

    for function in (by_answer, by_column):
        rollout = rewarded(function, REWARDED)
        assert rollout["reward"].sum(1).tolist() == pytest.approx([0.8, 0.7, -0.5, -0.1])
        figures = figures_of(function, REWARDED)
        assert figures["reward/good"] == pytest.approx(0.5) and figures["reward/short"] == pytest.approx(-0.275)
        assert figures["reward_share/good"] == pytest.approx(2 / 3.1)
        assert figures["reward_length_correlation/short"] == pytest.approx(-1)
        expected = np.corrcoef([1, 1, 0, 0], [2, 3, 5, 1])[0, 1]
        assert figures["reward_length_correlation/good"] == pytest.approx(expected)


def test_components_are_in_the_log_of_a_training():
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)
    agent = PPO(make_env(Rewards({"good": good})), policy, PPOConfig(num_steps=None, num_episodes=8, minibatch_size=8))
    (metrics,) = agent.learn(1)
    assert metrics["reward/good"] == pytest.approx(metrics["episode/return"])
    assert {"reward_share/good", "reward_length_correlation/good", "text/distinct_2", "reward/failed"} <= set(metrics)


def test_a_batch_without_a_score_is_logged():
    """Even where a function of weight 0 returns numbers."""
    rewards = Rewards({"none": lambda completions: [None, None], "logged": (lambda completions: [1.0, 2.0], 0.0)})
    found = reward_metrics(rewards(prompts=["a", "b"], completions=["c", "d"]), [[1], [2]])
    assert found["reward/left_out"] == 2 and "reward/logged" not in found


def test_variety_and_repetition_by_hand():
    assert distinct([[1, 2, 1, 2], [1, 2]]) == 2 / 4
    assert repeated([[1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5], [1]]) == pytest.approx((2 / 3 + 0) / 2)
    assert distinct([[1]]) == 1 and repeated([[]]) == 0
    assert correlation(np.array([1.0, 2, 3]), np.array([5, 5, 5])) == 0


def test_turns_that_a_limit_cuts_off_are_counted():
    """One of four answers has the largest length and no end."""
    assert figures_of(good, REWARDED)["text/cut_turns"] == 1 / 4
    assert figures_of(good, [(EOS,), (GOOD, EOS)])["text/cut_turns"] == 0
    assert figures_of(good, [(BAD,) * 5])["text/cut_turns"] == 1
