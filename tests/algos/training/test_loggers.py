"""What loggers receive, read back by the packages themselves, offline; and that none of them can end a run."""

import json
import os
import sys

import numpy as np
import pytest

from algos import Callback
from algos.training.loggers import Logs, make_loggers
from tests.helpers.resumable_agents import ppo_cartpole, ppo_text
from tests.helpers.warm_start import run_program

TRAIN = """
import sys
from algos import Callback
from tests.helpers.resumable_agents import ppo_text

class Broken:
    def start(self, run_dir, config, *, step): pass
    def log(self, values, *, step): raise RuntimeError("no network")
    def close(self): raise OSError("nobody listens")

loggers = ["tensorboard", "wandb", Broken(), "trackio"]
ppo_text().learn(100, run_dir=sys.argv[1], loggers=loggers, sample_every=2)

import json, trackio
(run,) = trackio.Api().runs("textenv")
rows = trackio.SQLiteStorage.get_logs("textenv", run.name)
print(json.dumps([row for row in rows], default=str))
"""
"""Trains, and prints what trackio has stored of it."""


class Kept:
    """A logger that keeps what it is given."""

    def __init__(self):
        self.started, self.rows, self.closed = None, [], False

    def start(self, run_dir, config, *, step):
        self.started = (run_dir, config, step)

    def log(self, values, *, step):
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed = True


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run that is logged everywhere at once, in a process of its own: W&B and trackio start threads."""
    home = tmp_path_factory.mktemp("home")
    env = os.environ | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(home / "trackio"), "WANDB_SILENT": "true"}
    ended = run_program(TRAIN, str(home / "run"), env=env)
    assert ended.returncode == 0, ended.stderr
    return home, ended


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def wandb_records(data):
    """Records of W&B's file: a header of 7 bytes, then LevelDB's log format, in blocks of 32 KiB."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield parts
            parts = b""


@pytest.mark.long
def test_tensorboard_has_curves_histograms_and_samples(logged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(logged[0] / "run" / "tensorboard"), {"histograms": 0, "scalars": 0, "tensors": 0})
    found.Reload()
    rows = rows_of(logged[0] / "run" / "metrics.jsonl")
    returns = [(event.step, event.value) for event in found.Scalars("episode/return")]
    assert returns == [(row["steps"], pytest.approx(row["episode/return"])) for row in rows]
    assert len(found.Histograms("rollout/advantage")) == -(-len(rows) // 2)
    text = found.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    first = rows_of(logged[0] / "run" / "samples.jsonl")[0]
    assert first["completion"] in text and "prompt" in text


@pytest.mark.long
def test_wandb_has_curves_histograms_and_samples(logged):
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (logged[0] / "run").glob("wandb/offline-run-*/*.wandb")
    history = []
    for data in wandb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        history += [items] if items else []
    returns = [row["episode/return"] for row in history if "episode/return" in row]
    assert returns == [row["episode/return"] for row in rows_of(logged[0] / "run" / "metrics.jsonl")]
    assert any(row.get("rollout/kl/_type") == "histogram" for row in history)
    (table, *_) = sorted(path.parent.glob("files/media/table/*.json"))
    stored = json.loads(table.read_text())
    assert stored["columns"][2:4] == ["prompt", "completion"] and len(stored["data"]) == 8


@pytest.mark.long
def test_trackio_has_curves_and_samples(logged):
    rows = json.loads(logged[1].stdout.splitlines()[-1])
    returns = [row["episode/return"] for row in rows if "episode/return" in row]
    assert returns == [row["episode/return"] for row in rows_of(logged[0] / "run" / "metrics.jsonl")]
    first = rows_of(logged[0] / "run" / "samples.jsonl")[0]
    assert any(first["completion"] in json.dumps(row.get("samples")) for row in rows)


@pytest.mark.long
def test_a_broken_logger_is_named_and_the_run_goes_on(logged):
    rows = rows_of(logged[0] / "run" / "metrics.jsonl")
    assert rows[-1]["steps"] >= 100 and rows[-1]["log/failures"] >= len(rows) - 1
    assert logged[1].stderr.count("the logger Broken failed, the run continues: RuntimeError('no network')") == 1


@pytest.mark.heavy
def test_an_own_logger_gets_numbers_histograms_tables(tmp_path):
    kept = Kept()
    history = ppo_text().learn(60, run_dir=tmp_path, loggers=[kept], sample_every=2)
    run_dir, config, step = kept.started
    assert (run_dir, step, config["algorithm"], config["learning_rate"]) == (tmp_path, 0, "PPO", 5e-4)
    assert kept.closed and [row for _, row in kept.rows if "steps" in row] == history
    (table, *_), (arrays, *_) = ([row for _, row in kept.rows if name in row] for name in ("samples", "rollout/reward"))
    assert {row["steps"] for row in table["samples"]} == {0}, "the first samples are from before any update"
    assert kept.rows[0] == (history[0]["steps"], table), "and they belong to the first iteration"
    assert all(isinstance(array, np.ndarray) for array in arrays.values())


@pytest.mark.parametrize("make", [pytest.param(ppo_cartpole, marks=pytest.mark.long), ppo_text])
def test_a_resume_logs_each_iteration_once(make, tmp_path):
    total = 1024 if make is ppo_cartpole else 100
    whole = make().learn(total, run_dir=tmp_path / "whole", checkpoint_every=1, sample_every=1)
    kept = Kept()
    middle = whole[len(whole) // 2]["iteration"]
    options = dict(run_dir=tmp_path / "run", checkpoint_every=1, sample_every=1)
    make().learn(total, on_iteration=lambda metrics: metrics["iteration"] == middle, **options)
    with (tmp_path / "run" / "samples.jsonl").open("a") as file:  # from after the checkpoint, and one cut off
        file.write('{"steps": 1000000, "prompt": "late"}\n{"steps": 1')
    make().learn(total, resume=tmp_path / "run", loggers=[kept], **options)
    assert kept.started[2] == whole[middle - 1]["steps"]
    assert (tmp_path / "run" / "samples.jsonl").exists() == (make is ppo_text)
    for name in ("metrics.jsonl", "samples.jsonl")[: 2 if make is ppo_text else 1]:
        a, b = (
            [{key: x for key, x in row.items() if "time/" not in key} for row in rows_of(tmp_path / home / name)]
            for home in ("whole", "run")
        )
        assert a == b, name


def test_a_file_closed_by_other_code_is_named(tmp_path):
    """And no other file is written."""

    def descriptor():
        links = {int(name): os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
        return next(number for number, path in links.items() if path == str(tmp_path / "metrics.jsonl"))

    logs = Logs(tmp_path, config={})
    logs.write({"loss": 1.0}, step=1, iteration=1)
    closed = descriptor()
    os.close(closed)
    descriptor_again = os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY)
    assert descriptor_again == closed
    with pytest.raises(OSError, match="metrics.jsonl was closed by other code in this process"), logs:
        logs.write({"loss": 2.0}, step=2, iteration=2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"loss": 1.0}\n' and (tmp_path / "other").read_text() == ""


def test_an_unknown_or_missing_logger_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="'tensorbord', expected one of tensorboard, wandb, trackio"):
        ppo_cartpole().learn(64, run_dir=tmp_path / "run", loggers=["tensorbord"])
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ImportError, match=r"pip install 'trackio>="):
        ppo_cartpole().learn(64, run_dir=tmp_path / "run", loggers=["trackio"])
    for wrong in (print, Kept, 3):
        with pytest.raises(TypeError, match="expected a name or an object with start, log and close"):
            make_loggers([wrong])
    assert not (tmp_path / "run").exists()


def test_an_iteration_is_logged_if_a_callback_fails(tmp_path):
    class Fails(Callback):
        def on_iteration(self, run, metrics):
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        ppo_cartpole().learn(4096, run_dir=tmp_path, callbacks=[Fails()])
    (row,) = rows_of(tmp_path / "metrics.jsonl")
    assert row["iteration"] == 1


@pytest.mark.heavy
def test_trainings_without_a_folder_have_curves_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        ppo_cartpole().learn(64, loggers=["tensorboard"])
    folders = [*tmp_path.glob("tensorboard/*")]
    assert len(folders) == 2 and all(len([*folder.glob("events*")]) == 1 for folder in folders)
