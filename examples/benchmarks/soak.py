"""A long run of each kind, as a user has it with logs and checkpoints: nothing may grow, slow down or leak.

python examples/benchmarks/soak.py
python examples/benchmarks/soak.py --iterations 50 --steps 300000 --json soak.json

PPO on the text task of the benchmarks (tiny model, 32 answers of 48 tokens each iteration) and on CartPole, each in a
process of its own on one CPU and one thread. The first tenth of a run is its warm-up. Promised is that resident memory
in the last tenth is less than 2 % above that of the second, that a step in the last tenth takes the processor within
10 % of what it took in the first, and that there are no more file descriptors and threads in the last tenth than in the
second. Medians; the memory is read after ``gc.collect()`` and ``malloc_trim``. Exit status 1 if a promise is broken.
BENCH_CPU says which processor it is pinned to.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from alternation import measure
from peak_memory import status

GROWTH, SLOWDOWN = 0.02, 0.10
"""Shares by which memory and seconds a step may depart."""
SAMPLES = 200
"""Of memory, descriptors and threads in a run: at most one an iteration."""
CHECKPOINTS = 20
LIMIT = 24 * 3600
"""Seconds after which a run is given up."""


class Watch:
    """What a run takes, looked at after its iterations.

    Args:
        every: iterations from one look at memory, descriptors and threads to the next.
        enough: iterations after which training ends; None leaves that to the steps.
    """

    def __init__(self, *, every, enough=None):
        self.every, self.enough = every, enough
        self.seconds, self.memory, self.descriptors, self.threads = [], [], [], []
        self.resumed = time.process_time()

    def __call__(self, metrics):
        """See ``on_iteration`` of `algos.training.loop.learn`; the looking itself is not timed."""
        self.seconds.append((time.process_time() - self.resumed) / metrics["rollout/steps"])
        if len(self.seconds) % self.every == 0:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self.memory.append(status("VmRSS"))
            self.descriptors.append(len(os.listdir("/proc/self/fd")))
            self.threads.append(max(threading.active_count(), len(os.listdir("/proc/self/task"))))
        self.resumed = time.process_time()
        return self.enough is not None and len(self.seconds) >= self.enough

    def result(self):
        """Figures of the whole run."""
        names = ("seconds", "memory", "descriptors", "threads")
        return {name: getattr(self, name) for name in names}


def soak(kind, *, iterations, steps):
    """Train in this process; returns what `Watch` saw."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "text":
            from text_task import SHAPES, make_agent

            # Every answer is of full length, so that an iteration is as much work at the end as at the beginning.
            agent = make_agent(SHAPES["tiny"], ending=0.0)
            steps = iterations * 32 * 48
            watch = Watch(every=max(1, iterations // SAMPLES), enough=iterations)
        else:
            import gymnasium

            from algos import PPO, MLPPolicy, presets

            env = gymnasium.make_vec("CartPole-v1", num_envs=16)
            policy = MLPPolicy(env.single_observation_space, env.single_action_space, seed=1)
            agent = PPO(env, policy, presets.CARTPOLE)
            watch = Watch(every=max(1, steps // (16 * presets.CARTPOLE.num_steps) // SAMPLES))
        agent.learn(steps, run_dir=folder, checkpoint_every=max(1, steps // CHECKPOINTS), on_iteration=watch)
    return watch.result()


def verdicts(kind, result):
    """Rows of the table: what was promised of a run, what was measured, and whether it holds."""
    seconds, memory = result["seconds"], result["memory"]
    part, tenth = max(1, len(seconds) // 10), max(1, len(memory) // 10)
    first, last = statistics.median(seconds[:part]), statistics.median(seconds[-part:])
    warm, end = statistics.median(memory[tenth : 2 * tenth]), statistics.median(memory[-tenth:])
    rows = [
        row(kind, "memory", end / warm - 1, GROWTH, f"{warm:.1f} to {end:.1f} MB", holds=end / warm - 1 < GROWTH),
        row(kind, "seconds a step", last / first - 1, SLOWDOWN, f"{first * 1e6:.2f} to {last * 1e6:.2f} µs",
            holds=abs(last / first - 1) < SLOWDOWN),
    ]  # fmt: skip
    for name in ("descriptors", "threads"):
        counts = result[name]
        before, after = statistics.median(counts[tenth : 2 * tenth]), statistics.median(counts[-tenth:])
        more, note = after - before, f"{before:g} to {after:g}"
        rows.append(row(kind, name, float(more), 0.0, note, holds=more <= 0))
    return rows


def row(kind, promise, measured, limit, note, *, holds):
    """One promise."""
    return {"run": kind, "promise": promise, "departure": measured, "limit": limit, "note": note, "holds": holds}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=500, help="of PPO on text (%(default)s)")
    parser.add_argument("--steps", type=int, default=5_000_000, help="of PPO on CartPole (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=["text", "control"], default=["text", "control"])
    parser.add_argument("--json", type=Path, help="write rows and samples to this file too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the run itself, in its own process
    options = parser.parse_args()
    if options.iterations < 20 or options.steps < 20 * 16 * 64:
        parser.error("expected at least 20 iterations, and 20480 steps: a tenth must be something")
    sizes = {"iterations": options.iterations, "steps": options.steps}
    if options.here:
        print("RESULT " + json.dumps(soak(options.kinds[0], **sizes)), flush=True)
        return
    rows, samples = [], {}
    for kind in options.kinds:
        arguments = ["--here", "--kinds", kind, "--iterations", options.iterations, "--steps", options.steps]
        (samples[kind],) = measure(sys.executable, __file__, *arguments, timeout=LIMIT)
        rows += verdicts(kind, samples[kind])
    for found in rows:
        print("{run:8} {promise:15} {departure:+8.3f} (limit {limit:g})  {note:28} {verdict}".format(
            verdict="holds" if found["holds"] else "BROKEN", **found))  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "samples": samples}) + "\n", encoding="utf-8")
    sys.exit(not all(found["holds"] for found in rows))


if __name__ == "__main__":
    main()
