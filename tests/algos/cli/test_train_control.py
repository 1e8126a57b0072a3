"""``algos train`` for control: environments by name, the policy, what is refused."""

import json
import logging

import numpy as np
import pytest
import yaml

import algos
from algos import LSTMPolicy, MLPPolicy
from algos.cli import main

PENDULUM = {"log_std_init": -1.0, "sde_sample_freq": 4}
"""Arguments of the policy in the preset of Pendulum-v1."""


@pytest.mark.heavy
@pytest.mark.parametrize(
    "env_id",
    ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1", "MountainCarContinuous-v0", "LunarLander-v3",
     "FrozenLake-v1", "Taxi-v4"],
)  # fmt: skip
def test_control_and_its_saved_agent_run_by_name(env_id, tmp_path, capsys):
    if env_id.startswith("LunarLander"):
        pytest.importorskip("Box2D")
    main(["train", env_id, "--total-steps", "1024", "--run-dir", str(tmp_path), "--num-episodes", "2", "--json",
          "--num-envs", "8", "--config.num-steps", "128", "--config.num-epochs", "2"])  # fmt: skip
    trained = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert trained["steps"] >= 1024 and np.isfinite(trained["mean_return"])
    main(["evaluate", str(tmp_path), "--num-episodes", "3", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 3


@pytest.mark.parametrize("steps", ["128", "1.28e2", "128.0"])
def test_steps_may_be_written_as_in_python(steps, tmp_path):
    short = ["--num-envs", "2", "--config.num-steps", "64", "--num-episodes", "1", "--json"]
    main(["train", "CartPole-v1", "--total-steps", steps, "--run-dir", str(tmp_path), *short])
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["total_steps"] == 128


@pytest.mark.parametrize("steps", ["1.5", "many"])
def test_steps_that_are_no_whole_number_are_refused(steps, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["train", "CartPole-v1", "--total-steps", steps, "--run-dir", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert "--total-steps" in said and steps in said


@pytest.mark.parametrize(("words", "sentence"), [
    (["trian", "CartPole-v1"], "there is no command trian: did you mean train?"),
    (["train", "CartPole-v1", "--policy", "lstmm"], "policy is 'lstmm', expected one of auto, mlp"),
    (["train", "CartPole-v1", "--config.learning-rate", "abc"], "Annotated[float, a number above 0]"),
])  # fmt: skip
def test_a_misspelt_word_gets_a_sentence_and_no_more(words, sentence, capsys, recwarn):
    with pytest.raises(SystemExit):
        main(words)
    said = capsys.readouterr().err
    assert sentence in said and "0x" not in said and not recwarn.list


def test_an_outdated_version_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["train", "Taxi-v3"])
    assert "Taxi-v4" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--num-envs", "--num-episodes"])
def test_no_slots_and_no_episodes_are_refused_at_once(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["train", "CartPole-v1", option, "0", "--total-steps", "100", "--run-dir", str(tmp_path / "run")])
    assert "expected at least 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "option", "expected"), [
    (["Pendulum-v1", "--policy-kwargs", '{"hidden": [32]}'], "policy_kwargs", PENDULUM | {"hidden": [32]}),
    (["Pendulum-v1", "--policy-kwargs={\"log_std_init\": 0.5}"], "policy_kwargs", PENDULUM | {"log_std_init": 0.5}),
    (["CliffWalking-v1", "--env-kwargs", '{"is_slippery": true}'],
     "env_kwargs", {"max_episode_steps": 200, "is_slippery": True}),
    (["CliffWalking-v1", "--policy", "lstm", "--env-kwargs", '{"max_episode_steps": 9}'],
     "env_kwargs", {"max_episode_steps": 9}),
])  # fmt: skip
def test_arguments_are_added_to_those_of_the_preset(words, option, expected, tmp_path):
    short = ["--run-dir", str(tmp_path), "--total-steps", "64", "--config.num-steps", "8", "--num-episodes", "1"]
    main(["train", *words, *short, "--num-envs", "2", "--json"])
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())[option] == expected
    main(["train", "--resume", str(tmp_path), "--total-steps", "128", "--json"])
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())[option] == expected


@pytest.mark.parametrize("options", [["--policy", "lstm"], ["--policy", "mlp"]])
def test_the_command_chooses_policy_and_normalisation(options, tmp_path, capsys):
    normalized = ["--policy-kwargs", '{"normalize_observations": true}', "--config.normalize-rewards"]
    main(["train", "CartPole-v1", "--total-steps", "300", "--run-dir", str(tmp_path), "--num-episodes", "2", "--json",
          "--config.num-steps", "16", *normalized, *options])  # fmt: skip
    policy = algos.load(tmp_path)
    assert type(policy) is {"lstm": LSTMPolicy, "mlp": MLPPolicy}[options[1]]
    assert policy.normalizer.count > 200
    with pytest.raises(SystemExit):
        main(["train", "textenv/Copy-v0", *options])
    assert "language model" in capsys.readouterr().err


def test_a_run_goes_on_with_other_arguments_of_its_environment(tmp_path, capsys, caplog):
    """Its episodes begin anew, which the log says; the training and the evaluation have the new arguments."""
    small = ["--num-envs", "2", "--config.num-steps", "64", "--config.minibatch-size", "128", "--num-episodes", "3"]
    main(["train", "CartPole-v1", "--total-steps", "128", "--run-dir", str(tmp_path), *small])
    with caplog.at_level(logging.WARNING):
        arguments = ["--env-kwargs", '{"max_episode_steps": 7}']
        main(["train", "--resume", str(tmp_path), "--total-steps", "256", "--json", *arguments])
    assert "its episodes begin anew" in caplog.text and '"max_episode_steps": 500' in caplog.text
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["mean_return"] <= 7
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["steps"] >= 256 and last["episode/length"] <= 7
