"""How reward functions are called: with what they take, and with copies."""

import asyncio
import threading
from collections import OrderedDict, deque

import numpy as np
import pytest

from tests.helpers.slow_rewards import Judge, sees_training_async
from tests.helpers.text_envs import EOS, REWARDED, good, paid, rewarded
from textenv import Rewards
from textenv.rewards.calling import call_reward
from textenv.rewards.scores import RewardError


def test_a_function_gets_what_its_signature_takes():
    columns = dict(prompts=["a"], completions=["b"], answer=["c"])
    assert call_reward(lambda completions, prompts: [completions, prompts], columns) == [["b"], ["a"]]
    assert call_reward(lambda **given: sorted(given), columns) == ["answer", "completions", "prompts"]
    assert call_reward(lambda prompts, gold=None: gold, columns) is None
    with pytest.raises(ValueError, match="needs the column 'gold', 'other'.*'answer'"):
        call_reward(lambda prompts, gold, *, other: [], columns)


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


def test_async_functions_are_awaited_in_any_loop():
    import asyncio

    async def slow(completions):
        await asyncio.sleep(0.01)
        return [1.0] * len(completions)

    assert rewarded(slow, REWARDED)["reward"].sum() == 4

    async def notebook():
        return rewarded(slow, REWARDED)["reward"].sum()

    assert asyncio.run(notebook()) == 4


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


def test_parameters_by_position_are_refused():
    def by_position(completions, /):
        return [1.0] * len(completions)

    with pytest.raises(ValueError, match="takes completions by position only.*remove the / from its parameters"):
        Rewards(by_position)(prompts=["p"], completions=["c"])

    def with_default(cache=0.5, /, *, completions):
        return [cache] * len(completions)

    assert Rewards(with_default)(prompts=["p"], completions=["c"]).score == [0.5]


def test_columns_of_another_argument_are_refused():
    with pytest.raises(ValueError, match=r"\['completions'\].*rename"):
        rewarded(good, [(EOS,)], prompts=[{"prompt": "a", "completions": "x"}])


ROWS = {"prompts": ["?"] * 5, "completions": ["a", "bb", "ccc", "dddd", "eeeee"]}


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
    assert Rewards({"good": good, "fails": fails}, on_error="skip", max_failed=0.5)(**ROWS).score == [2, 2, None, 2, 2]
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
