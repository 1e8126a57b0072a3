"""Reward functions that processes can import without PyTorch."""

import os
import time


def hangs(completions):
    if "hang" in completions:
        time.sleep(1000)
    return [1.0] * len(completions)


def own_process(completions):
    return [float(os.getpid()) for _ in completions]


def slow_square(completions):
    time.sleep(0.3 if "0" in completions else 0.0)
    return [float(text) ** 2 for text in completions]
