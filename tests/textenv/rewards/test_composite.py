"""The contract of reward functions: what may be returned, what is logged, and what happens when one fails."""

from collections import OrderedDict, deque

import numpy as np
import pytest
import torch

from algos import PPO, LMPolicy, PPOConfig, collect
from algos.training.reward_hacking import RewardHackingMonitor
from tests.helpers.conversations import Parrot
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.text_envs import EOS, GOOD, REWARDED, good, make_env, play, rewarded
from tests.helpers.tolerances import METRIC, METRIC_NEAR_0
from textenv import Rewards, TextVectorEnv, TokenVectorEnv
from textenv.rewards.metrics import correlation, distinct, repeated, reward_metrics


def figures_of(reward, answers):
    """What the log says of them."""
    env = make_env(reward)
    play(env, answers)
    return env.metrics


def paid(rollout):
    return [row[mask].tolist() for row, mask in zip(rollout["reward"], rollout["mask"], strict=True)]


# --- what may be returned ----------------------------------------------------------------------------------------


def test_functions_get_the_keywords_they_take():
    seen = {}

    def narrow(completions, terminated):
        seen["narrow"] = completions, terminated
        return [0.0] * 4

    def wide(**everything):
        seen["wide"] = set(everything)
        return [0.0] * 4

    rewarded(Rewards({"narrow": narrow, "wide": wide}), REWARDED, prompts=[{"prompt": "a", "answer": 1}])
    assert [text.split() for text in seen["narrow"][0]][0] == ["good"]
    assert seen["narrow"][1] == [True, True, False, True]
    assert seen["wide"] == {
        "prompts",
        "completions",
        "prompt_ids",
        "completion_ids",
        "terminated",
        "tool_calls",
        "answer",
    }


def test_a_reward_function_of_trl_works_unchanged():
    """As in TRL's documentation of GRPO: positional names, **kwargs, None where it does not apply."""

    def reward_func(prompts, completions, ground_truth, **kwargs):
        return [float(truth in text) if truth else None for text, truth in zip(completions, ground_truth, strict=True)]

    prompts = [{"prompt": "a", "ground_truth": "good"}]
    assert paid(rewarded(reward_func, REWARDED, prompts=prompts)) == [[0, 1], [0, 0, 1], [0] * 5, [0]]


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
        metrics = agent.update(rollout)
        results.append((metrics["policy/loss"], metrics["update/grad_norm"], metrics["value/mean"]))
    assert results[0] == pytest.approx(results[1], rel=METRIC, abs=METRIC_NEAR_0)


def test_async_functions_are_awaited_in_any_loop():
    import asyncio

    async def slow(completions):
        await asyncio.sleep(0.01)
        return [1.0] * len(completions)

    assert rewarded(slow, REWARDED)["reward"].sum() == 4

    async def notebook():
        return rewarded(slow, REWARDED)["reward"].sum()

    assert asyncio.run(notebook()) == 4


@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_a_list_is_one_number_a_token(make):
    def dense(completion_ids):
        return [make([0.5 * (token == GOOD) - 0.25 for token in ids]) for ids in completion_ids]

    rollout = rewarded(dense, REWARDED)
    assert paid(rollout) == [[0.25, -0.25], [-0.25, 0.25, -0.25], [-0.25] * 5, [-0.25]]
    both = rewarded(Rewards({"dense": dense, "good": (good, 2.0)}), REWARDED)
    assert paid(both)[:2] == [[0.25, 1.75], [-0.25, 0.25, 1.75]]


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


def test_arrays_that_a_reward_changes_are_copies():
    seen = []

    def spoils(completions, facts, words):
        for fact, word in zip(facts, words, strict=True):
            fact[:] = 99
            word.clear()
        return [0.0] * len(completions)

    def looks(completions, facts, words):
        seen.extend(zip((fact.tolist() for fact in facts), map(list, words), strict=True))
        return [0.0] * len(completions)

    columns = {"facts": [np.array([1, 2]), np.array([3])], "words": [deque(["a"]), OrderedDict(b=1)]}
    Rewards({"spoils": spoils, "looks": looks})(prompts=["p", "q"], completions=["a", "b"], **columns)
    assert seen == [([1, 2], ["a"]), ([3], ["b"])]


def test_a_reward_cannot_change_its_arguments():
    seen = []

    def spoils(prompts, completions, completion_ids, notes):
        for each in (prompts, completions, completion_ids, notes):
            each.clear() if each is prompts else each[0].clear() if isinstance(each[0], (list, dict)) else None
        return [1.0] * len(completions)

    def looks(prompts, completions, completion_ids, notes):
        seen.append((list(prompts), list(completion_ids), [dict(note) for note in notes]))
        return [1.0] * len(completions)

    notes = {"kind": ["a", "b"]}
    rollout = rewarded(Rewards({"spoils": spoils, "looks": looks}), REWARDED, prompts=[{"prompt": "a", "notes": notes}])
    prompts, ids, given = seen[0]
    assert len(prompts) == 4 and ids == [list(answer) for answer in REWARDED] and given == [notes] * 4
    assert notes == {"kind": ["a", "b"]} and (rollout["reward"].sum(1) == 2).all()


def test_components_are_in_the_log_of_a_training():
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)
    agent = PPO(make_env(Rewards({"good": good})), policy, PPOConfig(num_steps=None, num_episodes=8, minibatch_size=8))
    (metrics,) = agent.learn(1)
    assert metrics["reward/good"] == pytest.approx(metrics["episode/return"])
    assert {"reward_share/good", "reward_length_correlation/good", "text/distinct_2", "reward/failed"} <= set(metrics)


def test_a_conversation_is_paid_by_the_turn_and_logged():
    env = TokenVectorEnv(Parrot, tokenizer=make_tokenizer(WORDS), max_prompt_tokens=4, max_new_tokens=4, max_length=40)
    rollout = collect(env, LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0), num_episodes=8, seed=0)
    counts = (rollout["action"] == GOOD) & rollout["mask"]
    assert rollout["reward"].sum(1).tolist() == counts.sum(1).tolist()
    assert env.metrics["reward/score"] == pytest.approx(counts.sum().item() / 24, abs=0.2)


def test_columns_of_another_argument_are_refused():
    with pytest.raises(ValueError, match=r"\['completions'\].*rename"):
        rewarded(good, [(EOS,)], prompts=[{"prompt": "a", "completions": "x"}])


# --- reward hacking ----------------------------------------------------------------------------------------------


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


def history(scores, variety):
    return [{"episode/return": s, "text/distinct_2": v} for s, v in zip(scores, variety, strict=True)]


def test_a_rising_score_with_alike_texts_warns_once():
    watch = RewardHackingMonitor()
    rising, falling = np.linspace(1, 5, 30), np.linspace(0.8, 0.1, 30)
    with pytest.warns(UserWarning, match=r"score rises \(.*distinct 2-grams 0\.7\d to 0\.3\d\)") as caught:
        for metrics in history(rising, falling):
            watch.look(metrics)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("scores", "variety"),
    [
        (np.linspace(1, 5, 30), np.linspace(0.8, 0.6, 30)),
        (np.linspace(5, 5, 30), np.linspace(0.8, 0.1, 30)),
        (np.linspace(-1, -5, 30), np.linspace(0.8, 0.1, 30)),
    ],
)
def test_no_warning_otherwise(scores, variety):
    watch = RewardHackingMonitor()
    for metrics in history(scores, variety):
        watch.look(metrics)
    assert not watch.warned


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
    assert listed(**columns) == named(**columns) and listed(**columns).earned == [-5.5, -2.0]
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
