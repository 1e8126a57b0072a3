"""Places where newcomers stopped in their first hour, with an environment, a reward or a comparison of their own."""

import json
import logging
import signal
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from algos import PPO, compare, evaluate
from algos.cli import main
from algos.storage.run_folder import holds_run
from tests.helpers.errors import refused
from textenv import HumanReward, check_reward

OWN = """
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeAwareObservation

class Line(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action), False, False, {}

class FourValues(Line):
    def step(self, action):
        return super().step(action)[:4]

for name, limit in ("Line", 8), ("Endless", None):
    gymnasium.register(f"{name}-v0", entry_point="own_line:Line", max_episode_steps=limit)

def timed(env):
    return TimeAwareObservation(env)
"""
SHORT = ("--total-steps", "32", "--num-envs", "2", "--num-episodes", "2", "--config.num-steps", "8", "--json")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with environments of one's own, from which commands are typed."""
    (tmp_path / "own_line.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_line", None)
    for name in ("Line-v0", "Endless-v0"):
        gymnasium.registry.pop(name, None)


@pytest.mark.heavy
def test_a_local_environment_runs_in_processes(here, capsys):
    """And under the name of its file."""
    for env, more in (("own_line:Line-v0", ("--process-timeout", "60")), ("own_line.py:Line-v0", ())):
        main(["train", env, *SHORT, *more])
        assert json.loads(capsys.readouterr().out)["episodes"] == 2


@pytest.mark.heavy
def test_a_comparison_sees_a_wrappers_environments(here):
    found = compare(["Line-v0"], wrappers=["own_line.py:timed"], seeds=1, total_steps=64, run_dir="runs", quiet=True)
    assert "Line-v0:ppo" in found


@pytest.mark.heavy
def test_another_case_joins_a_comparison(here):
    options = dict(seeds=1, total_steps=64, run_dir="runs", processes=0, quiet=True)
    compare(["CartPole-v1:ppo"], **options)
    found = compare(["CartPole-v1:a2c"], **options)
    assert {"CartPole-v1:ppo", "CartPole-v1:a2c"} <= found.keys()
    assert "CartPole-v1:ppo" in (here / "runs" / "report.html").read_text()
    with refused(FileExistsError, "holds a run already, with other settings .total_steps: 64, not 32"):
        compare(["CartPole-v1:a2c"], **options | {"total_steps": 32})
    again = compare(["CartPole-v1:a2c"], overwrite=True, **options)
    assert again.keys() == found.keys()


@pytest.mark.heavy
def test_an_environment_without_an_end_is_said(here, caplog, monkeypatch):
    """An evaluation waits for an end; the environment here gets one after the warning, so that the test has one too."""
    from algos.envs.gymnasium_results import STEPS_WITHOUT_AN_END

    monkeypatch.syspath_prepend(here)
    make = lambda: gymnasium.make("own_line:Line-v0", max_episode_steps=STEPS_WITHOUT_AN_END + 10)  # noqa: E731
    env = gymnasium.vector.SyncVectorEnv([make])
    with caplog.at_level(logging.WARNING):
        evaluate(env, PPO(env, seed=1).policy, num_episodes=1)
    assert "no episode has ended in 10000 steps" in caplog.text and "max_episode_steps" in caplog.text


def test_a_failed_environment_leaves_its_folder_free(here, monkeypatch):
    """The error has advice; the run can be started again in the same folder."""
    monkeypatch.syspath_prepend(here)
    from own_line import FourValues, Line

    with pytest.raises(ValueError, match="expected 5, got 4") as error:
        PPO(gymnasium.vector.SyncVectorEnv([FourValues] * 2), seed=1).learn(64, run_dir="runs/one")
    assert "check_env" in "".join(error.value.__notes__) and not holds_run("runs/one")
    env = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.wrappers.TimeLimit(Line(), 8)] * 2)
    PPO(env, seed=1, num_steps=8, minibatch_size=16).learn(32, run_dir="runs/one")
    assert holds_run("runs/one")


@pytest.mark.heavy
def test_prompts_need_no_token_limit(here, capsys, caplog):
    """The embedded model has 128 positions, fewer than the usual limit of an answer and a prompt together."""
    (here / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"the film {i}"}) + "\n" for i in range(12)))
    (here / "rewards.py").write_text("def short(completions):\n    return [-len(x) for x in completions]\n")
    words = ["train", "--prompts", "prompts.jsonl", "--reward", "rewards.py:short", "--total-steps", "64"]
    small = ["--num-envs", "4", "--config.num-episodes", "4", "--config.minibatch-size", "4", "--num-episodes", "2"]
    with caplog.at_level(logging.WARNING):
        main([*words, *small, "--json"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 2
    assert "of 12 prompts are held out" in caplog.text


def test_a_reward_check_names_the_line_of_an_error(tmp_path):
    """It says what to read next and asks no person."""
    said = " ".join(str(check_reward(lambda completions: [float(len(text)) for text in completions])).split())
    assert "Read these, for a policy will find them: one token repeated, the longest allowed, very long." in said
    with refused(TypeError, "asks people"):
        check_reward(HumanReward(tmp_path / "thumbs.jsonl"))

    def fails(completions):
        raise KeyError("too long for me")

    with refused(ValueError, "raised KeyError on ordinary completions, in line", "test_first_hours.py"):
        check_reward(fails)
    with refused(ValueError, "did you mean 'topic'?"):
        check_reward(lambda completions, topics: [1.0], columns={"topic": ["a"] * 8})


def test_a_run_of_control_leaves_no_files_of_texts(here):
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    PPO(env, seed=1, num_steps=8, minibatch_size=16).learn(32, run_dir="runs/one")
    assert {path.name for path in (here / "runs/one").glob("*.jsonl")} == {"metrics.jsonl"}
    played = evaluate("CartPole-v1", PPO(env, seed=1).policy, num_episodes=2)
    assert (
        repr(played)
        == f"EvaluationResult(mean_return={played.mean_return:.4g}, std_return={played.std_return:.4g}, n=2)"
    )
    assert np.isfinite(played.mean_return)


def test_a_first_signal_says_when_it_will_be_heard():
    program = """
import time
from algos.training.signals import deferred_signals
with deferred_signals():
    print("ready", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) as waiting:
        assert waiting.stdout.readline() == "ready\n"
        waiting.send_signal(signal.SIGTERM)
        assert "ends after this iteration" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(timeout=30) == -signal.SIGTERM
