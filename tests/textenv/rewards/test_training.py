"""A reward function sees where the training stands, and reports numbers that are not paid; async ones run at once."""

import asyncio
import logging
import threading

import pytest

from tests.helpers.slow_rewards import sees_training
from tests.helpers.text_envs import GOOD, REWARDED, make_env, play
from textenv import FunctionTask, HumanReward, RewardError, Rewards, TextEnv, check_reward
from textenv.checks.reward_checker import run_reward_checks
from textenv.rewards import Normalize, clip
from textenv.rewards.training import RewardLog, training

ROWS = {"prompts": ["?"] * 5, "completions": ["a", "bb", "ccc", "dddd", "eeeee"]}


async def sees_training_async(completions, step, progress, log):
    await asyncio.sleep(0)
    return sees_training(completions, step, progress, log)


class Judge:
    async def __call__(self, completions, step, progress, log):
        return sees_training(completions, step, progress, log)


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


@pytest.mark.parametrize("way", WAYS)
def test_step_progress_and_log_arrive_in_every_way(way):
    rewards = WAYS[way]()
    with training(8, 0.5):
        scores = rewards(**ROWS)
    assert scores.earned == [8.5] * 5
    assert scores.logged["length"] == [1, 2, 3, 4, 5]
    assert scores.logged["rows"] in ([5] * 5, [2, 2, 3, 3, 3]), "one number for all rows of a call"
    assert rewards(**ROWS).earned == [0] * 5, "outside a training"


def test_a_fallback_logs_at_the_rows_it_scored(tmp_path):
    with training(8, 0.5):
        scores = Rewards(human(tmp_path))(**ROWS)
    assert scores.earned == [1.0, 8.5, 8.5, 8.5, 8.5]
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
    with pytest.raises(RewardError, match=rf"reward 'wrong' failed on 2 completions \({said}"):
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

    assert Rewards(look)(**ROWS).earned == [0] * 5


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


# --- async functions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"timeout": 60}, {"workers": 2}, {"on_error": "skip"}], ids=str)
def test_async_functions_run_at_once_in_order(options):
    """All calls are needed to pass the barrier."""
    meeting = threading.Barrier(3 * options.get("workers", 1), timeout=30)

    def function(score):
        async def waits(completions):
            await asyncio.to_thread(meeting.wait)
            return [score + len(text) for text in completions]

        return waits

    functions = {f"f{score}": (function(score), float(score)) for score in (3, 1, 2)}
    scores = Rewards({"first": lambda completions: [0.5] * len(completions), **functions}, **options)(**ROWS)
    assert list(scores.raw) == ["first", "f3", "f1", "f2"]
    assert scores.raw["f1"] == [2, 3, 4, 5, 6] and scores.parts["f3"] == [12, 15, 18, 21, 24]


def test_async_functions_run_in_a_notebooks_loop():
    async def cell():
        return Rewards({"f": Judge(), "g": sees_training_async})(**ROWS).logged["g/length"]

    assert asyncio.run(cell()) == [1, 2, 3, 4, 5]


def test_one_async_function_may_fail_or_be_late():
    async def fails(completions):
        if "ccc" in completions:
            raise KeyError("no such thing")
        return [1.0] * len(completions)

    async def late(completions):
        await asyncio.Event().wait()

    async def leaves(completions):
        raise SystemExit("good bye")

    async def good(completions):
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"reward 'fails' raised KeyError: 'no such thing' in row 2 .*'ccc'"):
        Rewards({"good": good, "fails": fails})(**ROWS)
    assert Rewards({"good": good, "fails": fails}, on_error="skip", max_failed=0.5)(**ROWS).earned == [2, 2, None, 2, 2]
    one = {name: column[:1] for name, column in ROWS.items()}
    with pytest.raises(RewardError, match="reward 'late' raised TimeoutError: the call took longer than .* 0.05 s"):
        Rewards({"good": good, "late": late}, timeout=0.05)(**one)
    with pytest.raises(RewardError, match=r"reward 'leaves' raised RuntimeError: ended by SystemExit\('good bye'\)"):
        Rewards({"good": good, "leaves": leaves})(**one)


def test_a_failure_before_it_stops_an_async_function():
    called = threading.Event()

    async def paid(completions):
        called.set()
        return [1.0] * len(completions)

    def fails(completions):
        raise ValueError("no")

    with pytest.raises(RewardError, match="reward 'fails'"):
        Rewards({"fails": fails, "paid": paid})(**ROWS)
    assert not called.is_set()


def test_nested_whole_batch_functions_are_found():
    inner = clip(Rewards({"a": Normalize(sees_training)}), -1, 1)
    with pytest.raises(ValueError, match="reward 'outer' needs whole batches"):
        Rewards({"outer": Rewards({"inner": inner})}, workers=2)
