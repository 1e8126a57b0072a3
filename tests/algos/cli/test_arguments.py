"""Words of the command line, and the files that they name, before the options are parsed."""

import itertools
import json

import pytest

from algos.cli import main
from algos.cli.arguments import options, refuse_repeated, with_files

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


@pytest.mark.parametrize(("words", "sentence"), [
    ("train --prompts a.jsonl --reward r.py:f --prompts=b.jsonl", "--prompts is given with a.jsonl, b.jsonl: it"),
    ("train --prompts a.jsonl --eval-prompts b.csv --eval-prompts c.csv", "--eval-prompts is given with b.csv, c.csv"),
    ("train textenv/Copy-v0 --k 1 --k 4", "--k is given with 1, 4: give all its values after one flag, --k 1 4"),
    ("evaluate R --prompts a --prompts b", "--prompts is given with a, b"),
    ("check-reward r.py:f --prompts a --prompts b", "--prompts is given with a, b"),
])  # fmt: skip
def test_values_of_which_the_last_alone_would_count_are_refused(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    shown = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2 and shown.startswith("algos: --") and sentence in shown
    assert list(tmp_path.iterdir()) == []


def test_an_option_may_be_typed_again_to_replace_it(tmp_path, capsys):
    """Scripts add to a command; equal values are no question."""
    words = ["CartPole-v1", "--num-envs", "1", "--config.num-steps", "8", "--quiet", "--json", "--num-episodes", "1"]
    main(["train", *words, "--total-steps", "1000", "--total-steps", "8", "--run-dir", str(tmp_path / "run")])
    assert json.loads(capsys.readouterr().out)["steps"] == 8
    refuse_repeated(["train", "--prompts", "a.jsonl", "--prompts=a.jsonl", "--reward", "f", "--reward", "g"])
