"""``algos doctor``, and the line with which a training ends whose run has something wrong."""

import json
import signal

import pytest

from algos.cli import main
from tests.helpers.planted_runs import train_control

STILL = ["--config.learning-rate", "1e-12", "--config.final-learning-rate", "1e-12"]
SHORT = ["CartPole-v1", "--total-steps", "1600", "--num-envs", "2", "--config.num-steps", "64", "--num-episodes", "1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, of which the first has a learning rate that is too small."""
    folder = tmp_path_factory.mktemp("runs")
    train_control(folder / "still", learning_rate=1e-12, iterations=12)
    train_control(folder / "short", iterations=2)
    return folder


def status_of(*words):
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return end.value.code


@pytest.mark.heavy
def test_a_finding_is_told_and_the_status_is_1(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert status_of("doctor", runs / "still") == 1
    output = capsys.readouterr().out
    assert "PPO on an environment without an id, finished" in output and "  policy_stands_still\n" in output
    assert "What to do: Raise the learning rate" in output
    folder_line, *other_lines = output.splitlines()
    assert str(runs / "still") in folder_line and max(map(len, other_lines)) <= 80


def test_a_run_without_a_finding_has_status_0(runs, capsys):
    main(["doctor", str(runs / "short")])
    output = capsys.readouterr().out
    assert "Nothing wrong was found" in output and "only 3 iterations" in output.replace("\n    ", " ")


def test_of_several_runs_their_number_is_told(runs, capsys):
    assert status_of("doctor", runs) == 1
    assert "Something is wrong with 1 of 2 runs." in capsys.readouterr().out


def test_json_has_the_findings_alone(runs, capsys):
    assert status_of("doctor", runs, "--json") == 1
    result = json.loads(capsys.readouterr().out)
    by_name = {run["run"].rpartition("/")[2]: run for run in result["runs"]}
    assert (result["sound"], by_name["short"]["sound"], by_name["still"]["sound"]) == (False, True, False)
    (finding,) = by_name["still"]["findings"]
    assert finding["rule"] == "policy_stands_still" and finding["figures"]["learning_rate"] == 1e-12


@pytest.mark.parametrize(
    "words, message", [([], "there is no folder runs"), (["."], "holds no run"), (["/missing"], "there is no folder")]
)
def test_wrong_input_has_status_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert status_of("doctor", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.heavy
def test_a_training_ends_with_a_line_that_names_the_command(tmp_path, capsys):
    main(["train", *SHORT, *STILL, "--run-dir", str(tmp_path / "run"), "--json"])
    output = capsys.readouterr()
    assert json.loads(output.out)["steps"] >= 1600
    assert output.err.splitlines()[-1].startswith("algos: something may be wrong with this run (policy_stands_still")
    assert f"algos doctor {tmp_path / 'run'}" in output.err.splitlines()[-1]


STOPPING = """
import os, signal
import gymnasium

class Stopping(gymnasium.Wrapper):
    steps = 0  # of all environments

    def step(self, action):
        Stopping.steps += 1
        if Stopping.steps == 1500:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(action)
"""


@pytest.mark.heavy
def test_an_interrupted_training_has_the_line_too(tmp_path, capsys):
    wrapper = tmp_path / "stopping.py"
    wrapper.write_text(STOPPING)
    options = ["--wrapper", f"{wrapper}:Stopping", "--run-dir", tmp_path / "run", "--json"]
    assert status_of("train", *SHORT, *STILL, *options) == 128 + signal.SIGTERM
    *_, first, second = capsys.readouterr().err.splitlines()
    assert "to continue: algos train --resume" in first and "algos doctor" in second
