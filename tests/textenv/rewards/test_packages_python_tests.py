"""Unit tests of generated Python, in processes with limits."""

import os
import socket
import subprocess
import time

import pytest

from tests.helpers.errors import refused
from tests.helpers.rating import rate
from textenv import rewards

DOUBLE = "def f(x):\n    return 2 * x\n"
TESTS = ["assert f(2) == 4", "assert f(0) == 0", "assert f(1) == 3"]


@pytest.fixture(scope="module")
def tested():
    return rewards.python_tests()


def test_the_score_is_the_fraction_of_passed_tests(tested):
    answers = [
        DOUBLE,
        f"So:\n```python\n{DOUBLE}```\nas asked.",
        f"```\nno code\n```\n```py\n{DOUBLE}\n```",
        DOUBLE,
        DOUBLE,
    ]
    tests = [TESTS[:2], TESTS, "assert f(2) == 4", [], None]
    assert rate(tested, *answers, tests=tests) == [1.0, pytest.approx(2 / 3), 1.0, None, None]
    broken = ["", "def f(x", "raise SystemExit(0)", "import os; os._exit(0)", "\ud800",
              "def f(x): raise KeyboardInterrupt", "def f(x):\n    exit(0)"]  # fmt: skip
    assert rate(tested, *broken, tests=[TESTS[:2]] * len(broken)) == [0.0] * len(broken)
    assert rate(tested, DOUBLE + "if __name__ == '__main__':\n    input()", tests=["assert f(2) == 4"]) == [1.0]


def test_endless_or_greedy_code_is_stopped():
    """Of time, memory or disk."""
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


def without_namespaces():
    return subprocess.run(["unshare", "-Upfn", "true"], check=False, capture_output=True).returncode


def test_code_has_no_network(tested):
    if without_namespaces():
        pytest.skip("the kernel forbids unprivileged network namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket; socket.create_connection({server.getsockname()!r}, 5)"
        assert rate(tested, "import socket", connect, tests=["socket.socket()", "pass"]) == [1.0, 0.0]
        socket.create_connection(server.getsockname(), 5).close()  # the attack works here, or this is no test


def test_what_code_has_started_ends_with_it(tested, tmp_path):
    if without_namespaces():
        pytest.skip("the kernel forbids unprivileged namespaces")
    sign = tmp_path / "alive"
    daemon = f"""
import os, time
if not os.fork():
    os.setsid()
    while True:
        open({str(sign)!r}, "a").write("x")
        time.sleep(.01)
"""
    found = rate(tested, daemon, tests=[f"import os\nwhile not os.path.exists({str(sign)!r}): pass"])
    size = sign.stat().st_size
    time.sleep(0.2)
    assert found == [1.0] and size and sign.stat().st_size == size


def test_limits_under_which_nothing_runs_are_refused():
    with refused(RuntimeError, "no Python starts with 0 s", "higher limits"):
        rewards.python_tests(seconds=0)
