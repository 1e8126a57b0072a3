"""Steps a second of 1, 2 and 4 processes under torchrun: CartPole, an environment of 5 ms a step, and tiny text.

    python examples/benchmarks/scaling.py                  # about 5 minutes on two free cores

The runs alternate; the table has the medians, and the efficiency: speed-up divided by the number of processes.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import gymnasium
import torch

from algos import PPO, PPOConfig, parallel, presets
from algos.make import make_vector_environment

WORKLOADS = ("cartpole", "5 ms", "text")


class Slow(gymnasium.Wrapper):
    """Computes for 5 ms at every step."""

    def step(self, action):
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass
        return super().step(action)


def work(name):
    """Train this process's share for a few iterations, and print the steps a second of all."""
    parallel.start()
    torch.set_num_threads(1)
    size = parallel.world_size()
    if name == "text":
        env = make_vector_environment("textenv/Reviews-v0", num_envs=64 // size)
        agent = PPO(env, None, presets.TEXT_EMBEDDED, kl_coef=0.1)
    else:
        wrappers = [Slow] if name == "5 ms" else []
        env = gymnasium.make_vec("CartPole-v1", num_envs=16 // size, vectorization_mode="sync", wrappers=wrappers)
        agent = PPO(env, None, PPOConfig(num_steps=32 if wrappers else 128, minibatch_size=256))
    history = agent.learn(10**9, on_iteration=lambda metrics: metrics["iteration"] >= (4 if name != "cartpole" else 12))
    if not parallel.rank():
        seconds = history[-1]["time/seconds"] - history[0]["time/seconds"]
        print((history[-1]["steps"] - history[0]["steps"]) / seconds)


def main(repeats):
    counts = (1, 2, 4)
    found = {(name, count): [] for name in WORKLOADS for count in counts}
    for _ in range(repeats):
        for name, count in found:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
            ended = subprocess.run(
                [*command, __file__, "--work", name], check=True, capture_output=True, text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            found[name, count].append(float(ended.stdout))
    print("| workload | processes | steps a second | speed-up | efficiency |\n| --- | --- | --- | --- | --- |")
    for (name, count), speeds in found.items():
        gain = statistics.median(speeds) / statistics.median(found[name, 1])
        print(f"| {name} | {count} | {statistics.median(speeds):,.0f} | {gain:.2f} | {gain / count:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKLOADS, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.work:
        work(options.work)
    else:
        main(options.repeats)
