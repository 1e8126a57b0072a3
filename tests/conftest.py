"""Fixtures of all tests."""

import signal

import pytest
import torch

from tests.helpers.models import WORDS, make_tokenizer

# A shell that starts the suite in the background (`pytest &`) makes it and all its programs ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
