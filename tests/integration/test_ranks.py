"""Several processes under torchrun train as one does."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from algos.storage.checkpoint import read_checkpoint
from tests.helpers import ranks

ROOT = Path(__file__).parents[2]


def run(count, *command, check=True, restarts=0, shard=""):
    """The output of so many processes; 1 starts none of torchrun's."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--max-restarts={restarts}",
        f"--nproc-per-node={count}",
    ]
    start = [sys.executable, *(torchrun if count > 1 else [])]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SHARD": shard}
    ended = subprocess.run([*start, *map(str, command)], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert not check or ended.returncode == 0, ended.stderr[-3000:]
    return ended


def script(count, *arguments, **options):
    return run(count, "tests/helpers/ranks.py", *arguments, **options)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A function that copies the first two iterations of an agent on two ranks into a folder; trains them once."""
    runs = {}

    def copy_of(name, shard, folder):
        if (name, shard) not in runs:
            runs[name, shard] = tmp_path_factory.mktemp("begun") / "run"
            script(2, "train", name, runs[name, shard], 2, shard=shard)
        shutil.copytree(runs[name, shard], folder)

    return copy_of


def test_an_update_on_several_ranks_is_that_of_one(tmp_path):
    """With whole and with sharded weights."""
    for count in (1, 2, 3):  # rows of 4 and 8, single steps of 32: not all multiples of 3
        script(count, "update", tmp_path)
    cases = [(2, ""), (3, ""), (2, "1"), (3, "1")]
    for name in ranks.UPDATED:
        alone, logged = torch.load(tmp_path / f"{name}-1-0.pt")
        start, close = ranks.weights(ranks.AGENTS[name]()), 1e-3 if name == "ppo_autocast" else 1e-6
        for count, shard in cases:
            case = (name, count, shard)
            of_ranks = [torch.load(tmp_path / f"{name}-{count}-{rank}{shard}.pt") for rank in range(count)]
            together, together_logged = of_ranks[0]
            assert all(torch.equal(together, of_rank) for of_rank, _ in of_ranks), case
            assert (together - alone).abs().max() < close < (alone - start).abs().max(), case
            if close == 1e-6:
                logged.pop("update/path", None)  # the closed form, which several processes do not take
                assert together_logged == pytest.approx(logged, rel=1e-4, abs=3e-6), case


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        pytest.param("ppo_cartpole", "", marks=pytest.mark.slow),  # as the others, in another world
        pytest.param("ppo_normalized", "", marks=pytest.mark.slow),
        ("ppo_text", ""),
        ("ppo_critic", "1"),
    ],
)
def test_reruns_and_resumed_runs_are_equal_to_the_bit(name, shard, begun, tmp_path):
    script(2, "train", name, tmp_path / "whole", 4, shard=shard)
    begun(name, shard, tmp_path / "parts")
    script(2, "train", name, tmp_path / "parts", 4, tmp_path / "parts", shard=shard)
    logs = [metrics(tmp_path / part) for part in ("whole", "parts")]
    for one, other in zip(*logs, strict=True):
        assert {x: y for x, y in one.items() if "time/" not in x} == {
            x: y for x, y in other.items() if "time/" not in x
        }
    found = [torch.load(tmp_path / part / f"weights-{rank}.pt") for part in ("whole", "parts") for rank in (0, 1)]
    assert all(torch.equal(found[0], each) for each in found)


def test_a_sharded_run_is_saved_whole(begun, tmp_path):
    """And it goes on in one process."""
    agents = []
    for shard in ("", "1"):
        begun("ppo_critic", shard, tmp_path / f"run{shard}")
        agents.append(ranks.AGENTS["ppo_critic"]())
        agents[-1].load_state_dict(read_checkpoint(tmp_path / f"run{shard}")["agent"])
    whole, shared = (agent.state_dict() for agent in agents)
    for name, weight in whole["policy"].items():
        assert (weight - shared["policy"][name]).abs().max() < 1e-5, name
    found = zip(whole["optimizer"]["state"].values(), shared["optimizer"]["state"].values(), strict=True)
    assert whole["optimizer"]["param_groups"] == shared["optimizer"]["param_groups"]
    for one, other in found:
        assert one.keys() == other.keys() and one["step"] == other["step"] > 0
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one[name], other[name], atol=1e-5, rtol=1e-3)


def test_a_killed_rank_loses_only_its_iteration(tmp_path):
    script(2, "train", "ppo_cartpole", tmp_path / "whole", 4)
    command = ["train", "ppo_cartpole", tmp_path / "killed", 4, tmp_path / "killed", random.randrange(1, 63)]
    ended = script(2, *command, restarts=1)  # the same call starts and resumes the run
    assert (tmp_path / "killed.killed").exists() and "exitcode: -9" in ended.stderr, command
    found = [torch.load(tmp_path / run / f"weights-{rank}.pt") for run in ("whole", "killed") for rank in (0, 1)]
    assert all(torch.equal(found[0], each) for each in found), command
    assert [row["iteration"] for row in metrics(tmp_path / "killed")] == [1, 2, 3, 4], command


def test_a_run_of_two_ranks_goes_on_in_one(begun, tmp_path):
    begun("ppo_text", "", tmp_path / "run")
    ended = script(1, "train", "ppo_text", tmp_path / "run", 3, tmp_path / "run", check=False)
    assert "8 environment slots, but this agent has 4" in ended.stderr  # the helper makes 4 on each rank
    command = ["-m", "algos", "train", "CartPole-v1", "--run-dir", tmp_path / "control", "--num-envs", "8", "--json"]
    short = [*command, "--config.num-steps", "8", "--config.minibatch-size", "16", "--num-episodes", "2"]
    first = run(2, *short, "--total-steps", "128", "--checkpoint-every", "64")
    done = json.loads(first.stdout)["steps"]  # one process prints
    assert metrics(tmp_path / "control")[0]["rollout/steps"] > 32  # 8 slots, shared by both, of 8 steps
    ended = run(1, *short, "--total-steps", done + 64, "--checkpoint-every", "64", "--resume", tmp_path / "control")
    assert "2 processes, now there are 1" in ended.stderr
    assert [row["iteration"] for row in metrics(tmp_path / "control")] == list(range(1, done // 64 + 3))


def test_an_error_on_one_rank_ends_all(tmp_path):
    start = time.monotonic()
    ended = script(2, "fail", tmp_path / "run", check=False)
    assert ended.returncode and "the last rank's environment has broken" in ended.stderr
    assert time.monotonic() - start < 100  # torchrun's own limit is 30 s, PyTorch's half an hour
