"""Several reward functions as one: weights, names, answers that are left out, and scores of tokens."""

import numpy as np
import pytest
import torch

from algos import PPO, LMPolicy, PPOConfig, collect
from algos.training.metrics import rollout_metrics
from tests.helpers.conversations import Parrot
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.text_envs import GOOD, REWARDED, figures_of, good, make_env, paid, rewarded
from tests.helpers.tolerances import METRIC, METRIC_NEAR_0
from textenv import Rewards, TextVectorEnv, TokenVectorEnv


def test_an_answer_without_a_score_is_left_out():
    """The update does not see it; the log counts it."""

    def picky(completions, **columns):
        return [None if "bad" in text else 1.0 for text in completions]

    rollout = rewarded(picky, REWARDED)
    assert rollout["mask"].any(1).tolist() == [True, False, False, True]
    assert not (rollout["terminated"] | rollout["truncated"])[1:3].any()
    assert figures_of(picky, REWARDED)["reward/left_out"] == 2
    rollout = rewarded(Rewards({"picky": picky, "good": good}), REWARDED)
    assert rollout["mask"].any(1).all() and rollout["reward"].sum(1).tolist() == [2, 1, 0, 1]


def test_left_out_answers_do_not_move_the_policy():
    """The same update as with only the others in the rollout."""

    def picky(completions, **columns):
        return [None if "bad" in text else 1.0 + text.split().count("good") for text in completions]

    results = []
    for rows in (slice(None), [0, 3]):
        policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)
        env = make_env(picky)
        agent = PPO(env, policy, PPOConfig(num_steps=None, num_episodes=4, num_epochs=1, minibatch_size=4))
        rollout = rewarded(picky, REWARDED)[rows]
        with torch.no_grad():
            rollout["log_prob"] = policy.evaluate(rollout).log_prob
        metrics = agent.update(rollout) | rollout_metrics(rollout)
        results.append((metrics["policy/loss"], metrics["update/grad_norm"], metrics["value/mean"]))
    assert results[0] == pytest.approx(results[1], rel=METRIC, abs=METRIC_NEAR_0)


@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_a_list_is_one_number_a_token(make):
    def dense(completion_ids):
        return [make([0.5 * (token == GOOD) - 0.25 for token in ids]) for ids in completion_ids]

    rollout = rewarded(dense, REWARDED)
    assert paid(rollout) == [[0.25, -0.25], [-0.25, 0.25, -0.25], [-0.25] * 5, [-0.25]]
    both = rewarded(Rewards({"dense": dense, "good": (good, 2.0)}), REWARDED)
    assert paid(both)[:2] == [[0.25, 1.75], [-0.25, 0.25, 1.75]]


def test_weights_scale_what_is_paid_and_logged():
    def two(completions):
        return [{"x": 1.0, "y": None}] * len(completions)

    rewards = Rewards({"good": (good, 0.5), "two": (two, -2.0)})
    assert rewarded(rewards, REWARDED)["reward"].sum(1).tolist() == [-1.5, -1.5, -2, -2]
    figures = figures_of(rewards, REWARDED)
    assert figures["reward/two/x"] == -2 and "reward/two/y" not in figures and figures["reward/good"] == 0.25
    assert figures["reward_raw/two/x"] == 1 and figures["reward_raw/good"] == 0.5


def test_what_parts_add_adds_up_to_the_score():
    """`rare` says 1 of two answers in four, so it adds .5 on average; by weight 0 `length` adds nothing."""

    def rare(completions):
        return [1.0 if "good" in text else None for text in completions]

    def length(completion_ids):
        return [float(len(ids)) for ids in completion_ids]

    def constant(completions):
        return [0.25] * len(completions)

    rewards = Rewards({"rare": (rare, 1.0), "constant": (constant, 2.0), "length": (length, 0.0)})
    score = rewarded(rewards, REWARDED)["reward"].sum(1).mean().item()
    figures = figures_of(rewards, REWARDED)
    assert figures["reward/rare"] == 0.5 and figures["reward_raw/rare"] == 1.0 and figures["reward_applied/rare"] == 0.5
    assert figures["reward/length"] == 0.0 and figures["reward_raw/length"] == np.mean([len(ids) for ids in REWARDED])
    assert figures["reward_length_correlation/length"] == pytest.approx(1.0)
    assert sum(figures[f"reward/{name}"] for name in ("rare", "constant", "length")) == pytest.approx(score)


def test_a_part_of_weight_0_changes_no_payment():
    """It gave 0 where nothing applied, so that answers were learnt from which should have been left out."""

    def rare(completions):
        return [1.0 if "good" in text else None for text in completions]

    def noisy(completions):
        return [len(text) / text.count("good") for text in completions]

    alone = rewarded(Rewards({"rare": rare}), REWARDED)
    for log, options in ((good, {}), (noisy, {"on_error": "skip", "max_failed": 1.0, "pause": 0.0})):
        logged = rewarded(Rewards({"rare": rare, "log": (log, 0.0)}, **options), REWARDED)
        assert torch.equal(logged["reward"], alone["reward"]) and torch.equal(logged["mask"], alone["mask"])


def test_rewards_that_are_only_logged_pay_0_and_leave_all_in(caplog):
    """Nothing was left to train on, though a KL to a teacher needs no reward."""

    def rare(completions):
        return [1.0 if "good" in text else None for text in completions]

    rollout = rewarded(Rewards({"good": (good, 0.0), "rare": (rare, 0.0)}), REWARDED * 4)
    assert rollout["mask"].any(1).all() and rollout["reward"].abs().sum() == 0
    assert "same score" not in caplog.text
    figures = figures_of(Rewards({"good": (good, 0.0), "rare": (rare, 0.0)}), REWARDED)
    assert figures["reward_raw/good"] == 0.5 and figures["reward_raw/rare"] == 1.0


def test_a_conversation_is_paid_by_the_turn_and_logged():
    env = TokenVectorEnv(Parrot, tokenizer=make_tokenizer(WORDS), max_prompt_tokens=4, max_new_tokens=4, max_length=40)
    rollout = collect(env, LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0), num_episodes=8, seed=0)
    counts = (rollout["action"] == GOOD) & rollout["mask"]
    assert rollout["reward"].sum(1).tolist() == counts.sum(1).tolist()
    assert env.metrics["reward/score"] == pytest.approx(counts.sum().item() / 24, abs=0.2)


def test_whitened_rewards_keep_their_mean():
    """And the rollout keeps what was paid."""
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)
    config = PPOConfig(num_steps=None, num_episodes=4, whiten_rewards=True, gamma=0.0, normalize_advantage=False)
    agent = PPO(make_env(good), policy, config)
    rollout = rewarded(good, REWARDED)
    with torch.no_grad():
        rollout["log_prob"] = policy.evaluate(rollout).log_prob
    before = rollout["reward"].clone()
    agent.update(rollout)
    paid = before[rollout["mask"]]
    used = rollout["value_target"][rollout["mask"]]  # with γ = 0, the reward itself
    expected = (paid - paid.mean()) / paid.std(correction=0) + paid.mean()
    torch.testing.assert_close(used, expected, atol=1e-5, rtol=0)
    assert (rollout["reward"] == before).all()


def test_a_list_of_functions_is_their_sum_as_in_trl():
    def short(completions):
        return [-float(len(text)) for text in completions]

    def polite(completions):
        return [float("please" in text) for text in completions]

    columns = {"prompts": ["?"] * 2, "completions": ["please", "no"]}
    listed = Rewards([short, (polite, 0.5)])
    named = Rewards({"short": short, "polite": (polite, 0.5)})
    assert listed(**columns) == named(**columns) and listed(**columns).score == [-5.5, -2.0]
    assert list(Rewards([short, short, polite, short]).functions) == ["short", "short_2", "polite", "short_3"]
    tokenizer = make_tokenizer(WORDS)
    env = TextVectorEnv(prompts=["a"], reward=[short, polite], tokenizer=tokenizer, num_envs=2)
    assert list(env.task.rewards.functions) == ["short", "polite"]


@pytest.mark.parametrize("functions, kind, said", [
    ([], ValueError, "functions is empty"), (lambda f: (f, 0.5), ValueError, r"give \[\(function, weight\)\]"),
    (lambda f: [f, 0.5], ValueError, r"give \[\(function, weight\)\]"), (lambda f: [f, "g"], TypeError, "'str' is 'g'"),
    (lambda f: [(f, 1, 2)], ValueError, r"expected a function or \(function, weight\)"),
])  # fmt: skip
def test_lists_that_are_no_functions_are_refused(functions, kind, said):
    with pytest.raises(kind, match=said):
        Rewards(functions(lambda completions: [0.0]) if callable(functions) else functions)
