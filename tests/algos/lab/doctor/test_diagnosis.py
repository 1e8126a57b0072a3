"""Runs in any state: finished, failed, interrupted, damaged, under way, empty, or none at all."""

import logging
import os

import pytest

import algos
from algos import PPO
from algos.lab.doctor.diagnosis import apply_rules, examine, examine_all, findings_in_a_line
from algos.lab.doctor.evidence import Evidence
from algos.lab.doctor.rules import RULES, Rule
from algos.storage.run_folder import lock_run_folder
from algos.training.signals import Interrupted
from tests.helpers.errors import refused
from tests.helpers.planted_runs import bandit, train_control


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """A run whose learning rate is too small."""
    folder = tmp_path_factory.mktemp("runs") / "still"
    train_control(folder, learning_rate=1e-12, iterations=12)
    return folder


@pytest.mark.heavy
def test_a_finding_has_the_figure_and_what_to_do(still):
    diagnosis = examine(still)
    (finding,) = diagnosis.findings
    assert (finding.rule, diagnosis.state, diagnosis.sound) == ("policy_stands_still", "finished", False)
    assert "The learning rate is 1e-12" in finding.message and "learning rate" in finding.advice
    assert (diagnosis.algorithm, diagnosis.iterations) == ("PPO", 13)


def test_a_checkpoint_stands_for_its_run(still):
    (*_, checkpoint) = sorted((still / "checkpoints").iterdir())
    assert examine(checkpoint).findings == examine(still).findings


def test_a_folder_of_runs_is_searched_and_no_run_told_twice(still):
    assert [diagnosis.run for diagnosis in examine_all([still.parent, still])] == [str(still)]


@pytest.mark.long
def test_the_runs_of_a_comparison_are_examined(tmp_path):
    algos.compare("CartPole-v1:ppo", seeds=2, total_steps=1000, run_dir=tmp_path, processes=0, quiet=True)
    diagnoses = examine_all([tmp_path])
    assert len(diagnoses) == 2 and all("There are only" in diagnosis.notes[0] for diagnosis in diagnoses)
    assert {diagnosis.algorithm for diagnosis in diagnoses} == {"PPO"}


def test_a_failed_run_says_why(tmp_path):
    env = bandit(observe=lambda steps: float("nan") if steps > 40 else 0.0)
    with pytest.raises(algos.InvariantError):
        train_control(tmp_path, env)
    diagnosis = examine(tmp_path)
    assert diagnosis.state == "failed" and diagnosis.findings[0].rule == "training_failed"
    assert "observation" in diagnosis.findings[0].message and "violation.safetensors" in diagnosis.findings[0].advice


def test_a_run_that_failed_at_once_has_no_iteration(tmp_path):
    env = bandit(observe=lambda steps: float("nan"))
    with pytest.raises(algos.InvariantError):
        train_control(tmp_path, env)
    diagnosis = examine(tmp_path)
    assert (diagnosis.iterations, diagnosis.findings[0].rule) == (0, "training_failed")
    assert "No iteration has ended" in diagnosis.notes[0]


def test_an_interrupted_run_can_go_on_and_is_no_fault(tmp_path):
    def interrupt(metrics):
        os.kill(os.getpid(), 15)

    agent = PPO(bandit(), num_steps=32, minibatch_size=32)
    with pytest.raises(Interrupted):
        agent.learn(10_000, run_dir=tmp_path, on_iteration=interrupt)
    diagnosis = examine(tmp_path)
    assert (diagnosis.state, diagnosis.sound) == ("stopped", True)
    assert f"algos train --resume {tmp_path}" in diagnosis.notes[0]


def test_a_run_under_way_says_so(still):
    with lock_run_folder(still, resumed=True):
        diagnosis = examine(still)
    assert diagnosis.state == "running" and "still trains" in diagnosis.notes[0]


def test_a_damaged_file_is_named(tmp_path):
    train_control(tmp_path, iterations=1)
    (tmp_path / "config.json").write_text("{")
    (finding,) = examine(tmp_path).findings
    assert finding.rule == "damaged_files" and "config.json" in finding.message


def test_what_is_no_run_is_refused(tmp_path):
    with refused(FileNotFoundError, "holds no run"):
        examine_all([tmp_path])
    with refused(FileNotFoundError, "there is no folder"):
        examine_all([tmp_path / "missing"])


def test_a_log_of_anything_is_read(tmp_path):
    """Texts, lists and truth values are no numbers; lines that are cut off are skipped."""
    (tmp_path / "metrics.jsonl").write_text('{"steps": "many", "episode/return": [1], "value/mean": true}\n{"steps": 1')
    diagnosis = examine(tmp_path)
    assert (diagnosis.iterations, diagnosis.steps, diagnosis.findings) == (1, 0, [])


def test_a_rule_with_a_bug_is_logged_and_the_others_go_on(caplog):
    def buggy(evidence, threshold):
        raise ZeroDivisionError("a bug")

    rule = Rule("buggy", (), 0, "", "", "", buggy)
    evidence = Evidence([{"log/failures": 3.0}])
    with caplog.at_level(logging.WARNING):
        findings = apply_rules(evidence, (rule, *RULES))
    assert [finding.rule for finding in findings] == ["logger_fails"]
    assert "the rule buggy of the run doctor failed" in caplog.text


def test_the_line_at_the_end_of_a_training_never_raises(still, tmp_path, caplog):
    line = findings_in_a_line(still)
    assert "policy_stands_still" in line and f"algos doctor {still}" in line
    with caplog.at_level(logging.WARNING):
        assert findings_in_a_line(tmp_path / "before_the_first_iteration") is None
        assert not caplog.text
        assert findings_in_a_line(None) is None
    assert "could not examine" in caplog.text
