"""What was run: the record in config.json, the list of runs, one run shown; no name is cut."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import torch

import algos
from algos.cli import main
from algos.config import PPOConfig
from algos.lab.comparison.report import summaries_table
from algos.lab.comparison.summary import summary
from algos.lab.run_summary import read_run
from algos.storage.provenance import commit, provenance
from algos.storage.run_folder import lock_run_folder
from tests.helpers.finished_runs import run_of
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from textenv import TextVectorEnv
from textenv.envs.task import FunctionTask
from textenv.registration import NAMES

SMALL = ["--total-steps", "64", "--num-envs", "2", "--config.num-steps", "32", "--num-episodes", "1", "--json"]


def agent():
    return algos.PPO(gymnasium.make_vec("CartPole-v1", num_envs=2), num_steps=32)


def printed(capsys, *words):
    capsys.readouterr()
    main([str(word) for word in words])
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run, one that failed, and an empty folder, at two depths."""
    folder = tmp_path_factory.mktemp("runs")
    main(["train", "CartPole-v1", "--run-dir", str(folder / "first"), "--config.gamma", "0.5", *SMALL])

    def broken(metrics):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        agent().learn(512, run_dir=folder / "deep" / "second", on_iteration=broken)
    (folder / "empty").mkdir()
    return folder


def test_an_evaluation_without_a_score_is_not_the_best(runs, tmp_path):
    """Of NaN, Python's max depends on the order."""
    for scores in ([float("nan"), 10.0, 40.0, 20.0], [10.0, float("nan"), 40.0, 20.0], [float("nan")] * 4):
        folder = shutil.copytree(runs / "first", tmp_path / str(scores))
        rows = [json.dumps({"steps": i, "iteration": i, "eval/mean_return": x}) for i, x in enumerate(scores)]
        (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        assert read_run(folder)["best_score"] == max((x for x in scores if x == x), default=None)


def test_a_table_that_nobody_reads_to_its_end_is_no_wrong_input(runs, capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as stop:
            main(["show", str(runs / "first")])
    assert stop.value.code == 141 and not capsys.readouterr().err


def test_a_run_records_what_made_it(runs):
    found = json.loads((runs / "first" / "config.json").read_text())["made_by"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["python"] == sys.version.split()[0] and found["folder"] == os.getcwd()
    assert sys.orig_argv[0] in found["command"] and found["machine"]["threads"] >= 1
    assert algos.load(runs / "first"), "an agent with the record is still read"


def test_the_commit_is_that_of_the_working_directory(tmp_path, monkeypatch):
    def current():
        commit.cache_clear()
        return commit()

    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *words], check=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert current() is None
    Path("code.py").write_text("x = 1\n")
    git("init", "-q"), git("add", "."), git("commit", "-qm", "first"), git("tag", "v1")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    Path("runs.txt").touch()  # what a run writes is not a change of the code
    assert current() == {"commit": head, "dirty": False}
    Path("code.py").write_text("x = 2\n")
    assert current() == {"commit": head, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert current() is None, "no git"
    commit.cache_clear()


def test_runs_at_every_depth_are_listed_by_status(runs, capsys):
    found = {Path(run["run"]).name: run for run in json.loads(printed(capsys, "runs", runs, "--json"))}
    assert sorted(found) == ["first", "second"]
    first, second = found["first"], found["second"]
    assert (first["status"], first["environment"], first["algorithm"]) == ("finished", "CartPole-v1", "PPO")
    lines = [json.loads(line) for line in (runs / "first" / "metrics.jsonl").read_text().splitlines()]
    returns = [line["episode/return"] for line in lines if "episode/return" in line]
    assert (first["steps"], first["last_score"], first["best_score"]) == (lines[-1]["steps"], returns[-1], max(returns))
    assert second["status"] == "failed" and second["steps"] > 0


def test_a_run_is_running_while_its_folder_is_locked(tmp_path, capsys):
    """And stopped once its process was killed."""
    (tmp_path / "metrics.jsonl").touch()

    def status():
        return json.loads(printed(capsys, "runs", tmp_path, "--json"))[0]["status"]

    with lock_run_folder(tmp_path, resumed=True):
        assert status() == "running"
        left = (tmp_path / ".holder.json").read_text()
    (tmp_path / ".holder.json").write_text(left)  # as a killed process leaves it
    assert status() == "stopped"
    assert json.loads(printed(capsys, "show", tmp_path, "--json"))["best_score"] is None


def test_a_run_without_agent_is_shown_by_its_options(runs, tmp_path, capsys):
    run = Path(shutil.copytree(runs / "first", tmp_path / "run"))
    expected = json.loads(printed(capsys, "show", run, "--json"))
    (run / "config.json").unlink()
    with lock_run_folder(run, resumed=True):
        (listed,) = json.loads(printed(capsys, "runs", tmp_path, "--json"))
        found = json.loads(printed(capsys, "show", run, "--json"))
    assert (listed["environment"], listed["algorithm"], listed["status"]) == ("CartPole-v1", "PPO", "running")
    assert found["config"] == expected["config"] and "continue" not in found
    (run / ".failed").write_text("stopped")
    assert json.loads(printed(capsys, "show", run, "--json"))["continue"] == f"algos train --resume {run}"
    (run / "run.yaml").write_text("[")
    assert json.loads(printed(capsys, "runs", tmp_path, "--json"))[0]["status"] == "damaged"
    with pytest.raises(SystemExit):
        main(["show", str(run)])
    assert "run.yaml cannot be read as yaml" in capsys.readouterr().err


def test_a_stopped_run_says_so_until_it_is_resumed(tmp_path, capsys):
    def stop(metrics):
        os.kill(os.getpid(), signal.SIGINT)

    def train(**options):
        return agent().learn(256, run_dir=tmp_path, checkpoint_every=10_000, **options)

    with pytest.raises(KeyboardInterrupt):
        train(on_iteration=stop)
    assert json.loads(printed(capsys, "runs", tmp_path, "--json"))[0]["status"] == "stopped"
    train(resume=tmp_path)
    assert json.loads(printed(capsys, "runs", tmp_path, "--json"))[0]["status"] == "finished"


def test_show_has_changed_fields_and_curves(runs, capsys):
    found = json.loads(printed(capsys, "show", runs / "first", "--json"))
    assert found["config"]["gamma"] == 0.5 and "clip_range" not in found["config"], PPOConfig().clip_range
    lines = [json.loads(line) for line in (runs / "first" / "metrics.jsonl").read_text().splitlines()]
    assert found["curves"]["policy/entropy"] == [line["policy/entropy"] for line in lines]
    text = printed(capsys, "show", runs / "first")
    assert "gamma" in text and "█" in text and provenance()["machine"]["host"] in text


class Own(algos.PPO):
    """An algorithm of the user's, with PPO's config."""


def test_an_own_algorithm_shows_only_what_was_changed(tmp_path, capsys):
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    Own(env, num_steps=32, vf_coef=0.7).learn(64, run_dir=tmp_path)
    config = json.loads(printed(capsys, "show", tmp_path, "--json"))["config"]
    assert config["vf_coef"] == 0.7 and config["num_steps"] == 32
    assert not {"skip_nonfinite", "num_epochs", "clip_range", "policy_loss"} & config.keys()


def test_show_escapes_control_characters_of_samples(runs, capsys):
    entries = [{"prompt": f"p{i}", "completion": "done\x1b[2J", "score": i} for i in range(9)]
    path = runs / "first" / "samples.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"prompt": "cut o')
    text = printed(capsys, "show", runs / "first")
    assert "p8" in text and "p5" not in text and "\x1b[2J" not in text and "cut o" not in text


@pytest.mark.parametrize("width", [40, 80])
def test_no_table_cuts_a_name(width, runs, capsys, monkeypatch):
    """In narrow terminals, names are folded: the lines of a cell have all their characters."""
    monkeypatch.setenv("COLUMNS", str(width))

    for words in (["runs", runs], ["envs"], ["show", runs / "first"]):
        assert "…" not in printed(capsys, *words), words
    rows = [line.split("│") for line in printed(capsys, "envs").splitlines() if line.startswith("│")]
    assert "".join(row[1].strip() for row in rows) == "".join(f"textenv/{name}-v0" for name in NAMES)
    case = [run_of(seed, returns=[1, 2], after=2.0) for seed in (1, 2)]
    assert "…" not in summaries_table({"textenv/TwentyQuestions-v0 reinforce": summary(case, study=case)})


def test_every_text_environment_is_listed_with_a_line(capsys):
    found = json.loads(printed(capsys, "envs", "--json"))
    assert [entry["environment"] for entry in found] == [f"textenv/{name}-v0" for name in NAMES]
    assert all(entry["task"].endswith(".") for entry in found)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_completion_script_names_every_command(shell, tmp_path):
    path = tmp_path / "script"
    with pytest.raises(SystemExit) as stop:
        main(["--tyro-write-completion", shell, str(path)])
    assert not stop.value.code
    assert all(f"'{name}'" in path.read_text() for name in ("train", "evaluate", "runs", "show", "envs"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["runs", "nowhere"], "there is no folder nowhere"), (["show", "nowhere"], "nowhere holds no run")],
)
def test_a_wrong_folder_is_one_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in said and said.count("\n") == 1


@pytest.mark.heavy
def test_samples_are_shown_with_step_and_speaker(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    tokenizer = make_tokenizer(WORDS)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    chat = [{"role": "system", "content": "b b"}, {"role": "user", "content": "a b c"}]
    policy = algos.LMPolicy(make_gpt2(), tokenizer, seed=1)

    def trained(folder, task, **options):
        env = TextVectorEnv(task, tokenizer=tokenizer, num_envs=2, max_new_tokens=3, **options)
        algos.PPO(env, policy, num_steps=None, num_episodes=2, minibatch_size=2).learn(4, run_dir=folder)
        return json.loads((folder / "samples.jsonl").read_text().splitlines()[-1])

    reward = lambda completions: [float(len(x)) for x in completions]  # noqa: E731
    row = trained(tmp_path / "chat", FunctionTask([chat], reward))
    assert row["chat"] == chat and row["steps"] == 0
    shown = printed(capsys, "show", tmp_path / "chat")
    assert "steps" in shown and all(f"{message['role']}: {message['content']}" in shown for message in chat)
    assert "assistant: " in shown
    trained(tmp_path / "text", FunctionTask(["a b"], reward))
    assert "assistant: " not in printed(capsys, "show", tmp_path / "text")
    line = {"steps": 7, "prompt": "hi", "completion": "x", "score": 1.0, "chat": chat}
    turns = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "two"}]
    (tmp_path / "text" / "samples.jsonl").write_text(json.dumps(line | {"turns": turns}) + "\n")
    shown = printed(capsys, "show", tmp_path / "text")
    assert "assistant: one" in shown and "user: two" in shown and "system: b b" in shown
    (tmp_path / "text" / "samples.jsonl").write_text(json.dumps(line | {"turns": ["odd", 3], "chat": 5}) + "\n")
    assert "odd" in printed(capsys, "show", tmp_path / "text")
