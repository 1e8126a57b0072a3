"""Words of the command line, and the files that they name, before the options are parsed."""

import itertools

import pytest

from algos.cli.arguments import options, with_files

SWITCHES = {"quiet", "json"}


def test_the_environment_is_found_wherever_it_stands():
    uses = [
        ["Acrobot-v1"],
        ["--stop-at", "-90"],
        ["--config.gamma=-1"],
        ["--quiet"],
        ["--config.adam-betas", "0.5", "0.9"],
    ]
    for words in itertools.permutations(uses):
        env, found = options(["train", *itertools.chain(*words)], SWITCHES)
        assert env == "Acrobot-v1"
        assert found == {
            "": [], "stop-at": ["--stop-at", "-90"], "config.gamma": ["--config.gamma=-1"], "quiet": ["--quiet"],
            "config.adam-betas": ["--config.adam-betas", "0.5", "0.9"],
        }  # fmt: skip


def test_a_later_file_replaces_options_of_an_earlier_one(tmp_path):
    base = tmp_path / "base.toml"
    over = tmp_path / "over.toml"
    base.write_text('env = "CartPole-v1"\nnum-envs = 4\nreward = ["a.py:f", "b.py:g"]\n[config]\ngamma = 0.9\nlr = 1\n')
    over.write_text('reward = ["c.py:h"]\n[config]\ngamma = 0.5\n')
    words = with_files(["train", "--config", str(base), f"--config={over}", "--config.lr", "2"], SWITCHES)
    assert words[:2] == ["train", "CartPole-v1"]
    assert sorted(words[2:]) == sorted(["--num-envs=4", "--reward=c.py:h", "--config.gamma=0.5", "--config.lr", "2"])
    other = tmp_path / "other.yaml"
    other.write_text("env: Acrobot-v1")
    words = with_files(["train", "--config", str(base), "--config", str(other), "--config", str(over)], SWITCHES)
    assert words[1] == "Acrobot-v1" and "--config.gamma=0.5" in words and "--num-envs=4" in words


def test_another_algorithm_than_that_of_the_run_is_refused(tmp_path):
    """A hyper-parameter of the run's own was named instead, which the user had not typed."""
    (tmp_path / "run.yaml").write_text("env: CartPole-v1\nalgo: grpo\nconfig: {group_size: 4}\n")
    resume = ["train", "--resume", str(tmp_path)]
    assert "--config.group-size=4" in with_files(resume, SWITCHES)
    assert "grpo" in with_files([*resume, "--algo", "grpo"], SWITCHES)
    sentence = f"{tmp_path} was trained by grpo, not by ppo: leave --algo out"
    with pytest.raises(ValueError, match=sentence):
        with_files([*resume, "--algo", "ppo"], SWITCHES)
    (tmp_path / "file.yaml").write_text("algo: ppo\n")
    with pytest.raises(ValueError, match=sentence):
        with_files([*resume, "--config", str(tmp_path / "file.yaml")], SWITCHES)
