"""What happens when a reward function fails: it is named, nothing is lost, and by choice its answers are left out."""

import json

import numpy as np
import pytest
import torch

from algos import PPO, LMPolicy, PPOConfig, collect
from tests.helpers.conversations import Parrot
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.text_envs import BAD, EOS, GOOD, REWARDED, good, make_env, play, rewarded
from textenv import Rewards, TextVectorEnv
from textenv.envs.string_env import StringGames
from textenv.rewards import Normalize, whiten
from textenv.rewards.scores import RewardError, Scores, StopTraining


def raises(prompts, completions):
    if any("bad" in text for text in completions):
        raise KeyError("no such thing")
    return [1.0] * len(completions)


def gives(value):
    def strange(completions):
        return [value if "bad" in text else 1.0 for text in completions]

    return strange


FAILURES = {
    "raises": (raises, "raised KeyError: 'no such thing' in row 1"),
    "nan": (gives(float("nan")), "returned nan for row 1"),
    "inf": (gives(-float("inf")), "returned -inf for row 1"),
    "text": (gives("good"), "returned 'good' for row 1"),
    "too few tokens": (gives([1.0]), "returned 1 numbers for row 1 .* has 3 tokens"),
    "nested": (gives([[1.0]]), r"returned \[\[1.0\]\] for row 1"),
    "ragged": (gives([[1.0], [1.0, 2.0]]), r"returned \[\[1.0\], \[1.0, 2.0\]\] for row 1"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_named_and_loses_nothing(name, workers):
    """By function, row, prompt and value."""
    function, message = FAILURES[name]
    env = make_env(Rewards({"mine": function}, workers=workers), prompts=["a b"])
    env.start_episodes(4, seed=0)
    left = [list(answer) for answer in REWARDED]
    while env.running.any():
        actions = np.zeros(3, dtype=np.int64)
        actions[env.running] = [left[row].pop(0) for row in env.cursor[0]]
        env.advance(actions)
    with pytest.raises(RewardError, match=rf"reward 'mine' {message}") as caught:
        env.take_episodes()
    assert "'a b'" in str(caught.value) and "bad good" in str(caught.value)
    assert [answer["completion_ids"] for answer in caught.value.answers] == [list(answer) for answer in REWARDED]
    env.task.rewards = Rewards(good)
    assert env.take_episodes()["reward"].sum(1).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("name", list(FAILURES))
def test_skip_leaves_out_and_counts_failed_rows(name):
    rewards = Rewards(FAILURES[name][0], on_error="skip", max_failed=0.5)
    env = make_env(rewards)
    rollout = play(env, REWARDED)
    assert rollout["mask"].any(1).tolist() == [True, False, False, True]
    assert rollout["reward"].sum(1).tolist() == [1, 0, 0, 1]
    assert env.metrics["reward/failed"] == 2 and env.metrics["reward/left_out"] == 2
    assert (rewards.seen, rewards.failed) == (4, 2)


def test_failures_count_as_of_a_hundred_answers():
    rewards = Rewards(raises, on_error="skip", max_failed=0.1)
    rows = {"prompts": ["?"] * 4, "completions": ["good", "bad", "good", "good"]}
    for _ in range(10):  # 10 of 40 answers, which count as 10 of 100
        scores = rewards(**rows)
        assert scores.failed == {1} and scores.score == [1.0, None, 1.0, 1.0]
    with pytest.raises(RewardError, match="11 of the last 44 completions failed, more than 10% of 100;"):
        rewards(**rows)


def test_a_failure_of_weight_0_leaves_nothing_out():
    rewards = Rewards({"paid": good, "watched": (raises, 0.0)}, on_error="skip", max_failed=0.1)
    scores = rewards(prompts=["?"] * 4, completions=["good", "bad", "good", "bad good"])
    assert scores.score == [1.0, 0.0, 1.0, 1.0] and scores.failed == frozenset() and rewards.failed == 0
    assert scores.raw["watched"] == [1.0, None, 1.0, None]
    rollout = play(make_env(rewards), REWARDED)
    assert rollout["mask"].any(1).all() and rollout["reward"].sum(1).tolist() == [1, 1, 0, 0]


def test_skip_stops_once_more_than_the_share_fails():
    rewards = Rewards(raises, on_error="skip", max_failed=0.1)
    rows = {"prompts": ["?"] * 20, "completions": ["bad"] + ["good"] * 19}
    for _ in range(10):  # 1 in 20
        assert rewards(**rows).failed == {0}
    rows["completions"] = ["bad"] * 18 + ["good"] * 2
    with pytest.raises(
        RewardError, match=r"\d+ of the last \d+ completions failed, more than 10% of \d+; last .*raises"
    ):
        for _ in range(3):
            rewards(**rows)


def test_too_many_failures_end_the_batch_early():
    rewards = Rewards(raises, on_error="skip", max_failed=0.01)
    completions = ["good", "bad"] * 16
    message = "16 parts of this batch of 32 completions failed, more than 1% of 1000; last error: reward 'raises'"
    with pytest.raises(RewardError, match=message):
        rewards(prompts=["?"] * 32, completions=completions)


def counted(function):
    def counts(prompts, completions):
        counts.calls.append(list(completions))
        return function(prompts, completions)

    counts.calls = []
    return counts


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("row", [0, 77, 127])
def test_one_failing_answer_of_128_is_found_by_halving(on_error, row):
    """128 = 2^7: two calls a halving to know every other score, one or two to know the row alone."""
    function = counted(raises)
    completions = ["good"] * 128
    completions[row] = "bad"
    rewards = Rewards(function, on_error=on_error)
    if on_error == "stop":
        with pytest.raises(RewardError, match=rf"raised KeyError.* in row {row} \(prompt"):
            rewards(prompts=["?"] * 128, completions=completions)
    else:
        scores = rewards(prompts=["?"] * 128, completions=completions)
        assert scores.failed == {row} and scores.score.count(1.0) == 127
    assert len(function.calls) <= 1 + 2 * 7


@pytest.mark.heavy
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_every_set_of_failing_rows_of_six_is_found(workers):
    """All 2^6 sets, against the sets themselves. Four rows alone, evenly spaced, stand for all six."""
    num_rows = 6
    tested_alone = {0, 1, 3, 5}
    rows = {"prompts": ["?"] * num_rows, "completions": [str(row) for row in range(num_rows)]}
    for number in range(2**num_rows):
        failing = {row for row in range(num_rows) if number >> row & 1}

        def numbers(prompts, completions, failing=failing):
            if failing & set(map(int, completions)):
                raise KeyError("no such row")
            return [float(text) for text in completions]

        # The first one is reported
        function = counted(numbers)
        rewards = Rewards(function, workers=workers)
        if failing:
            with pytest.raises(RewardError, match=rf"in row {min(failing)} \("):
                rewards(**rows)
        else:
            assert rewards(**rows).score == list(range(num_rows))
        assert len(function.calls) <= max(1, workers) + 2 * 3

        # Each is left out
        function = counted(numbers)
        rewards = Rewards(function, workers=workers, on_error="skip", max_failed=1.0, pause=0.0)
        try:
            scores = rewards(**rows)
        except RewardError:
            assert failing >= tested_alone
        else:
            assert len(failing) < num_rows and scores.failed == failing
            assert scores.score == [None if row in failing else row for row in range(num_rows)]
        assert len(function.calls) <= max(1, workers) + 2 * 3 * len(failing) + 4 + 1


def test_a_failure_by_chance_costs_no_score(caplog):
    """It fails once, on the whole batch, as a service may; the scores of both halves count, with a warning."""
    attempts = []

    def now_and_then(completions):
        attempts.append(len(completions))
        if len(attempts) == 1:
            raise ConnectionError("try again")
        return [1.0] * len(completions)

    rewards = Rewards(now_and_then, on_error="skip", max_failed=0.5)
    scores = rewards(prompts=["?"] * 8, completions=["x"] * 8)
    assert not scores.failed and scores.score == [1.0] * 8
    assert (rewards.seen, rewards.failed) == (8, 0) and attempts == [8, 4, 4]
    assert "raised ConnectionError: try again in one of the rows 0 to 7" in caplog.text
    assert "but on neither half of these 8 completions" in caplog.text
    with pytest.raises(
        RewardError, match="neither half of these 8 completions: does it depend on the batch, or fail at random"
    ):
        attempts.clear()
        Rewards(now_and_then)(prompts=["?"] * 8, completions=["x"] * 8)


@pytest.mark.heavy
@pytest.mark.parametrize("recovers", [True, False])
def test_a_failed_batch_is_repeated_after_a_pause(recovers, tmp_path):
    """If all answers fail then too, training stops."""
    attempts = []

    def down(completions):
        attempts.append(len(completions))
        if not recovers or attempts.count(128) < 2:
            raise ConnectionError("the service is down")
        return [1.0] * len(completions)

    rewards = Rewards(down, on_error="skip", pause=0.0)
    if recovers:
        assert rewards(prompts=["?"] * 128, completions=["x"] * 128).score == [1.0] * 128
    else:
        policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)
        agent = PPO(make_env(rewards), policy, PPOConfig(num_steps=None, num_episodes=128, minibatch_size=64))
        with pytest.raises(RewardError, match="raised ConnectionError: the service is down in row 0") as caught:
            agent.learn(1000, run_dir=tmp_path)
        assert isinstance(caught.value.__cause__, ConnectionError)
        assert len((tmp_path / "unscored.jsonl").read_text().splitlines()) == 128
    # Whole, halves, quarters, four alone, and the whole again.
    assert attempts == [128, 64, 64, 32, 32, 32, 32, 1, 1, 1, 1, 128]


def test_an_exceptions_own_text_is_escaped_and_cut():
    def screams(completions):
        raise ValueError("\x1b[2J\u202e" + "a" * 1_000_000)

    with pytest.raises(RewardError) as caught:
        Rewards(screams)(prompts=["?"], completions=["x"])
    text = str(caught.value)
    assert len(text) < 2_000 and "\x1b" not in text and "\\x1b[2J\\u202e" in text and "1,000,005 characters" in text


def test_a_failed_training_leaves_agent_and_answers(tmp_path):
    calls = []

    def fails_later(completions):
        calls.append(completions)
        if len(calls) > 1:
            raise RuntimeError("the service is down")
        return [1.0] * len(completions)

    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)
    agent = PPO(make_env(fails_later), policy, PPOConfig(num_steps=None, num_episodes=8, minibatch_size=8))
    with pytest.raises(RewardError, match="service is down") as caught:
        agent.learn(1000, run_dir=tmp_path)
    assert "saved in" in "".join(caught.value.__notes__)
    answers = [json.loads(line) for line in (tmp_path / "unscored.jsonl").read_text().splitlines()]
    assert [answer["completions"] for answer in answers] == calls[1]
    assert (tmp_path / "config.json").is_file() and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"functions": {}}, "empty"),
        ({"functions": {"x": (good, float("nan"))}}, "weight of reward 'x'"),
        ({"functions": {"x": (good, "y")}}, "weight of reward 'x' is 'y', expected a finite number"),
        ({"functions": [(good, None)]}, "weight of reward 'good' is None, expected a finite number"),
        ({"functions": good, "on_error": "ignore"}, "'stop' or 'skip'"),
        ({"functions": good, "max_failed": 2}, "fraction from 0 to 1"),
        ({"functions": good, "max_failed": "0.1"}, "max_failed is '0.1', expected a fraction from 0 to 1"),
        ({"functions": good, "timeout": 0}, "seconds above 0"),
        ({"functions": good, "timeout": "9"}, "timeout is '9', expected seconds above 0"),
        ({"functions": good, "pause": None}, "pause is None, expected seconds of at least 0"),
        ({"functions": 3}, "reward 'int' is 3"),
        ({"functions": {"x": 3}}, "reward 'x' is 3"),
        ({"functions": {1: good, "x": good}}, "functions has the name 1, expected texts"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Rewards(**arguments)


def test_components_of_one_name_are_refused():
    """One took the place of the other: in the log, or even in the sum."""
    rewards = Rewards({"a/x": lambda completions: [1.0], "a": lambda completions: [{"x": 5.0}]})
    with pytest.raises(ValueError, match="two components of the reward have the name 'a/x'"):
        rewards(prompts=["p"], completions=["c"])
    with pytest.raises(ValueError, match="returned two components of the name '1'"):
        Rewards(lambda completions: [{1: 0.25, "1": 0.5}])(prompts=["p"], completions=["c"])


@pytest.mark.heavy
def test_a_failed_turn_leaves_its_conversation_out():
    class Fails(StringGames):
        def score(self, turns):
            earned = [None if turn.index == 0 and turn.prompt_ids == [3] else 1.0 for turn in turns]
            return Scores(score=earned, failed=frozenset(i for i, value in enumerate(earned) if value is None))

    tokenizer = make_tokenizer(WORDS)
    task = Fails(Parrot, tokenizer=tokenizer)
    env = TextVectorEnv(task, tokenizer=tokenizer, max_turns=3, max_prompt_tokens=4, max_new_tokens=4, max_length=40)
    rollout = collect(env, LMPolicy(make_gpt2(), tokenizer, seed=0), num_episodes=12, seed=0)
    short = torch.tensor([row[:1].tolist() == [3] for row in rollout["observation"]])
    assert short.any() and not short.all()
    assert (rollout["mask"].any(1) == ~short).all()


def test_failures_of_nested_rewards_are_carried_out():
    inner = Rewards({"x": raises}, on_error="skip")
    scores = Rewards({"in": inner, "good": good})(prompts=["?"] * 3, completions=["good", "bad good", "a"])
    assert scores.score == [2.0, None, 1.0] and scores.failed == {1}


def test_the_share_counts_every_function():
    """And every piece of a batch, over the last answers only."""
    rows = {"prompts": ["?"] * 100, "completions": ["bad"] * 100}
    some = rows | {"completions": ["bad"] * 90 + ["good"] * 10}
    with pytest.raises(RewardError, match="more than 10%"):
        Rewards(raises, on_error="skip", workers=10)(**some)

    def on(row):
        return lambda completions: [float("nan") if int(text) // 10 == row else 1.0 for text in completions]

    with pytest.raises(RewardError, match="30 of the last 100"):
        Rewards({str(k): on(k) for k in range(3)}, on_error="skip")(
            prompts=["?"] * 100, completions=[str(i) for i in range(100)]
        )
    late = Rewards(raises, on_error="skip")
    for _ in range(100):
        late(prompts=["?"] * 100, completions=["good"] * 100)
    with pytest.raises(RewardError, match="more than 10%"):
        for _ in range(3):
            late(**some)


def test_whole_batch_functions_are_not_split():
    for options in ({"workers": 2}, {"processes": True}, {"on_error": "skip"}):
        for transform in (Normalize, whiten):
            with pytest.raises(ValueError, match="put it outside"):
                Rewards(transform(good), **options)
    outside = whiten(Rewards(good, workers=2))
    assert outside(prompts=["?"] * 4, completions=["good", "a", "good", "a"]) == [1, -1, 1, -1]


@pytest.mark.parametrize("value", [1e39, 10**400, [1e300, 0.0]])
def test_too_great_rewards_are_refused_by_row(value):
    with pytest.raises(RewardError, match="for row 0"):
        rewarded(lambda completions: [value] * len(completions), [(GOOD, EOS)])


def test_a_column_of_some_prompts_is_none_for_others():
    def scored(completions, answer):
        return [0.0 if each is None else 1.0 for each in answer]

    env = make_env(scored, prompts=[{"prompt": "a", "answer": 1}, "c"], num_envs=1)
    env.reset(seed=0)
    paid = {env.step(np.array([EOS]))[1][0] for _ in range(8)}
    assert paid == {0.0, 1.0}


def test_a_step_after_a_failed_reward_is_refused():
    env = make_env(raises, num_envs=1)
    env.reset(seed=0)
    env.step(np.array([BAD]))
    with pytest.raises(RewardError):
        env.step(np.array([EOS]))
    with pytest.raises(ValueError, match="reward of a finished turn failed: call reset"):
        env.step(np.array([EOS]))


def test_leaving_everything_out_ends_the_training():
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)
    config = PPOConfig(num_steps=None, num_episodes=8, minibatch_size=8)
    with pytest.raises(ValueError, match="no trainable steps: mask is False everywhere in this rollout .8 rows"):
        PPO(make_env(lambda completions: [None] * len(completions)), policy, config).learn(100)


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopTraining])
def test_a_wish_to_stop_saves_the_agent(error, tmp_path):
    def stops(completions):
        raise error

    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=0)
    config = PPOConfig(num_steps=None, num_episodes=8, minibatch_size=8)
    for on_error in ("stop", "skip"):
        with pytest.raises(error):
            PPO(make_env(Rewards(stops, on_error=on_error)), policy, config).learn(100, run_dir=tmp_path / on_error)
        assert (tmp_path / on_error / "config.json").is_file()
