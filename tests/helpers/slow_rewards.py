"""Reward functions that processes can import without PyTorch."""

import asyncio
import os
import re
import subprocess
import time


def hangs(completions):
    if "hang" in completions:
        time.sleep(1000)
    return [1.0] * len(completions)


def hangs_with_the_interpreter(completions):
    """A match that takes for ever and lets no thread run."""
    if "hang" in completions:
        re.match("(a+)+$", "a" * 60 + "b")
    return [1.0] * len(completions)


def own_process(completions):
    return [float(os.getpid()) for _ in completions]


def slow_square(completions):
    time.sleep(0.3 if "0" in completions else 0.0)
    return [float(text) ** 2 for text in completions]


class OddError(Exception):
    """Does not survive pickling, as those of some HTTP clients do not."""

    def __init__(self, status, body):
        super().__init__(f"status {status}")


def raises_odd_error(completions):
    if "odd" in completions:
        raise OddError(500, "down")
    return [1.0] * len(completions)


def dies(completions):
    if "die" in completions:
        os._exit(1)
    return [1.0] * len(completions)


def leaves(completions):
    if "exit" in completions:
        raise SystemExit("good bye")
    return [1.0] * len(completions)


def starts_a_process(completions):
    """A sandbox of the reward's own, which it does not wait for."""
    return [float(subprocess.Popen(["sleep", "1000"]).pid) for _ in completions]


def sees_training(completions, step, progress, log):
    """The score is made of the point in the training; lengths, and the number of rows, are logged."""
    log("length", [len(text) for text in completions])
    log("rows", len(completions))
    return [step + progress for _ in completions]


async def sees_training_async(completions, step, progress, log):
    await asyncio.sleep(0)
    return sees_training(completions, step, progress, log)


class Judge:
    async def __call__(self, completions, step, progress, log):
        return sees_training(completions, step, progress, log)
