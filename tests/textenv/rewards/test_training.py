"""A reward function sees where the training stands, and reports numbers that are not paid."""

import logging

import pytest

from tests.helpers.slow_rewards import Judge, sees_training, sees_training_async
from tests.helpers.text_envs import GOOD, REWARDED, make_env, play
from textenv import HumanReward, Rewards, TextEnv, check_reward
from textenv.checks.reward_checker import run_reward_checks
from textenv.envs.task import FunctionTask
from textenv.rewards import clip
from textenv.rewards.scores import RewardError
from textenv.rewards.training import RewardLog, training

ROWS = {"prompts": ["?"] * 5, "completions": ["a", "bb", "ccc", "dddd", "eeeee"]}


def human(tmp_path):
    """Everything is scored by the fallback, row 0 apart, which the person answers."""

    class Annotator:
        name = "test"

        def ask(self, question):
            return "up" if question.responses == ("a",) else "skip"

    return HumanReward(tmp_path / "answers.jsonl", annotator=Annotator(), fallback=clip(sees_training, 0, 100))


WAYS = {
    "plain": lambda: Rewards(sees_training),
    "in parts": lambda: Rewards(sees_training, workers=2),
    "with a time limit": lambda: Rewards(sees_training, timeout=60),
    "in processes": lambda: Rewards(sees_training, workers=2, processes=True),
    "async": lambda: Rewards(sees_training_async),
    "async in parts": lambda: Rewards(sees_training_async, workers=2),
    "an object with an async call": lambda: Rewards(Judge()),
    "transformed": lambda: Rewards(clip(sees_training, 0, 100)),
    "transformed twice": lambda: Rewards(clip(clip(sees_training_async, 0, 100), 0, 100)),
    "transformed outside": lambda: Rewards(clip(Rewards(sees_training, workers=2), 0, 100)),
    "nested": lambda: Rewards(Rewards(sees_training)),
    "nested with a time limit": lambda: Rewards(Rewards(sees_training, workers=2), timeout=60),
    "forgiving": lambda: Rewards(sees_training, on_error="skip"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("way", WAYS)
def test_step_progress_and_log_arrive_in_every_way(way):
    rewards = WAYS[way]()
    with training(8, 0.5):
        scores = rewards(**ROWS)
    assert scores.score == [8.5] * 5
    assert scores.logged["length"] == [1, 2, 3, 4, 5]
    assert scores.logged["rows"] in ([5] * 5, [2, 2, 3, 3, 3]), "one number for all rows of a call"
    assert rewards(**ROWS).score == [0] * 5, "outside a training"


def test_a_fallback_logs_at_the_rows_it_scored(tmp_path):
    with training(8, 0.5):
        scores = Rewards(human(tmp_path))(**ROWS)
    assert scores.score == [1.0, 8.5, 8.5, 8.5, 8.5]
    assert scores.logged == {"length": [None, 2, 3, 4, 5], "rows": [None, 4, 4, 4, 4]}


def test_values_logged_twice_are_averaged():
    """None does not count."""
    log = RewardLog(3)
    for value in (1, [3, None, 6], 2.0):
        log("x", value)
    log("nowhere", [None] * 3)
    assert log.columns() == {"x": [2, 1.5, 3], "nowhere": [None] * 3}


@pytest.mark.parametrize("value", [[], [1, 2], [1, 2, 3, 4], None, "good", ["1", "2", "3"], [[1], [2], [3]],
                                   float("nan"), [1, float("inf"), None], {"a": 1}, 1j, [1, 2, "x"]],
                         ids=repr)  # fmt: skip
def test_a_logged_value_is_a_number_per_completion(value):
    with pytest.raises(
        ValueError, match=r"log\('x', ...\) was given .* for 3 completions, expected a name, and a finite"
    ):
        RewardLog(3)("x", value)


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match=r"log\(3, ...\) was given 1.0 for 2 completions, expected a name"):
        RewardLog(2)(3, 1.0)


def test_a_wrong_log_is_an_error_of_the_function():
    def wrong(completions, log):
        log("length", [1.0])
        return [1.0] * len(completions)

    said = r"log\('length', ...\) was given \[1.0\] for 2 completions, expected a name, and a finite number, or a list"
    with pytest.raises(RewardError, match=rf"reward 'wrong' raised ValueError: {said}"):
        Rewards({"wrong": wrong, "other": sees_training})(**ROWS)


def test_logged_numbers_are_shown_but_not_paid():
    def words(completions, log):
        log("words", [len(text.split()) or None for text in completions])
        return [float("good" in text) for text in completions]

    env = make_env(words)
    play(env, REWARDED)
    assert env.metrics["reward/log/words"] == pytest.approx((1 + 2 + 5) / 3)
    assert env.metrics["reward/words"] == 0.5, "the score of the function itself"
    assert [sample["logged"] for sample in env.samples([1, 3])] == [{"words": 2}, {"words": None}]
    several = make_env(Rewards({"a": words, "b": (words, 2.0), "c": (lambda completions: [1.0] * len(completions), 0)}))
    play(several, REWARDED)
    assert several.metrics["reward/log/a/words"] == several.metrics["reward/log/b/words"] == pytest.approx(8 / 3)
    assert "reward/log/c" not in " ".join(several.metrics)


def test_logs_of_a_failed_completion_do_not_count():
    def length(completions, log):
        log("length", [len(text) for text in completions])
        if "bb" in completions:
            raise ValueError("no")
        return [1.0] * len(completions)

    scores = Rewards(length, on_error="skip", max_failed=0.5)(**ROWS)
    assert scores.failed == {1} and scores.logged == {"length": [1, None, 3, 4, 5]}


def test_columns_of_prompts_win_over_the_training(caplog):
    """A warning says so."""
    seen = {}

    def look(completions, step, progress, log):
        seen.update(step=step, progress=progress, log=log)
        return [0.0] * len(completions)

    with caplog.at_level(logging.WARNING), training(8, 0.5):
        task, _ = (FunctionTask([{"prompt": "a", "step": 3, "log": "x"}], look) for _ in ("training", "evaluation"))
        play(make_env(None, prompts=None, task=task), [(GOOD,) * 5] * 2)
    assert seen == {"step": [3, 3], "progress": 0.5, "log": ["x", "x"]}
    assert caplog.text.count("the prompts have columns named log, step: rewards get these, not the training's") == 1


def test_further_columns_hold_only_columns():
    def look(completions, **columns):
        return [float("step" in columns or "progress" in columns or "log" in columns)] * len(completions)

    assert Rewards(look)(**ROWS).score == [0] * 5


def test_a_single_environment_sees_no_training():
    env = make_env(sees_training, num_envs=1)
    single = TextEnv(env.task, tokenizer=env.tokenizer, max_prompt_tokens=4, max_new_tokens=2)
    for where, paid in ((training(8, 0.5), 8.5), (training(0, 0.0), 0.0)):
        with where:
            single.reset(seed=0)
            single.step(GOOD)
            assert single.step(GOOD)[1] == paid


def test_check_reward_gives_step_progress_and_log():
    assert not run_reward_checks(
        lambda completions, step, progress, log: [len(x) + step + progress for x in completions]
    ).broken

    def wrong(completions, log):
        log("length", [1.0])
        return [float(len(text)) for text in completions]

    with pytest.raises(ValueError, match=r"reward 'wrong' raised ValueError .*log\('length', ...\) was given"):
        check_reward(wrong)
