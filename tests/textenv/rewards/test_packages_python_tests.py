"""Unit tests of generated Python, in processes with limits."""

import math
import os
import time

import numpy as np
import pytest

from tests.helpers.errors import refused
from tests.helpers.rating import rate
from tests.helpers.sandbox import closed_or_skip
from textenv import rewards

DOUBLE = "def f(x):\n    return 2 * x\n"
TESTS = ["assert f(2) == 4", "assert f(0) == 0", "assert f(1) == 3"]


@pytest.fixture(scope="module")
def tested():
    closed_or_skip()
    return rewards.python_tests()


@pytest.mark.heavy
def test_the_score_is_the_fraction_of_passed_tests(tested):
    answers = [
        DOUBLE,
        f"So:\n```python\n{DOUBLE}```\nas asked.",
        f"```\nno code\n```\n```py\n{DOUBLE}\n```",
        DOUBLE,
        DOUBLE,
    ]
    as_pandas_reads = np.array(TESTS, dtype=object)
    tests = [TESTS[:2], as_pandas_reads, "assert f(2) == 4", [], None]
    assert rate(tested, *answers, tests=tests) == [1.0, pytest.approx(2 / 3), 1.0, None, None]
    broken = ["", "def f(x", "raise SystemExit(0)", "import os; os._exit(0)", "\ud800",
              "def f(x): raise KeyboardInterrupt", "def f(x):\n    exit(0)"]  # fmt: skip
    assert rate(tested, *broken, tests=[TESTS[:2]] * len(broken)) == [0.0] * len(broken)
    assert rate(tested, DOUBLE + "if __name__ == '__main__':\n    input()", tests=["assert f(2) == 4"]) == [1.0]


@pytest.mark.parametrize("tests", [None, math.nan, "", " \n"])
def test_an_empty_cell_has_no_tests(tested, tests):
    assert rate(tested, DOUBLE, tests=[tests]) == [None]


@pytest.mark.parametrize("tests", [{"inputs": ["2"]}, ["assert f(2) == 4", 3], 4])
def test_a_column_of_something_else_is_refused(tested, tests):
    with refused(TypeError, "'tests'", "assert f"):
        rate(tested, DOUBLE, tests=[tests])


@pytest.mark.heavy
def test_endless_or_greedy_code_is_stopped():
    """Of time, memory or disk."""
    closed_or_skip()
    started, limited = time.monotonic(), rewards.python_tests(seconds=1, memory_mb=200)
    endless = [
        "while True: pass",
        "import time; time.sleep(600)",
        "x = 'a' * 10**9",
        "open('x', 'w').write('a' * 2**25)",
    ]
    assert rate(limited, *endless, tests=["pass"] * 4) == [0.0] * 4
    hangs = "def f(x):\n    while x: pass\n    return 0"
    assert rate(limited, hangs, tests=[["assert f(0) == 0", "assert f(1) == 0"]]) == [0.5]  # passed before it hung
    assert time.monotonic() - started < 120  # ended by the limits, not by the code


def test_code_has_an_empty_folder_and_environment(tested, monkeypatch):
    monkeypatch.setenv("A_SECRET", "42")
    test = f"import os; assert 'A_SECRET' not in os.environ and os.getcwd() != {os.getcwd()!r} and os.listdir() == []"
    assert rate(tested, "open('~', 'w')", "", tests=["assert open('~')", test]) == [1.0, 1.0]


def test_unsafe_code_is_tested_in_the_same_way(caplog):
    unsafe = rewards.python_tests(unsafe=True)
    assert "unsafe=True" in caplog.text
    answers = [DOUBLE, "1 / 0", "import os; os._exit(0)", "open('x', 'w').write('a')\n" + DOUBLE]
    assert rate(unsafe, *answers, tests=[TESTS] * 4) == [pytest.approx(2 / 3), 0.0, 0.0, pytest.approx(2 / 3)]
    reads = f"def f(x): return open({__file__!r}).read()"
    assert rate(unsafe, reads, tests=["assert 'DOUBLE' in f(0)"]) == [1.0]
