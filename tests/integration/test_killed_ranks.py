"""A process of several is killed at 20 random moments: each time the run goes on, and loses at most an interval."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOMENTS, EVERY, ITERATION = 20, 256, 128
LIMIT = 120
"""Seconds that anything may take that this test waits for."""


def start(folder):
    """A run of two processes that never ends by itself, started and resumed by the same command."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={MOMENTS}"]
    train = ["-m", "algos", "train", "CartPole-v1", "--run-dir", folder, "--resume", folder, "--num-envs", "4"]
    length = ["--total-steps", "100000000", "--checkpoint-every", EVERY, "--num-episodes", "2"]
    config = ["--config.num-steps", ITERATION // 4, "--config.minibatch-size", "64"]
    command = [sys.executable, *torchrun, *train, *length, *config]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*map(str, command)], cwd=ROOT, env=environment, stdout=log, stderr=log)


def new_ranks(process, seen):
    """Both processes, when they are not those that were seen before."""
    return wait(lambda: len(found := ranks(process) - seen) == 2 and found, process)


def wait(done, process):
    """Wait until this is true; its value."""
    end = time.monotonic() + LIMIT
    while not (found := done()):
        assert process.poll() is None and time.monotonic() < end, f"{process.args}: ended with {process.poll()}"
        time.sleep(0.01)
    return found


def ranks(process):
    """Ids of the processes that train."""
    found = set(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
    return {pid for pid in found if (path := Path(f"/proc/{pid}/cmdline")).exists() and b"algos" in path.read_bytes()}


def rows(folder):
    """Complete lines of the log."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def stop(process):
    """End training after its iteration, with a checkpoint."""
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are found in /proc")
def test_a_killed_rank_loses_at_most_an_interval(tmp_path):
    rng, killed, seen = random.Random(21), tmp_path / "killed", set[int]()
    process, losses = start(killed), []
    try:
        for _ in range(MOMENTS):
            here = new_ranks(process, seen)
            if rng.random() < 0.75:  # in the training: collecting, updating, logging or writing a checkpoint
                before = len(rows(killed))
                wait(lambda count=before: len(rows(killed)) not in (0, count), process)
                time.sleep(rng.random())
            else:  # at the start
                time.sleep(4 * rng.random())
            seen |= here
            os.kill(rng.choice(sorted(here)), signal.SIGKILL)
            wait(lambda both=here: not ranks(process) & both, process)
            logged, kept = rows(killed), sorted((killed / "checkpoints").glob("step-" + "[0-9]" * 12))
            losses.append((logged[-1]["steps"] if logged else 0) - (int(kept[-1].name[5:]) if kept else 0))
        new_ranks(process, seen)
        count = len(logged)
        wait(lambda: len(rows(killed)) > count, process)
        stop(process)
        found = rows(killed)
        process = start(tmp_path / "whole")
        wait(lambda: len(rows(tmp_path / "whole")) >= len(found), process)
        stop(process)
    finally:
        if process.poll() is None:
            for pid in [*ranks(process), process.pid]:
                os.kill(pid, signal.SIGKILL)
            process.wait()
    assert len(losses) == MOMENTS and max(losses) < EVERY + ITERATION, losses
    assert [row["iteration"] for row in found] == list(range(1, len(found) + 1))
    for one, other in zip(found, rows(tmp_path / "whole"), strict=False):
        assert {x: y for x, y in one.items() if "time/" not in x} == {
            x: y for x, y in other.items() if "time/" not in x
        }
    print(f"{MOMENTS} kills, {len(found)} iterations; steps lost at each: {losses}")
