"""A restart of processes on several nodes, here two of torchrun's agents on one machine."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.helpers import ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_process_killed_on_one_node_restarts_on_both(tmp_path):
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test"]
    run = tmp_path / "run"
    killed = ranks.Run("ppo_cartpole", str(run), 3, resume=True, killed_at=20)
    train = ["tests/helpers/ranks.py", "train", json.dumps(asdict(killed))]
    command = [*map(str, (sys.executable, *torchrun, *meeting, *train))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as examples/slurm.sh does
    nodes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(2)
    ]
    try:
        errors = [node.communicate(timeout=150)[1] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()  # and its processes with it
                node.communicate()
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert (tmp_path / "run.killed").exists() and any("exitcode: -9" in error for error in errors), errors
    logged = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged == [1, 2, 3]
