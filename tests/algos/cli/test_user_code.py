"""What rewards and environments do to a command: it is contained, or said in a sentence."""

import json
import os
import shlex
import subprocess
import sys

import gymnasium
import pytest

from algos import load
from algos.cli import main
from tests.helpers.models import WORDS, make_llama, make_tokenizer
from tests.helpers.warm_start import folder_of_commands

REWARDS = """
import os, sys
calls = 0

def length(completions):
    return [float(len(text)) for text in completions]

def prints(completions):
    print("printed")
    os.write(1, b"written")
    os.system("echo by a child")
    return length(completions)

def moves(completions):
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    return length(completions)

def forks(completions):
    global calls
    calls += 1
    if calls == 2:
        os.fork()
    return length(completions)
"""
ENVIRONMENTS = """
import os, sys
import gymnasium
import numpy as np

class Hostile(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, does):
        self.does, self.count = does, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        if self.does == "prints":
            print("printed", flush=True)
        if self.does == "exits":
            sys.exit(0)
        if self.does == "raises" and self.count == 3:
            raise RuntimeError("\\x1b[2Jgone")
        if self.does == "forks" and self.count == 3:
            os.fork()
        return np.zeros(1, np.float32), 1.0, self.count % 4 == 0, False, {}

gymnasium.register("Hostile-v0", Hostile)
"""
TEXT = "train --model llama --prompts prompts.jsonl --max-prompt-tokens 4 --max-new-tokens 4 --total-steps 64"
TEXT += " --num-envs 4 --config.num-episodes 8 --config.minibatch-size 8 --num-episodes 2 --run-dir run"
CONTROL = "train hostile_envs:Hostile-v0 --total-steps 64 --num-envs 2 --config.num-steps 8 --config.minibatch-size 8"
CONTROL += " --num-episodes 2 --run-dir run"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder with the user's files, in which commands are typed."""
    make_llama().save_pretrained(tmp_path / "llama")
    make_tokenizer(WORDS).save_pretrained(tmp_path / "llama")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "hostile_envs.py").write_text(ENVIRONMENTS)
    prompts = [{"prompt": f"{a} {b}"} for a in WORDS[:4] for b in WORDS[:4]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "hostile_envs", raising=False)
    yield tmp_path
    gymnasium.registry.pop("Hostile-v0", None)


def in_process(command, folder):
    """Run a command as a user types it."""
    words = [f"{folder_of_commands()}/algos", *shlex.split(command)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


PRINTS = f'{CONTROL} --env-kwargs \'{{"does":"prints"}}\''


@pytest.mark.heavy
@pytest.mark.parametrize("command", [f"{TEXT} --reward rewards.py:prints", PRINTS, f"{PRINTS} --process-timeout 60"])
def test_json_is_all_that_is_on_stdout(here, capfd, command):
    main([*shlex.split(command), "--json"])
    out, err = capfd.readouterr()
    assert json.loads(out)["steps"] >= 32 and "printed" in err


@pytest.mark.heavy
def test_a_reward_that_changes_folder_moves_no_files(here, capfd):
    main(shlex.split(f"{TEXT} --reward rewards.py:moves --eval-every 16 --eval-num-episodes 2 --json"))
    run = here / "run"
    assert json.loads(capfd.readouterr().out)["run_dir"] == str(run)
    assert {"config.json", "policy", "checkpoints", "best", "metrics.jsonl"} <= {path.name for path in run.iterdir()}
    moved = [path for path in here.rglob("elsewhere/**/*") if path.name != "elsewhere"]
    assert moved == []
    os.chdir(here)
    words = "--reward rewards.py:moves --num-episodes 4 --transcripts out.jsonl --json"
    main(shlex.split(f"evaluate run {words}"))
    assert len((here / "out.jsonl").read_text().splitlines()) == 4
    os.chdir("/")
    assert load(run).tokenizer is not None


def test_an_environment_that_exits_is_one_error_line(here, capfd, caplog):
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(CONTROL), "--env-kwargs", '{"does": "exits"}'])
    assert ended.value.code == 1 and "ended the training by sys.exit" in caplog.text
    assert f"{here}/hostile_envs.py called sys.exit(0)\n" in capfd.readouterr().err


@pytest.mark.parametrize("process", ["", pytest.param("--process-timeout 60", marks=pytest.mark.long)])
def test_an_error_text_cannot_control_the_terminal(here, capfd, process):
    command = CONTROL
    if process:
        command = f"{CONTROL} {process}".replace("--num-envs 2", "--num-envs 1")  # each is started 11 times
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(command), "--env-kwargs", '{"does": "raises"}'])
    err = capfd.readouterr().err
    assert ended.value.code == 1 and r"\x1b[2Jgone" in err and "\x1b" not in err
    if process:
        last = [line for line in err.splitlines() if line.startswith("algos:")]
        assert last[0].startswith("algos: environment 0 failed 11 times, max_restarts is 10")


@pytest.mark.parametrize(
    "name", [pytest.param("reward", marks=pytest.mark.long), pytest.param("environment", marks=pytest.mark.slow)]
)
def test_a_process_that_is_forked_does_not_train_too(here, name):
    command = f"{TEXT} --reward rewards.py:forks --json"
    if name == "environment":
        command = f'{CONTROL} --env-kwargs \'{{"does":"forks"}}\' --json'
    done = in_process(command, here)
    assert len(done.stdout.splitlines()) == 1 and json.loads(done.stdout)
    assert "called os.fork and returned in the new process too, which was ended" in done.stderr
    steps = [json.loads(line)["steps"] for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted({*steps})


@pytest.mark.heavy
def test_a_running_thread_does_not_keep_the_program():
    program = "import threading, time; from algos.cli.user_code import end_in_spite_of_threads\n"
    program += "threading.Thread(target=time.sleep, args=(1000,), name='endless').start()\n"
    program += "print('result', flush=True); end_in_spite_of_threads(3, seconds=0.2)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "result\n") and "algos: endless still ran 0.2 s" in done.stderr
