"""Programs by name: ``textenv/Program-v0`` from files, and the ready-made games, also on the command line."""

import json

import gymnasium
import numpy as np
import pytest

import textenv  # noqa: F401 (registers the environments)
from algos.cli import main
from textenv.registration import PROGRAMS

AGENT = """
def play(ask, task):
    return float(len(ask(task["film"], max_tokens=4)) > 0)

def contest(first, second):
    return len(first("a", max_tokens=2)), len(second("b", max_tokens=2))

def says_much(content):
    return "much " * 9
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    lines = [json.dumps({"film": f"film {number}"}) for number in range(20)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    return tmp_path


def make(**arguments):
    return gymnasium.make_vec("textenv/Program-v0", num_envs=4, max_length=64, **arguments)


def test_tasks_of_a_file_are_split_by_content(folder):
    films = {}
    for split in ("train", "test"):
        env = make(play="agent.py:play", tasks="tasks.jsonl", split=split)
        films[split] = {task["film"] for task in env.task.tasks}
    assert films["train"] | films["test"] == {f"film {number}" for number in range(20)}
    assert not films["train"] & films["test"] and len(films["test"]) > 1

    env = make(play="agent.py:play", tasks=[{"film": "one"}], split="test")
    assert len(env.task.tasks) == 1, "too few to hold one out"


def test_every_kind_of_table_is_split_alike(folder):
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    rows = [{"film": f"film {number}"} for number in range(40)]
    texts = [row["film"] for row in rows]
    kinds = {
        "list": (rows, rows), "frame": (pandas.DataFrame(rows), rows),
        "data set": (datasets.Dataset.from_list(rows), rows),
        "labelled frame": (pandas.DataFrame(rows, index=range(100, 140)), rows),
        "series": (pandas.Series(texts), texts), "array": (np.array(texts), texts),
    }  # fmt: skip
    for name, (tasks, expected) in kinds.items():
        parts = [[*make(play="agent.py:play", tasks=tasks, split=split).task.tasks] for split in ("train", "test")]
        together = sorted(map(str, parts[0] + parts[1]))
        assert together == sorted(map(str, expected)), name
        assert 1 < len(parts[1]) < len(parts[0]), name


def test_the_best_return_of_a_program_is_not_known():
    """So that no report takes 1 for it."""
    assert [gymnasium.spec(f"textenv/{name}-v0").reward_threshold for name in PROGRAMS] == [None] * len(PROGRAMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "textenv/Program-v0 has no play"),
        (
            {"play": "agent.py:plays"},
            "agent.py has no function named 'plays'; its functions are play, contest, says_much",
        ),
        ({"play": "agent.py:play", "tasks": "tasks.txt"}, "there is no file tasks.txt"),
        ({"play": "agent.py:play", "tasks": "tasks.jsonl", "split": "dev"}, "split is 'dev'"),
        ({"play": "agent.py:contest", "agents": 2, "opponents": ["nobody"]}, "expected functions, 'file.py:function'"),
    ],
)
def test_what_is_missing_is_said(folder, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make(**arguments)


def test_opponents_may_be_named_by_file(folder):
    env = make(play="agent.py:contest", agents=2, opponents=["self", "agent.py:says_much"])
    assert list(env.task.opponents.by_name) == ["self", "agent.py:says_much"]
    assert env.task.opponents.by_name["agent.py:says_much"]("x") == "much " * 9


@pytest.mark.heavy
def test_the_command_line_trains_and_evaluates_a_program(folder, capsys):
    kwargs = {"play": "agent.py:play", "tasks": "tasks.jsonl", "max_length": 64}
    options = ["--env-kwargs", json.dumps(kwargs), "--total-steps", "200", "--run-dir", "run", "--num-envs", "8"]
    main(["train", "textenv/Program-v0", *options])
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["programs/failed"] == 0 and last["programs/questions"] == 1

    # The code of somebody else's run is not executed unless it is named
    with pytest.raises(SystemExit):
        main(["evaluate", "run"])
    assert "has arguments that are used only if you name them" in capsys.readouterr().err
    main(["evaluate", "run", "--env-kwargs", json.dumps({name: kwargs[name] for name in ("play", "tasks")})])
    assert "mean_return" in capsys.readouterr().out


@pytest.mark.heavy
def test_the_command_line_plays_a_game_against_named_players(folder, capsys):
    kwargs = json.dumps({"opponents": ["self", "perfect"]})
    main(["train", "textenv/TicTacToe-v0", "--env-kwargs", kwargs, "--total-steps", "100", "--run-dir", "run"])
    assert "opponents/perfect/return" in (folder / "run" / "metrics.jsonl").read_text()
    main(["evaluate", "run"])
    assert "mean_return" in capsys.readouterr().out
