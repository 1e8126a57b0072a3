"""Several processes under torchrun train as one does."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from algos.cli import main
from algos.storage.checkpoint import read_checkpoint
from tests.helpers import forks, ranks

ROOT = Path(__file__).parents[2]


def torchrun(count, *command):
    """The output of a program of Python in so many processes."""
    options = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0", f"--nproc-per-node={count}"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *options, *map(str, command)]
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended


def forked(counts, command, *arguments):
    """So many processes without torchrun, which share their imports."""
    return forks.run(ranks.train_in_processes, counts, command, arguments)


def by_torchruns_agent(count, command, *arguments, restarts=0):
    """So many processes, started and restarted by the agent of torchrun."""
    return forks.run(ranks.train_as_torchrun_starts_it, count, restarts, command, arguments, check=False)


def texts(*runs):
    return [json.dumps(asdict(run)) for run in runs]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    """The weights of both ranks."""
    return [torch.load(folder / f"weights-{rank}.pt") for rank in (0, 1)]


def trained_as_a_whole_and_in_parts(root, cases):
    """For each agent and shard, a run of four iterations on two ranks, and the first two of another one."""
    runs = []
    for name, shard in cases:
        for part, iterations in (("whole", 4), ("parts", 2)):
            runs.append(ranks.Run(name, str(root / f"{name}-{shard}-{part}"), iterations, shard=shard))
    return runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the runs that the tests below read; those that are to go on are copied."""
    root = tmp_path_factory.mktemp("trained")
    runs = [
        *trained_as_a_whole_and_in_parts(root, FAST),
        ranks.Run("ppo_critic", str(root / "ppo_critic-False-parts"), 2),
        ranks.Run("ppo_cartpole", str(root / "ppo_cartpole-False-whole"), 4),
    ]
    forked([2], "train", *texts(*runs))
    return root


FAST = [("ppo_text", False), ("ppo_critic", True), ("grpo_refills", False)]
SLOW = [("ppo_cartpole", False), ("ppo_normalized", False)]  # as the others, in another world


@pytest.mark.heavy
def test_an_update_on_several_ranks_is_that_of_one(tmp_path):
    """With whole and with sharded weights."""
    forked([1, 2, 3], "update", tmp_path)  # rows of 4 and 8, single steps of 32: not all multiples of 3
    cases = [(count, *case) for count in (2, 3) for case in ranks.cases(count)]
    for name in ranks.UPDATED:
        alone, logged = torch.load(tmp_path / f"{name}-1-0.pt")
        start, close = ranks.weights(ranks.AGENTS[name]()), 1e-3 if name == "ppo_autocast" else 1e-6
        for case in cases:
            count, agent, shard = case
            if agent != name:
                continue
            of_ranks = [torch.load(tmp_path / f"{name}-{count}-{rank}{shard}.pt") for rank in range(count)]
            together, together_logged = of_ranks[0]
            assert all(torch.equal(together, of_rank) for of_rank, _ in of_ranks), case
            assert (together - alone).abs().max() < close < (alone - start).abs().max(), case
            if close == 1e-6:
                logged.pop("update/path", None)  # the closed form, which several processes do not take
                assert together_logged == pytest.approx(logged, rel=1e-4, abs=3e-6), case


def resumed_runs_equal_whole_ones(root, cases):
    """Let the runs in parts go on in new processes, and compare logs and weights to the bit."""
    runs = [ranks.Run(name, str(root / f"{name}-{shard}-parts"), 4, shard, resume=True) for name, shard in cases]
    forked([2], "train", *texts(*runs))
    for name, shard in cases:
        whole, parts = (root / f"{name}-{shard}-{part}" for part in ("whole", "parts"))
        for one, other in zip(metrics(whole), metrics(parts), strict=True):
            assert {x: y for x, y in one.items() if "time/" not in x} == {
                x: y for x, y in other.items() if "time/" not in x
            }, name
        found = [*weights(whole), *weights(parts)]
        assert all(torch.equal(found[0], each) for each in found), name


@pytest.mark.heavy
def test_reruns_and_resumed_runs_are_equal_to_the_bit(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    resumed_runs_equal_whole_ones(tmp_path / "copy", FAST)


@pytest.mark.heavy
def test_each_rank_refills_its_part_and_counts_are_sums(trained):
    """Of 4 groups of 2 episodes each rank has two."""
    rows = metrics(trained / "grpo_refills-False-whole")
    for row in rows:
        assert row["refills/groups"] == 4 + row["refills/left_out_groups"]
        assert row["refills/episodes"] == 2 * row["refills/groups"]
        assert row["episode/length"] * row["refills/episodes"] == pytest.approx(row["rollout/steps"])
    assert max(row["refills/left_out_groups"] for row in rows) > 2  # more than one collection of one rank


@pytest.mark.slow
def test_reruns_and_resumed_runs_in_other_worlds_are_equal_to_the_bit(tmp_path):
    forked([2], "train", *texts(*trained_as_a_whole_and_in_parts(tmp_path, SLOW)))
    resumed_runs_equal_whole_ones(tmp_path, SLOW)


def test_a_sharded_run_is_saved_whole(trained):
    """And it goes on in one process."""
    agents = []
    for shard in (False, True):
        agents.append(ranks.AGENTS["ppo_critic"]())
        agents[-1].load_state_dict(read_checkpoint(trained / f"ppo_critic-{shard}-parts")["agent"])
    whole, shared = (agent.state_dict() for agent in agents)
    for name, weight in whole["policy"].items():
        assert (weight - shared["policy"][name]).abs().max() < 1e-5, name
    found = zip(whole["optimizer"]["state"].values(), shared["optimizer"]["state"].values(), strict=True)
    assert whole["optimizer"]["param_groups"] == shared["optimizer"]["param_groups"]
    for one, other in found:
        assert one.keys() == other.keys() and one["step"] == other["step"] > 0
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one[name], other[name], atol=1e-5, rtol=1e-3)


@pytest.mark.heavy
def test_a_killed_rank_loses_only_its_iteration(trained, tmp_path):
    killed = ranks.Run("ppo_cartpole", str(tmp_path / "killed"), 4, resume=True, killed_at=random.randrange(1, 63))
    ended = by_torchruns_agent(2, "train", *texts(killed), restarts=1)  # the same call starts and resumes the run
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "killed.killed").exists(), killed
    # What torchrun's agent saw first: that rank 1 was killed, or the error of rank 0, which has lost it
    assert re.search(r"failed \(exitcode: (-9\) local_rank: 1|1\) local_rank: 0) ", ended.stderr), ended.stderr
    found = [*weights(trained / "ppo_cartpole-False-whole"), *weights(tmp_path / "killed")]
    assert all(torch.equal(found[0], each) for each in found), killed
    assert [row["iteration"] for row in metrics(tmp_path / "killed")] == [1, 2, 3, 4], killed


@pytest.mark.heavy
def test_a_run_of_two_ranks_goes_on_in_one(trained, tmp_path, caplog, capsys):
    """The commands of torchrun and of one process."""
    shutil.copytree(trained / "ppo_text-False-parts", tmp_path / "run")
    # The helper makes 4 slots on each rank
    with pytest.raises(ValueError, match="8 environment slots, but this agent has 4"):
        ranks.train(ranks.Run("ppo_text", str(tmp_path / "run"), 3, resume=True))
    command = ["train", "CartPole-v1", "--run-dir", str(tmp_path / "control"), "--num-envs", "8", "--json"]
    short = [*command, "--config.num-steps", "8", "--config.minibatch-size", "16", "--num-episodes", "2"]
    first = torchrun(2, "-m", "algos", *short, "--total-steps", "128", "--checkpoint-every", "64")
    done = json.loads(first.stdout)["steps"]  # one process prints
    assert metrics(tmp_path / "control")[0]["rollout/steps"] > 32  # 8 slots, shared by both, of 8 steps
    main([*short, "--total-steps", str(done + 64), "--checkpoint-every", "64", "--resume", str(tmp_path / "control")])
    assert "2 processes, now there are 1" in caplog.text + capsys.readouterr().err
    assert [row["iteration"] for row in metrics(tmp_path / "control")] == list(range(1, done // 64 + 3))


@pytest.mark.heavy
def test_an_error_on_one_rank_ends_all(tmp_path):
    began = time.monotonic()
    ended = by_torchruns_agent(2, "fail", tmp_path / "run")
    assert ended.returncode and "the last rank's environment has broken" in ended.stderr
    assert time.monotonic() - began < 100  # torchrun's own limit is 30 s, PyTorch's half an hour
