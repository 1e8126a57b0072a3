"""The scaling model against closed forms, and the files for clusters against the commands that read them."""

import contextlib
import io
import random
import re
import subprocess

import pytest
import yaml
from torch.distributed.run import get_args_parser

from algos.cli import main as command_line
from tests.helpers.models import EXAMPLES, load_example

ROOT = EXAMPLES.parent
model = load_example("benchmarks/scaling_model")
SLURM, CLUSTER = (EXAMPLES / name for name in ("slurm.sh", "ray_cluster.yaml"))
PAGE = ROOT / "docs" / "cluster.md"


def test_the_slowest_of_n_takes_the_harmonic_number():
    rng = random.Random(1)
    spent = model.data_parallel(
        16, collect=lambda rank: rng.expovariate(1), gather=0, update=lambda rank: 0, minibatches=0, all_reduce=0,
        iterations=2_000,
    )  # fmt: skip
    assert spent == pytest.approx(sum(1 / n for n in range(1, 17)), rel=0.05)


@pytest.mark.parametrize("count", [2, 5, 8])
def test_a_ring_sends_every_byte_almost_twice(count):
    spent = model.ring(count, size=1e9, bandwidth=2e9, latency=0.01)
    assert spent == pytest.approx(2 * (count - 1) * (0.01 + 0.5 / count))


def test_more_processes_than_cores_share_them_evenly():
    parts = {"gather": 0.5, "minibatches": 3, "all_reduce": 0.05, "cores": 2}
    spent = model.data_parallel(4, collect=lambda rank: 1.0, update=lambda rank: 0.1, **parts)
    assert spent == pytest.approx(4 / 2 + 0.5 + 3 * (0.4 / 2 + 0.05))
    # One works for 1 s and one for 3 on one core: both get half of it until the first has done its own, after 2 s.
    simulation, ends = model.Simulation(1), []

    def process(seconds):
        yield model.Compute(seconds)
        ends.append(simulation.now)

    assert simulation.run(process(1), process(3)) == pytest.approx(4) and ends == pytest.approx([2, 4])


@pytest.mark.parametrize("own", [True, False])
def test_workers_alternate_or_overlap_with_the_learner(own):
    """Without staleness they alternate, with it they overlap."""
    found = [
        model.asynchronous(8, batch=8, staleness=allowed, draw=lambda: 2.0, update=1.5, updates=200, own=own)
        for allowed in (0, 1, 4)
    ]
    assert found[0].seconds == pytest.approx(2.0 + 1.5) and found[0].worst == 0
    assert found[1].seconds == pytest.approx(2.0, rel=0.02) and found[1].worst == 1  # the slower of both
    assert found[2].seconds == pytest.approx(2.0, rel=0.02)


@pytest.mark.heavy
def test_no_answer_is_older_than_allowed():
    """The longest answers wait for fewer updates."""
    rng, found = random.Random(1), []
    for allowed in (0, 1, 2, 8):
        draw = lambda: rng.expovariate(1)  # noqa: E731
        found.append(model.asynchronous(32, batch=32, staleness=allowed, draw=draw, update=0.5, updates=600))
        assert found[-1].worst <= allowed
    longest = sum(1 / n for n in range(1, 33))
    assert found[0].seconds == pytest.approx(longest + 0.5, rel=0.05)
    # (longest + update) / (K + 1), and never less than the work of all slots: the rule of docs/results/scaling.md.
    for allowed, each in zip((0, 1, 2, 8), found, strict=True):
        bound = max(1.0, (longest + 0.5) / (allowed + 1))
        assert 0.97 * bound < each.seconds < 1.3 * bound


def test_constants_give_back_their_iterations():
    parts = {
        str(part): {
            "collect": 0.01 + 0.08 / part,
            "penalty": 0.02 / part,
            "update": 0.004 + 0.036 / part,
            "rest": 0.001,
        }
        | {"steps": 1_000 / part, "rollout_bytes": 4_000_000, "gradient_bytes": 1_000, "minibatches": 4}
        for part in (1, 2, 4)
    }
    sent = {
        "all_reduce": [[x, 0.001 + 1e-9 * x] for x in (10, 1e4, 1e6)],
        "all_gather": [[x, 0.002 + 1e-9 * x] for x in (1, 1e6)],
    }
    measured = {"cores": 2, "alone": {"x": parts}, "messages": {"2": sent, "4": sent}}
    assert model.simulate(measured, "x", 1) == pytest.approx(1_000 / 0.151)
    alone = 0.01 + 0.004 + 0.001
    for count, cores in ((2, 2), (4, 2)):
        shared = (alone + 0.136 / count) * count / cores
        messages = 4 * (0.001 + 1e-6) + 6 * 0.002 + 1e-9 * 4_000_000 / count
        assert model.simulate(measured, "x", count) == pytest.approx(1_000 / (shared + messages), rel=1e-3)


def test_the_formulas_of_gpus_by_hand():
    cluster, eight, rollout = model.Cluster(), model.MODELS["8 B"], model.Rollout(64)
    # 16 GB of weights, and 64 answers of 1,000 tokens with 131 kB each, at 60 % of 3.35 TB/s; 2 * 8e9 * 64 operations.
    step = (16e9 + 64 * 1_000 * 131_072) / 2.01e12 + 2 * 8e9 * 64 / (0.4 * 989e12)
    assert model.decoding_step(eight, cluster, 64, 1_000) == pytest.approx(step)
    # Two answers of 10 and 20 tokens: 10 steps of both, then 10 of one.
    both, one = (model.decoding_step(eight, cluster, n, length) for n, length in ((2, 10), (1, 20)))
    assert model.generation(eight, cluster, [20, 10], 0) == pytest.approx(10 * both + 10 * one)
    assert cluster.ring(16e9, 64) == pytest.approx(63 / 64 * 16e9 / 320e9 + 6 * 20e-6)
    tokens = sum(rollout.lengths()) + 64 * 512
    computed, sent = model.learning(eight, cluster, rollout, 64)
    assert computed == pytest.approx(12 * 8e9 * tokens / (64 * 0.4 * 989e12))
    assert sent == pytest.approx((3 * 4 + 1) * cluster.ring(16e9, 64))
    found = model.synchronous(eight, cluster, rollout, 8)
    whole = found["generate"] + found["gather"] + found["compute"] + found["messages"]
    assert found["iteration"] == pytest.approx(whole)


def flags(text):
    """The long options in a text."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def commands():
    """What follows ``algos train`` in the files for clusters and on their page."""
    text = "\n".join(path.read_text().replace("\\\n", " ") for path in (SLURM, CLUSTER, PAGE))
    return re.findall(r"algos train (.*)", text)


def test_flags_of_cluster_files_are_the_commands():
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        command_line(["train", "--help"])
    known = flags(shown.getvalue())
    given = set().union(*map(flags, commands()))
    assert {"--run-dir", "--resume", "--checkpoint-every", "--workers"} <= given and given <= known, given - known


def test_the_slurm_script_is_bash_with_real_flags():
    subprocess.run(["bash", "-n", SLURM], check=True)
    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    before = SLURM.read_text().partition("srun torchrun")[2].partition("-m algos")[0]
    assert {"--nnodes", "--nproc-per-node", "--max-restarts"} <= flags(before) <= known


def test_the_slurm_script_says_that_a_run_is_missing():
    ended = subprocess.run(["bash", SLURM], capture_output=True, text=True)
    assert ended.returncode and "give the folder of the run, then the arguments of algos train" in ended.stderr


def test_cluster_files_have_the_parts_ray_reads():
    cluster = yaml.safe_load(CLUSTER.read_text())
    assert set(cluster) <= {
        "cluster_name", "provider", "auth", "file_mounts", "rsync_exclude", "setup_commands", "head_start_ray_commands",
        "worker_start_ray_commands",
    }  # fmt: skip
    (manifest,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    job = yaml.safe_load(manifest)
    spec = job["spec"]["rayClusterSpec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert len({group["template"]["spec"]["containers"][0]["image"] for group in groups}) == 1
