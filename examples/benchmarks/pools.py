"""Steps a second of environments that compute for 1 and 5 ms a step: one process each, ours and Gymnasium's, or one.

    taskset -c 0,1 python examples/benchmarks/pools.py     # on two cores, a minute

Eight CartPoles, random actions; the three take turns. By the clock on the wall, as the work is in other processes.
"""

import argparse
import statistics
import time

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from algos import SubprocessVectorEnv

SLOTS, SECONDS = 8, 2.0


class Slow(gymnasium.Wrapper):
    """Computes for so many seconds at every step."""

    def __init__(self, env, seconds):
        super().__init__(env)
        self.seconds = seconds

    def step(self, action):
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return super().step(action)


class Make:
    """Makes an environment; a class, as other processes import it by name."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self):
        return Slow(gymnasium.make("CartPole-v1"), self.seconds)


POOLS = {
    "SubprocessVectorEnv (ours)": SubprocessVectorEnv,
    "AsyncVectorEnv": lambda makers: AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP),
    "SyncVectorEnv": lambda makers: SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP),
}


def speed(env):
    """Steps a second of all slots."""
    steps, start = 0, time.perf_counter()
    while time.perf_counter() < start + SECONDS:
        env.step(np.zeros(SLOTS, dtype=np.int64) + steps // SLOTS % 2)
        steps += SLOTS
    return steps / (time.perf_counter() - start)


def main(pairs):
    print("| ms a step | environment | steps/s | ours / this (least to most) |\n" + "| --- " * 4 + "|")
    for milliseconds in (1, 5):
        envs = {name: pool([Make(milliseconds / 1e3)] * SLOTS) for name, pool in POOLS.items()}
        found = {name: [] for name in envs}
        for env in envs.values():
            env.reset(seed=0)
        for _ in range(pairs):
            for name, env in envs.items():
                found[name].append(speed(env))
        for name, speeds in found.items():
            envs[name].close()
            ratios = [a / b for a, b in zip(found["SubprocessVectorEnv (ours)"], speeds, strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {milliseconds} | {name} | {statistics.median(speeds):,.0f} | {spread} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    main(parser.parse_args().pairs)
