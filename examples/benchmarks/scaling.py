"""Steps a second of 1, 2 and 4 processes under torchrun, and the constants from which scaling_model.py predicts them.

    python examples/benchmarks/scaling.py --out scaling.json     # about 6 minutes on two free cores
    python examples/benchmarks/scaling_model.py scaling.json     # measured and simulated, side by side

The workloads are CartPole, an environment that computes for 5 ms a step, and tiny text; their runs alternate. The first
table has the median speeds, and the efficiency: speed-up divided by the number of processes. The constants are measured
apart from them: one process with 1/1, 1/2 and 1/4 of the rows gives the seconds of an iteration that a process cannot
share and those that it can; processes that only send messages give the latency and the bandwidth.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import gymnasium
import torch
from tensordict import TensorDict

from algos import PPO, PPOConfig, parallel, presets
from algos.make import make_vector_environment
from algos.training.checkpoint import write_checkpoint

ITERATIONS = {"cartpole": 12, "5 ms": 4, "text": 5}
"""Iterations of a run; the first is not counted."""
COUNTS = (1, 2, 4)
PHASES = ("collect", "penalty", "update", "rest")
MESSAGES = {"all_reduce": (256, 4_096, 65_536, 1_048_576), "gather": (1_024, 65_536, 524_288, 4_194_304)}
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


def make_agent(name, slots, rows):
    """Agent of a workload with 1/``slots`` of its slots, and 1/``rows`` of the rows of a rollout and minibatch."""
    if name == "text":
        config, env = presets.TEXT_EMBEDDED, make_vector_environment("textenv/Reviews-v0", num_envs=64 // slots)
        config = replace(config, num_episodes=config.num_episodes // rows, minibatch_size=config.minibatch_size // rows)
        return PPO(env, None, config, kl_coef=0.1)
    wrappers = [Slow] if name == "5 ms" else []
    env = gymnasium.make_vec("CartPole-v1", num_envs=16 // slots, vectorization_mode="sync", wrappers=wrappers)
    return PPO(env, None, PPOConfig(num_steps=32 if wrappers else 128, minibatch_size=256 // rows))


def work(name, part):
    """Train for a few iterations; return what they took, and how much they did."""
    agent = make_agent(name, parallel.world_size() * part, part)
    size = []
    original, policy = agent.collect, agent.policy

    def collect():
        rollout = original()
        size[:] = [sum(x.nbytes for x in rollout.values() if isinstance(x, torch.Tensor)), rollout.shape[1]]
        return rollout

    agent.collect = collect
    history = agent.learn(10**9, on_iteration=lambda metrics: metrics["iteration"] >= ITERATIONS[name])
    spans = [
        later["time/seconds"] - sooner["time/seconds"] for sooner, later in zip(history, history[1:], strict=False)
    ]
    steps = [later["steps"] - sooner["steps"] for sooner, later in zip(history, history[1:], strict=False)]
    found = {"speed": sum(steps) / sum(spans), "steps": statistics.mean(steps), "columns": size[1]}
    found |= {"rollout_bytes": size[0], "minibatches": history[-1]["update/minibatches"]}
    found["gradient_bytes"] = 4 * sum(x.numel() for x in policy.parameters() if x.requires_grad)
    phases = [{phase: row[f"time/{phase}"] for phase in PHASES[:-1]} for row in history[1:]]
    for row, seconds in zip(phases, spans, strict=True):
        row["rest"] = seconds - sum(row.values())
    return found | {phase: statistics.median(row[phase] for row in phases) for phase in PHASES}


def messages(rounds=80, seconds=0.002):
    """Mean seconds of each message of `MESSAGES` between these processes, which compute for 2 ms before each.

    Processes that do nothing but send find each other awake: a message between two minibatches takes longer.
    """
    found = {kind: [] for kind in MESSAGES}
    own = seconds * max(1, parallel.world_size() / os.cpu_count())
    for kind, sizes in MESSAGES.items():
        for size in sizes:
            parameter = torch.nn.Parameter(torch.zeros(size // 4))
            columns = TensorDict({str(i): torch.zeros(size // 32) for i in range(8)}, batch_size=[size // 32])
            parallel.gather(None)
            start = time.perf_counter()
            for _ in range(rounds):
                compute(seconds)
                if kind == "all_reduce":
                    parallel.add_up([parameter], [])
                else:
                    parallel.gather(columns)
            found[kind].append([size, (time.perf_counter() - start) / rounds - own])
    return found


def saved(count=60_000_000):
    """Bytes of a checkpoint, and the seconds to write, verify and flush it."""
    state = {"weights": torch.rand(count)}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        start = time.perf_counter()
        write_checkpoint(folder, state, steps=1)
        return [4 * count, time.perf_counter() - start]


def run(count, *arguments):
    """What so many processes print."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
    command = [sys.executable, *torchrun, __file__, "--work", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(ended.stdout)


def child(name, part="1"):
    """Do one measurement in this process, and print it."""
    parallel.start()
    torch.set_num_threads(1)
    found = messages() if name == "messages" else saved() if name == "saved" else work(name, int(part))
    if not parallel.rank():
        print(json.dumps(found))


def median(runs):
    """Median of each number of several runs."""
    return {name: statistics.median(each[name] for each in runs) for name in runs[0]}


def main(repeats, out):
    runs = {(name, count): [] for name in ITERATIONS for count in COUNTS}
    parts = {(name, part): [] for name in ITERATIONS for part in COUNTS}
    for _ in range(repeats):
        for name, count in runs:
            runs[name, count].append(run(count, name))
        for name, part in parts:
            parts[name, part].append(run(1, name, part))
    print("| workload | processes | steps a second | speed-up | efficiency |\n| --- | --- | --- | --- | --- |")
    speeds = {key: statistics.median(each["speed"] for each in found) for key, found in runs.items()}
    for (name, count), speed in speeds.items():
        gain = speed / speeds[name, 1]
        print(f"| {name} | {count} | {speed:,.0f} | {gain:.2f} | {gain / count:.2f} |")
    found = {
        "cores": os.cpu_count(),
        "speeds": {name: {str(count): speeds[name, count] for count in COUNTS} for name in ITERATIONS},
        "parts": {name: {str(part): median(parts[name, part]) for part in COUNTS} for name in ITERATIONS},
        "messages": {str(count): run(count, "messages") for count in COUNTS[1:]},
        "checkpoint": run(1, "saved"),
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
