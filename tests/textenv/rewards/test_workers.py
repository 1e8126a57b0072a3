"""Reward functions in threads and processes: exits, forks, time limits and order."""

import os
import subprocess
import sys
import time

import pytest

from tests.helpers.slow_rewards import dies, hangs, leaves, own_process, raises_odd_error, slow_square
from textenv import Rewards, check_reward
from textenv.rewards.scores import RewardError


@pytest.mark.heavy
def test_an_exit_in_a_process_fails_its_row_only():
    rows = {"prompts": ["?"] * 3, "completions": ["x", "exit", "y"]}
    for options in ({"processes": True}, {"workers": 3}, {}):
        assert Rewards(leaves, on_error="skip", **options)(**rows).score == [1.0, None, 1.0]
        with pytest.raises(RewardError, match=r"SystemExit.* in row 1 \(prompt"):
            Rewards(leaves, **options)(**rows)


def test_a_reward_that_exits_is_reported():
    def leaves_now(completions):
        sys.exit(0)

    with pytest.raises(RewardError, match=r"'leaves_now' raised RuntimeError: ended by SystemExit\(0\) in row 0"):
        Rewards(leaves_now)(prompts=["?"], completions=["a"])
    with pytest.raises(ValueError, match=r"raised RuntimeError on ordinary completions, .*SystemExit\(0\)"):
        check_reward(leaves_now)


@pytest.mark.heavy
def test_a_forked_process_ends_at_its_return():
    """By a value or an error, in a function or a coroutine: the program goes on once after each."""
    program = """if True:
        import os
        from textenv import Rewards

        def returns(completions):
            if os.fork() == 0:
                return [1.0]
            os.wait()
            return [2.0]

        def fails(completions):
            if os.fork() == 0:
                raise ValueError
            os.wait()
            return [3.0]

        async def returns_later(completions):
            return returns(completions)

        async def fails_later(completions):
            return fails(completions)

        for forks in (returns, fails, returns_later, fails_later):
            print(Rewards(forks)(prompts=["?"], completions=["a"]).score, flush=True)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[2.0]\n[3.0]\n" * 2
    for name in ("returns", "fails", "returns_later", "fails_later"):
        assert f"reward '{name}' called os.fork and r" in done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [False, True])
def test_a_call_beyond_its_time_is_named_or_skipped(processes):
    start = time.monotonic()
    rows = {"prompts": ["?"] * 3, "completions": ["x", "hang", "y"]}
    with pytest.raises(RewardError, match=r"TimeoutError.*time limit of .* row 1 \(prompt '\?', completion 'hang'"):
        Rewards(hangs, timeout=0.7 if processes else 0.3, processes=processes)(**rows)
    scores = Rewards(hangs, timeout=0.7 if processes else 0.3, processes=processes, on_error="skip")(**rows)
    assert scores.score == [1.0, None, 1.0]
    assert time.monotonic() - start < 60


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [False, True])
def test_pools_keep_the_order(processes):
    rewards = Rewards(slow_square, workers=3, processes=processes)
    numbers = list(range(10))
    scores = rewards(prompts=["?"] * 10, completions=[str(n) for n in numbers])
    assert scores.score == [float(n * n) for n in numbers]


@pytest.mark.heavy
def test_processes_want_importable_functions():
    scores = Rewards(own_process, workers=2, processes=True)(prompts=["?"] * 4, completions=["x"] * 4)
    assert os.getpid() not in scores.score and len(set(scores.score)) >= 1
    with pytest.raises(TypeError, match="importable"):
        Rewards(lambda completions: [1.0], processes=True)(prompts=["?"], completions=["x"])


@pytest.mark.heavy
@pytest.mark.parametrize(("function", "word", "message"), [
    (raises_odd_error, "odd", "OddError: status 500"), (dies, "die", "worker process died"),
])  # fmt: skip
def test_a_dying_process_ends_nothing_else(function, word, message):
    rows = {"prompts": ["?"] * 3, "completions": ["x", word, "y"]}
    rewards = Rewards(function, processes=True, on_error="skip")
    assert rewards(**rows).score == [1.0, None, 1.0]
    assert rewards(prompts=["?"], completions=["x"]).score == [1.0]
    with pytest.raises(RewardError, match=message):
        Rewards(function, processes=True)(**rows)
