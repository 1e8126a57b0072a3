"""Fixtures of all tests."""

import gc
import os
import signal

import pytest
import torch
from _pytest.doctest import DoctestModule

from tests.helpers.models import WORDS, make_tokenizer

# A shell that starts the suite in the background (`pytest &`) makes it and all its programs ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def check_open(file):
    """Stand in for `os.fsync`: a closed file is refused, but nobody waits for the disk.

    No test cuts the power, and the disk takes milliseconds a file, 1,600 times in test_resume.py alone. What is forced,
    and in which order, is tested in test_checkpoint.py and test_feedback_file.py, which see the calls.
    """
    if not isinstance(file, int):
        file = file.fileno()
    os.fstat(file)


os.fsync = check_open


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Examples in docstrings are those of the packages; to search the tests for them takes seconds."""
    return [collector for collector in (yield) if not isinstance(collector, DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What imports make stays: the garbage collector need not look through it, neither now nor in each test."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def threads_as_they_were():
    """Examples and benchmarks choose a number of threads, which must not be that of the next test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tokenizer():
    """Nine words; EOS is 7 and pad 8."""
    return make_tokenizer(WORDS)
