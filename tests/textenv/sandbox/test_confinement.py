"""Systems that cannot close off a process, and limits of one that does not."""

import subprocess
import sys

import pytest

from tests.helpers.errors import refused
from tests.helpers.sandbox import closed_or_skip
from textenv.sandbox.running import CodeTester

WITHOUT_LANDLOCK = """
import ctypes, errno, struct
# A filter of system calls, by which this kernel has no Landlock for us: call 444 is unknown, all others are allowed
load, if_equal, answer = 0x20, 0x15, 0x06
lines = [(load, 0, 0, 0), (if_equal, 0, 1, 444), (answer, 0, 0, 0x50000 | errno.ENOSYS), (answer, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0
from textenv import rewards
assert rewards.python_tests(unsafe=True)(completions=["f = abs"], tests=["assert f(-2) == 2"]) == [1.0]
try:
    rewards.python_tests()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.heavy
def test_a_kernel_without_landlock_is_refused_unless_unsafe():
    closed_or_skip()
    command = [sys.executable, "-c", WITHOUT_LANDLOCK]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no Landlock" in process.stdout and "python_tests(unsafe=True)" in process.stdout
    assert "reads and writes what you can" in process.stderr


def test_lower_limits_stay():
    closed_or_skip()
    program = """
import resource
from textenv.sandbox.running import CodeTester
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
tester = CodeTester(seconds=5, memory_mb=300, unsafe=False)
assert tester.count_passed("import resource as r", ["assert r.getrlimit(r.RLIMIT_FSIZE) == (2**20, 2**20)"]) == 1
assert resource.getrlimit(resource.RLIMIT_CPU)[0] == resource.RLIM_INFINITY
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_limit_that_is_no_whole_number_is_refused():
    with refused(TypeError, "seconds is 1.5", "whole number"):
        CodeTester(seconds=1.5, memory_mb=1024, unsafe=False)
    with refused(TypeError, "memory_mb is '1'"):
        CodeTester(seconds=1, memory_mb="1", unsafe=False)


def test_limits_under_which_nothing_runs_are_refused():
    closed_or_skip()
    with refused(RuntimeError, "no Python starts with 0 s", "higher limits"):
        CodeTester(seconds=0, memory_mb=1024, unsafe=False)
