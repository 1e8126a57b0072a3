"""Steps a second of 1, 2 and 4 processes under torchrun, and the constants from which scaling_model.py predicts them.

    python examples/benchmarks/scaling.py --out scaling.json     # about 10 minutes on two free cores
    python examples/benchmarks/scaling_model.py scaling.json     # measured and simulated, side by side

The workloads are CartPole, an environment that computes for 5 ms a step, and tiny text; their runs alternate. The first
table has the median speeds, and the efficiency: speed-up divided by the number of processes. The constants are measured
apart from them: one process that takes itself for the first of n, in PyTorch's fake process group, whose messages cost
nothing, gives the seconds that every process repeats and those that they share; processes that do little but send
messages give latency and bandwidth.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import gymnasium
import torch
from tensordict import TensorDict
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from algos import PPO, Callback, PPOConfig, presets
from algos.make import make_vector_environment
from algos.ranks import collectives
from algos.storage.checkpoint import write_checkpoint

ITERATIONS = {"cartpole": 12, "5 ms": 4, "text": 5}
"""Iterations of a run; the first is not counted."""
COUNTS = (1, 2, 4)
PHASES = ("collect", "penalty", "update")
MESSAGES = {"all_reduce": (256, 4_096, 65_536, 1_048_576), "all_gather": (256, 65_536, 1_048_576)}
"""Bytes of the messages that are timed."""


def compute(seconds):
    """Use the processor for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Slow(gymnasium.Wrapper):
    """Computes for 5 ms at every step."""

    def step(self, action):
        compute(0.005)
        return super().step(action)


def make_agent(name):
    """Agent of a workload, with this process's share of the slots."""
    count = collectives.world_size()
    if name == "text":
        env = make_vector_environment("textenv/Reviews-v0", num_envs=64 // count)
        return PPO(env, None, presets.TEXT_EMBEDDED, kl_coef=0.1)
    wrappers = [Slow] if name == "5 ms" else []
    env = gymnasium.make_vec("CartPole-v1", num_envs=16 // count, vectorization_mode="sync", wrappers=wrappers)
    return PPO(env, None, PPOConfig(num_steps=32 if wrappers else 128, minibatch_size=256))


class RolloutSize(Callback):
    """Bytes of the last rollout."""

    def on_rollout(self, run, rollout):
        self.bytes = sum(x.nbytes for x in rollout.values() if isinstance(x, torch.Tensor))


def work(name):
    """Train for a few iterations; return what they took, and how much they did."""
    agent, size = make_agent(name), RolloutSize()
    history = agent.learn(
        10**9, callbacks=[size], on_iteration=lambda metrics: metrics["iteration"] >= ITERATIONS[name]
    )
    spans = [later["time/seconds"] - sooner["time/seconds"] for sooner, later in pairwise(history)]
    steps = [later["steps"] - sooner["steps"] for sooner, later in pairwise(history)]
    found = {"speed": sum(steps) / sum(spans), "steps": statistics.mean(steps)}
    if not collectives.rank():
        found |= {"rollout_bytes": size.bytes, "minibatches": history[-1]["update/minibatches"]}
    found["gradient_bytes"] = 4 * sum(x.numel() for x in agent.policy.parameters() if x.requires_grad)
    for phase in PHASES:
        found[phase] = statistics.median(row[f"time/{phase}"] for row in history[1:])
    found["rest"] = statistics.median(spans) - sum(found[phase] for phase in PHASES)
    return found


def messages(rounds=80, seconds=0.002):
    """Mean seconds of each message of `MESSAGES` between these processes, which compute for 2 ms before each.

    Processes that do nothing but send find each other awake: a message between two minibatches takes longer.
    """
    found = {kind: [] for kind in MESSAGES}
    count = collectives.world_size()
    for kind, sizes in MESSAGES.items():
        for size in sizes:
            own = torch.zeros(size // 4)
            parts = [torch.empty_like(own) for _ in range(count)]
            distributed.barrier()
            start = time.perf_counter()
            for _ in range(rounds):
                compute(seconds)
                if kind == "all_reduce":
                    distributed.all_reduce(own)
                else:
                    distributed.all_gather(parts, own)
            spent = (time.perf_counter() - start) / rounds
            found[kind].append(spent - seconds * max(1, count / os.cpu_count()))
    return found


def saved(count=60_000_000):
    """Bytes a second of a checkpoint, written, verified and flushed, and of a rollout of four processes, pickled."""
    clock, state = [time.perf_counter()], {"weights": torch.rand(count)}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        clock.append(time.perf_counter())
        write_checkpoint(folder, state, steps=1)
        clock.append(time.perf_counter())
    rollout = TensorDict({str(i): torch.rand(8, count // 320) for i in range(10)}, batch_size=[8, count // 320])
    rollout["group"] = torch.zeros(rollout.shape, dtype=torch.int64)
    clock.append(time.perf_counter())
    whole = collectives.gather_rows(rollout)
    clock.append(time.perf_counter())
    size = sum(x.nbytes for x in whole.values())
    return {"checkpoint": 4 * count / (clock[2] - clock[1]), "rollout": size / (clock[4] - clock[3])}


def run(count, *arguments):
    """What so many processes print."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
    command = [sys.executable, *torchrun, __file__, "--work", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(ended.stdout)


def child(name, alone="0"):
    """Do one measurement in this process, or as the first of ``alone`` processes, and print it."""
    if int(alone) > 1:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(alone))
    collectives.start()
    torch.set_num_threads(1)
    found = messages() if name == "messages" else saved() if name == "saved" else work(name)
    if not collectives.rank():
        print(json.dumps(found))


def median(runs):
    """Median of each number of several runs."""
    return {name: statistics.median(each[name] for each in runs) for name in runs[0]}


def main(repeats, out):
    runs, alone = ({(name, count): [] for name in ITERATIONS for count in COUNTS} for _ in range(2))
    sent = {count: [] for count in COUNTS[1:]}
    for _ in range(repeats):  # what is compared runs side by side, as the machine may be busy for a while
        for name, count in runs:
            runs[name, count].append(run(count, name))
            alone[name, count].append(run(1, name, count))
        for count, found in sent.items():
            found.append(run(count, "messages"))
    print("| workload | processes | steps a second | speed-up | efficiency |\n| --- | --- | --- | --- | --- |")
    speeds = {key: statistics.median(each["speed"] for each in found) for key, found in runs.items()}
    for (name, count), speed in speeds.items():
        gain = speed / speeds[name, 1]
        print(f"| {name} | {count} | {speed:,.0f} | {gain:.2f} | {gain / count:.2f} |")
    found = {
        "cores": os.cpu_count(),
        "speeds": {name: {str(count): speeds[name, count] for count in COUNTS} for name in ITERATIONS},
        "alone": {name: {str(count): median(alone[name, count]) for count in COUNTS} for name in ITERATIONS},
        "messages": {
            str(count): {
                kind: [[size, statistics.median(one[kind][i] for one in found)] for i, size in enumerate(sizes)]
                for kind, sizes in MESSAGES.items()
            }
            for count, found in sent.items()
        },
        "bytes": run(1, "saved", 4),
    }
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("scaling.json"), help="file for the constants")
    options = parser.parse_args()
    if options.work:
        child(*options.work)
    else:
        main(options.repeats, options.out)
