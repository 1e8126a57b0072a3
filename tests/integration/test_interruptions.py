"""Signals, folders that vanish, and outputs that nobody reads: a sentence, a status, and what can be saved is saved."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from algos import PPO, Callback, PPOConfig
from algos.cli import main
from algos.storage.checkpoint import checkpoints, read_checkpoint
from algos.training.signals import Interrupted
from tests.helpers import forks
from tests.helpers.resumable_agents import mlp, ppo_normalized, ppo_sync
from tests.helpers.warm_start import folder_of_commands

ROOT = Path(__file__).parents[2]
STEPS = 64
TRAINING_FILES = ("algos/training/loop.py", "algos/training/run.py", "algos/training/rescue.py")
"""Of a traceback: no place inside an update or a rollout."""
"""Steps of an iteration of `ppo_sync`."""


def rows(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: x for name, x in line.items() if not name.startswith("time/")} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Metrics of a training of six iterations without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    ppo_sync().learn(STEPS * 6, run_dir=folder)
    return rows(folder / "metrics.jsonl")


def signals_at(iteration, *names):
    def send(metrics):
        if metrics["iteration"] == iteration:
            for name in names:
                os.kill(os.getpid(), getattr(signal, name))

    return send


class Sends(gym.Wrapper):
    """CartPole that sends signals to its own process at some step."""

    def __init__(self, step, *names):
        super().__init__(gym.make("CartPole-v1"))
        self.left, self.names = step, names

    def step(self, action):
        self.left -= 1
        if not self.left:
            for name in self.names:
                os.kill(os.getpid(), getattr(signal, name))
        return super().step(action)


def sending_agent(step, *names):
    env = gym.vector.SyncVectorEnv([lambda: Sends(step, *names)])
    return PPO(env, mlp(env), PPOConfig(num_steps=STEPS, minibatch_size=32))


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _hang_up_is_not_ignored():
    """Under nohup SIGHUP is ignored, in the tests too."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


@pytest.mark.heavy
@pytest.mark.parametrize("names", [["SIGINT"], ["SIGTERM"], ["SIGHUP"], ["SIGHUP", "SIGHUP"]], ids="+".join)
def test_a_signal_writes_an_unasked_checkpoint(names, whole, tmp_path):
    """`learn` in Python, with a folder and nothing else; a closed terminal sends two SIGHUP."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(Interrupted, match=f"stopped by {names[0]} after 128 steps, see .*step-000000000128") as caught:
        ppo_sync().learn(STEPS * 6, run_dir=tmp_path, on_iteration=signals_at(2, *names))
    assert caught.value.status == 128 + getattr(signal, names[0])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    ppo_sync().learn(STEPS * 6, run_dir=tmp_path, resume=tmp_path)
    assert rows(tmp_path / "metrics.jsonl") == whole


def test_an_ignored_signal_stays_ignored(tmp_path):
    """As under nohup."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        history = ppo_sync().learn(STEPS * 3, run_dir=tmp_path, on_iteration=signals_at(2, "SIGHUP"))
    finally:
        signal.signal(signal.SIGHUP, former)
    assert len(history) == 3


def frames(error):
    return [Path(frame.filename).relative_to(ROOT).as_posix() for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).is_relative_to(ROOT)]  # fmt: skip


@pytest.mark.parametrize("folder", [None, "run"])
def test_ctrl_c_is_raised_after_the_iteration(folder, tmp_path):
    """With and without a folder; its traceback shows no place inside an update or a rollout."""
    agent = sending_agent(100, "SIGINT")
    with pytest.raises(Interrupted, match="stopped by SIGINT after 1") as caught:
        agent.learn(10**6, run_dir=folder and tmp_path / folder)
    assert agent.steps > 100
    assert set(frames(caught.value)[1:]) <= {"textenv/names.py", *TRAINING_FILES}
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.heavy
def test_a_second_ctrl_c_keeps_the_last_checkpoint(tmp_path):
    expected = sending_agent(10**9).learn(STEPS * 4, run_dir=tmp_path / "whole")
    run = tmp_path / "run"
    with pytest.raises(Interrupted, match=r"stopped by SIGINT after \d+ steps, see .*step-") as caught:
        sending_agent(100, "SIGINT", "SIGINT").learn(STEPS * 4, run_dir=run)
    assert caught.value.status == 130 and caught.value.__suppress_context__
    assert set(frames(caught.value)[1:]) <= {"textenv/names.py", *TRAINING_FILES}
    assert len(rows(run / "metrics.jsonl")) == 1 and (run / "config.json").is_file()
    history = sending_agent(10**9).learn(STEPS * 4, run_dir=run, resume=run)
    assert [row["steps"] for row in history][:1] == [expected[0]["steps"]] and len(history) == len(expected)


@pytest.mark.parametrize(
    "name", [pytest.param("SIGINT", marks=pytest.mark.long), pytest.param("SIGTERM", marks=pytest.mark.slow)]
)
def test_a_signal_in_the_last_evaluation_is_heeded(name, tmp_path):
    run = tmp_path / "run"
    words = ["CartPole-v1", "--num-envs", "4", "--total-steps", "128", "--num-episodes", "10000000", "--quiet"]
    with forks.started(main, ["train", *words, "--run-dir", str(run)]) as (process, wait):
        wait_until(lambda: (run / "config.json").exists())
        time.sleep(1.5)
        os.kill(process.pid, getattr(signal, name))
        ended = wait()
    assert ended.returncode == 128 + getattr(signal, name)
    assert ended.stderr.splitlines() == [
        f"algos: stopped by {name} in the evaluation after the training, whose agent is saved in {run}: algos "
        f"evaluate {run}"
    ]


def wait_until(reached, limit=120):
    end = time.monotonic() + limit
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_resumed_training_writes_unasked_checkpoints(tmp_path):
    """The next resume went back to the first checkpoint, and replaced the longer trained agent."""
    ppo_sync().learn(STEPS * 2, run_dir=tmp_path)
    ppo_sync().learn(STEPS * 4, run_dir=tmp_path, resume=tmp_path)
    assert read_checkpoint(tmp_path)["steps"] == STEPS * 4
    assert len(ppo_sync().learn(STEPS * 6, run_dir=tmp_path, resume=tmp_path)) == 6


@pytest.mark.heavy
def test_a_longer_trained_agent_is_replaced_if_asked(tmp_path):
    """Such as one of 0.9.0, which was resumed without checkpoints."""
    ppo_sync().learn(STEPS * 6, run_dir=tmp_path)
    newest = checkpoints(tmp_path)[-1]
    shutil.rmtree(newest)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    for resume in (tmp_path, checkpoints(tmp_path)[0]):
        with pytest.raises(FileExistsError, match="trained for 384 steps, which going on from .* would replace"):
            ppo_sync().learn(STEPS * 6, run_dir=tmp_path, resume=resume)
    assert {path: path.read_bytes() for path in before} == before
    assert len(ppo_sync().learn(STEPS * 6, run_dir=tmp_path / "other", resume=tmp_path)) == 6
    assert len(ppo_sync().learn(STEPS * 5, run_dir=tmp_path, resume=tmp_path, overwrite=True)) == 5
    assert json.loads((tmp_path / "config.json").read_text())["steps"] < 384


def test_an_early_failure_goes_on_from_the_start(whole, tmp_path):
    """The same call again, as a supervisor repeats it."""

    def dies(metrics):
        raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        ppo_sync().learn(STEPS * 6, run_dir=tmp_path, resume=tmp_path, on_iteration=dies)
    with pytest.raises(RuntimeError, match="died"):
        ppo_sync().learn(
            STEPS * 6, run_dir=tmp_path, resume=tmp_path, on_iteration=lambda m: m["iteration"] == 3 and dies(m)
        )
    ppo_sync().learn(STEPS * 6, run_dir=tmp_path, resume=tmp_path)
    assert rows(tmp_path / "metrics.jsonl") == whole


# --- folders and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [False, True], ids=["removed", "moved"])
def test_a_vanished_folder_ends_the_run(moved, whole, tmp_path):
    run = tmp_path / "run"

    def vanish(metrics):
        if metrics["iteration"] == 3:
            run.rename(tmp_path / "elsewhere")
            if not moved:
                shutil.rmtree(tmp_path / "elsewhere")

    where = "it is now .*elsewhere" if moved else "it does not exist any more"
    with pytest.raises(OSError, match=f"run was removed or moved while the training used it: {where}") as caught:
        ppo_sync().learn(STEPS * 6, run_dir=run, on_iteration=vanish)
    assert f"--resume {run} goes on" in caught.value.__notes__[0]
    assert rows(run / "metrics.jsonl") == whole[:3] and (run / "config.json").is_file()
    ppo_sync().learn(STEPS * 6, run_dir=run, resume=run)
    assert rows(run / "metrics.jsonl") == whole


def test_metrics_that_are_removed_are_written_again(whole, tmp_path, caplog):
    def remove(metrics):
        if metrics["iteration"] == 3:
            (tmp_path / "metrics.jsonl").unlink()

    ppo_sync().learn(STEPS * 6, run_dir=tmp_path, on_iteration=remove)
    assert rows(tmp_path / "metrics.jsonl") == whole
    assert caplog.text.count("metrics.jsonl was removed or replaced while the training writes into it") == 1


def main_without_the_right_of_root(words):
    """The command where permissions of files count, as for any other user (CAP_DAC_OVERRIDE is taken away)."""
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the interface; this process
    present = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, present) == 0
    for place in (0, 1):  # what counts now, and what may be taken back
        present[place] &= ~(1 << 1)
    assert libc.capset(header, present) == 0
    main(words)


@pytest.mark.long
def test_a_folder_without_permission_is_named(tmp_path):
    run = tmp_path / "run"
    words = ["CartPole-v1", "--num-envs", "4", "--config.num-steps", "16", "--total-steps", "100000000", "--quiet"]
    words = ["train", *words, "--checkpoint-every", "640", "--run-dir", str(run)]
    with forks.started(main_without_the_right_of_root, words) as (_, wait):
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(rows(run / "metrics.jsonl")) > 3)
        folders = [run, run / "checkpoints"]
        for folder in folders:
            folder.chmod(0o500)
        ended = wait()
        for folder in folders:
            folder.chmod(0o700)
    assert ended.returncode == 2
    first, checkpoint, agent = ended.stderr.splitlines()
    assert first.startswith("algos: [Errno 13] Permission denied: ") and "checkpoints" in first
    assert "could not be written" in checkpoint and "the last good one is" in checkpoint
    assert agent.startswith(f"algos: not everything could be saved in {run}")


# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["table", "json"])
def test_a_closed_pipe_is_a_sentence_and_a_status(words, tmp_path, capsys, monkeypatch):
    ppo_sync().save(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as stop:
            main(["evaluate", str(tmp_path), "--env", "CartPole-v1", "--num-episodes", "1", *words])
    assert stop.value.code == 141
    assert "algos: the result could not be printed: [Errno 32] Broken pipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("redirection", "status"),
    [
        pytest.param("| true", 141, marks=pytest.mark.long),
        pytest.param("2>&-", 0, marks=pytest.mark.long),
        pytest.param("> /dev/full", 1, marks=pytest.mark.long),
        pytest.param("2>&1 | true", 141, marks=pytest.mark.slow),
        pytest.param("2> >(true)", 0, marks=pytest.mark.slow),
        pytest.param(">&-", 0, marks=pytest.mark.slow),
        pytest.param("<&- >&- 2>&-", 0, marks=pytest.mark.slow),
    ],
)
def test_a_training_is_complete_if_nobody_reads_it(redirection, status, tmp_path):
    """A stream that is closed cannot be handed to a process that has loaded torch; such a command starts by itself."""
    run = tmp_path / "run"
    command = f"{sys.executable} -m algos" if "&-" in redirection else f"{folder_of_commands()}/algos"
    words = "train CartPole-v1 --num-envs 4 --total-steps 2000 --num-episodes 1"
    script = f"set -o pipefail; {command} {words} --run-dir {run} {redirection}"
    assert subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True).returncode == status
    assert rows(run / "metrics.jsonl")[-1]["steps"] >= 2000 and (run / "config.json").exists()


# --- what is written once ---------------------------------------------------------------------------------------------


class Kept:
    """A logger that keeps what it is given."""

    def __init__(self):
        self.begun, self.rows = None, []

    def start(self, run_dir, config, *, step):
        self.begun = step

    def log(self, values, *, step):
        self.rows += [(step, sorted(values))]

    def close(self):
        pass


@pytest.mark.heavy
def test_a_broken_off_iteration_is_logged_once(tmp_path):
    """The samples of a rollout are written before its update, with the steps that the checkpoint has too."""
    loggers = [Kept(), Kept(), Kept()]
    options = dict(checkpoint_every=1, sample_every=1)
    ppo_normalized().learn(160, run_dir=tmp_path / "whole", loggers=loggers[:1], **options)

    def broken(agent, rollout):
        if len(rows(tmp_path / "run" / "metrics.jsonl")) == 3:
            raise RuntimeError("killed in the fourth iteration, after its rollout")
        return {}

    with pytest.raises(RuntimeError, match="killed"):
        ppo_normalized().learn(160, run_dir=tmp_path / "run", loggers=loggers[1:2], diagnose=broken, **options)
    ppo_normalized().learn(160, run_dir=tmp_path / "run", resume=tmp_path / "run", loggers=loggers[2:], **options)
    for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
        assert rows(tmp_path / "run" / name) == rows(tmp_path / "whole" / name), name
    one, first, second = loggers
    assert [row for row in first.rows if row[0] <= second.begun] + second.rows == one.rows


@pytest.mark.heavy
def test_own_tables_are_cut_off_with_their_iteration(tmp_path):
    """A table of a callback, whose rows say neither step nor iteration."""

    class Table(Callback):
        def on_rollout(self, run, rollout):
            run.log({"lengths": [{"longest": int(rollout["mask"].sum(1).max())}]})

        def on_iteration(self, run, metrics):
            if metrics["iteration"] == last:
                raise RuntimeError("killed")

    last = 9
    options = dict(checkpoint_every=1, sample_every=0, callbacks=[Table()])
    ppo_sync().learn(STEPS * 6, run_dir=tmp_path / "whole", **options)
    last = 4
    with pytest.raises(RuntimeError, match="killed"):
        ppo_sync().learn(STEPS * 6, run_dir=tmp_path / "run", **options)
    last = 9
    ppo_sync().learn(STEPS * 6, run_dir=tmp_path / "run", resume=tmp_path / "run", **options)
    found = rows(tmp_path / "run" / "samples.jsonl")
    assert found == rows(tmp_path / "whole" / "samples.jsonl")
    assert [row["iteration"] for row in found] == [1, 2, 3, 4, 5, 6]


def long_run(folder):
    ppo_normalized().learn(800, run_dir=folder, resume=folder, checkpoint_every=100, sample_every=1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_leave_every_file_as_without_them(tmp_path):
    """SIGKILL at random moments; then metrics, samples and tokens are those of a training that nobody disturbed."""
    rng = np.random.default_rng()
    run, whole = tmp_path / "run", tmp_path / "whole"
    forks.run(long_run, whole)
    path = run / "metrics.jsonl"
    for _ in range(2):
        before = len(path.read_bytes()) if path.exists() else 0
        with forks.started(long_run, run) as (process, _):
            wait_until(lambda size=before: path.exists() and path.stat().st_size != size)
            time.sleep(rng.uniform(0, 0.4))
            process.kill()
    forks.run(long_run, run)
    for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
        assert rows(run / name) == rows(whole / name), name
