"""Settings and fixtures of all tests."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# One thread is fastest for models of this size, and results do not depend on the number of cores.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def threads_as_they_were():
    """Examples and benchmarks choose a number of threads, which must not be that of the next test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


from tests.helpers.models import WORDS, make_tokenizer  # noqa: E402  (after the threads are set)


@pytest.fixture
def tokenizer():
    """Nine words; EOS is 7 and pad 8."""
    return make_tokenizer(WORDS)
