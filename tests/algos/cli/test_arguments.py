"""Words of the command line, and the files that they name, before the options are parsed."""

import itertools
import json

import pytest
import yaml

from algos.cli import main
from algos.cli.arguments import options, refuse_repeated, with_files
from algos.storage.run_reader import options_text, read_options_file

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


JSON_FORMS = {
    '{"env_kwargs": {"bonus": 1e-05, "most": 1e+20}}': {"env_kwargs": {"bonus": 1e-5, "most": 1e20}},
    '{\n\t"stop": "\\ud83d\\ude00"\n}': {"stop": "\N{GRINNING FACE}"},
    '{"words": {"no": "no"}}': {"words": {"no": "no"}},
}
YAML_FORMS = {
    "env_kwargs: {bonus: 1e-5, low: -2E3, half: .5}": {"env_kwargs": {"bonus": 1e-5, "low": -2000.0, "half": 0.5}},
    "seed: 010": {"seed": "010"}, "at: 1:30": {"at": "1:30"}, "n: 1_000": {"n": 1000}, "quiet: no": {"quiet": False},
    "x: [0, -7, 1., ~, 0x10, 1_000.5]": {"x": [0, -7, 1.0, None, 16, 1000.5]}, "{1: a, '1': b}": {1: "a", "1": "b"},
}  # fmt: skip


@pytest.mark.parametrize("kind, text, values", [
    *(("json", *form) for form in JSON_FORMS.items()), *(("yaml", *form) for form in YAML_FORMS.items()),
])  # fmt: skip
def test_values_of_a_file_are_those_of_its_format(kind, text, values, tmp_path):
    """JSON's are those of Python's json; PyYAML reads 1e-5 as a text, 010 as 8 and 1:30 as 90."""
    path = tmp_path / f"options.{kind}"
    path.write_text(text)
    found = read_options_file(path)
    assert found == values and repr(found) == repr(values)
    if kind == "json":
        assert found == json.loads(text)


@pytest.mark.parametrize("kind, text", [
    ("json", '{"config": {"gamma": 0.9, "gamma": 0.5}}'), ("json", '{"gamma": 1, "gamma": 1}'),
    ("yaml", "gamma: 1\ngamma: 2"), ("yaml", "config: {gamma: 1, gamma: 2}"),
])  # fmt: skip
def test_a_name_twice_in_a_file_is_refused(kind, text, tmp_path, capsys):
    path = tmp_path / f"options.{kind}"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["train", "CartPole-v1", "--config", str(path)])
    assert stop.value.code == 2 and "it has 'gamma' twice" in capsys.readouterr().err


WORDS = [
    "1e5", "12e5", "94e8375", "-.5", "010", "1:30", "0x10", "1_000", "no", "~", "null", ".inf", "2026-01-01", "=", "",
    "a: b", "- a", "1e-5", "\N{GRINNING FACE}", "line\nbreak", "0.1", "+1", "1.", ".",
]  # fmt: skip


def test_stored_options_are_read_back(tmp_path):
    """By any reader of YAML."""
    options = {"env": "CartPole-v1", "env_kwargs": {word: word for word in WORDS}}
    options["config"] = {"learning_rate": 1e-5, "seed": 10, "gamma": 1e20, "gae_lambda": None, "clip": True}
    path = tmp_path / "run.yaml"
    path.write_text(options_text(options))
    assert read_options_file(path) == yaml.safe_load(path.read_text()) == options
    path.write_text("gamma: {{ g }}")
    with pytest.raises(ValueError, match="line 1, column 8"):
        read_options_file(path)


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
