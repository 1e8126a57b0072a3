"""``algos evaluate``: pass rates of several samples a prompt, and prompts of the hub, read only if named."""

import json
import shlex

import pytest
import yaml

from algos.cli import main
from algos.storage.run_reader import read_metrics
from tests.helpers.hub_folders import README
from tests.helpers.models import WORDS, make_llama, make_tokenizer
from tests.helpers.packages import lazy_import

lazy_import("datasets")

REWARDS = """
def good(completions):
    return [float("good" in text.split()) for text in completions]

def last_word(completion):
    return completion.split()[-1] if completion.split() else None
"""
SHORT = "--total-steps 40 --num-envs 4 --config.num-episodes 8 --config.minibatch-size 8 --num-episodes 2 --quiet"
TRAIN = f"train --model llama --prompt-column question --reward rewards.py:good --max-new-tokens 4 {SHORT}"
HUB = "--prompts hf:sums:main --eval-prompts hf:sums:main/test"


def write_prompts(path, texts):
    rows = [{"question": text, "level": index % 2} for index, text in enumerate(texts)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tiny Llama, a reward, and a data set in the hub's format."""
    monkeypatch.chdir(tmp_path)
    make_llama().save_pretrained(tmp_path / "llama")
    make_tokenizer(WORDS).save_pretrained(tmp_path / "llama")
    (tmp_path / "rewards.py").write_text(REWARDS)
    for split, words in (("train", WORDS[:4]), ("test", WORDS[2:5])):
        write_prompts(tmp_path / "sums" / "main" / f"{split}.jsonl", [f"{a} {b}" for a in words for b in words])
    write_prompts(tmp_path / "sums" / "hard" / "validation.jsonl", WORDS[:3])
    (tmp_path / "sums" / "README.md").write_text(README.replace("{kind}", "jsonl"))
    return tmp_path


def run(words):
    main(shlex.split(words))


def printed_json(words, capsys):
    capsys.readouterr()
    run(f"{words} --json")
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refusal(words, capsys):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(words)
    assert stop.value.code == 2
    return capsys.readouterr().err


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if not name.startswith("time/")} for line in lines]


@pytest.mark.heavy
def test_a_run_on_the_hub_is_repeated_resumed_and_evaluated(here, capsys, monkeypatch):
    run(f"{TRAIN} {HUB} --total-steps 120 --run-dir whole")
    stored = yaml.safe_load((here / "whole" / "run.yaml").read_text())
    assert stored["prompts"] == f"hf:{here / 'sums'}:main" and stored["eval_prompts"].endswith("sums:main/test")

    # Resumed in the middle of the prompts, it draws the same ones; the learning rate is constant
    constant = f"{TRAIN} {HUB} --config.final-learning-rate 5e-4"
    run(f"{constant} --run-dir parts")
    run("train --resume parts --total-steps 120 --quiet")
    run(f"{constant} --total-steps 120 --run-dir once")
    assert metrics(here / "parts") == metrics(here / "once") and len(metrics(here / "once")) > 2

    # Evaluated, its prompts are read if they are named again
    monkeypatch.chdir(here / "whole")
    evaluate = f"evaluate . --reward {here}/rewards.py:good"
    assert "asked only if you name them: --prompts hf:" in refusal(evaluate, capsys)
    named = f"{evaluate} --prompts hf:{here}/sums:main/test"
    result = printed_json(f"{named} --k 1 4 --by level", capsys)
    assert result["pass_rates"]["num_prompts"] == 9 and [*result["pass_rates"]["by"]] == ["0", "1"]
    assert result["episodes"] == 36 and result["pass_rates"]["pass@1"]["mean"] == pytest.approx(result["mean_return"])


@pytest.mark.heavy
def test_a_table_has_the_pass_rates_and_wrong_options_say_so(here, capsys):
    write_prompts(here / "prompts.jsonl", [f"{a} {b}" for a in WORDS[:4] for b in WORDS[:4]])
    run(f"{TRAIN} --prompts prompts.jsonl --run-dir run")
    evaluate = "evaluate run --reward rewards.py:good"
    capsys.readouterr()
    run(f"{evaluate} --k 4 2 --num-samples 8 --num-prompts 3 --by level --answer rewards.py:last_word")
    table = capsys.readouterr().out
    assert all(name in table for name in ("level", "prompts", "greedy", "pass@2", "pass@4", "maj@4", "mean_return"))
    assert table.index("pass@2") < table.index("pass@4")
    for options, message in (
        ("--k 0", "k is (0,), expected distinct integers of at least 1"),
        ("--k", "k is (), expected distinct integers of at least 1"),
        ("--k 4 --num-samples 2", "pass@4 needs at least 4 of each prompt"),
        ("--k 4 --num-episodes 20", "say how many prompts by --num-prompts"),
        ("--k 4 --by difficulty", "expected a column of the prompts, which have 'level'"),
        ("--by level", "--by is for several samples of each prompt: add --k"),
        ("--k 4 --answer rewards.py:nope", "no function named 'nope'"),
        ("--prompts hf:sums:main/dev", "it has no split 'dev', but train, test"),
        ("--prompts hf:sum.jsonl", "a file is named without hf:"),
    ):
        assert message in refusal(f"{evaluate} {options}", capsys), options
    assert printed_json(f"{evaluate} --num-episodes 3", capsys)["episodes"] == 3


@pytest.mark.heavy
def test_a_training_measures_pass_rates_too(here, capsys):
    write_prompts(here / "prompts.jsonl", [f"{a} {b}" for a in WORDS[:4] for b in WORDS[:4]])
    train = (
        f"{TRAIN.replace(' --num-episodes 2', '')} --prompts prompts.jsonl --eval-prompts prompts.jsonl --run-dir run"
    )
    result = printed_json(
        f"{train} --k 1 4 --by level --num-prompts 6 --eval-every 8 --answer rewards.py:last_word", capsys
    )
    rows = read_metrics(here / "run")
    logged = [row["eval/pass@4"] for row in rows if "eval/pass@4" in row]
    assert result["episodes"] == 24 and len(logged) > 1 and result["pass@4"] >= result["pass@1"]
    assert {"eval/maj@4", "eval/greedy", "eval/level=1/pass@1"} <= rows[-1].keys()

    # Its options go on, unless they are somebody else's code
    resumed = printed_json("train --resume run --total-steps 90 --json", capsys)
    assert resumed["episodes"] == 24 and resumed["steps"] > result["steps"] and "maj@4" in resumed
    options = (here / "run" / "run.yaml").read_text()
    (here / "run" / "run.yaml").write_text(options + "\n")
    assert "--answer" in refusal("train --resume run --total-steps 120", capsys)
    for words, message in (
        ("--k 4 --num-episodes 30", "say how many prompts by --num-prompts"),
        ("--k 4 --eval-num-episodes 30", "say how many prompts by --num-prompts"),
        ("--num-prompts 3", "--num-prompts is for several samples of each prompt: add --k"),
        ("--k 4 --by difficulty", "expected a column of the prompts, which have 'level'"),
    ):
        assert message in refusal(f"{train}-2 {words}", capsys), words
    assert not (here / "run-2").exists()
    assert "--k: only for text environments" in refusal("train CartPole-v1 --k 4", capsys)


@pytest.mark.heavy
def test_pass_rates_are_for_prompts_not_for_control(tmp_path, capsys):
    run(f"train CartPole-v1 --total-steps 64 --num-episodes 1 --quiet --run-dir {tmp_path / 'run'}")
    assert "is a control environment, which has no prompts" in refusal(f"evaluate {tmp_path / 'run'} --k 4", capsys)
