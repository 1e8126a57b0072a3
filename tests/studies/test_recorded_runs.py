"""A run is a line of a file and is not repeated; tables of runs name command, machine and what they depend on."""

import json

import pytest

from tests.helpers.models import load_example

recorded_runs = load_example("benchmarks/recorded_runs")


class Clock:
    """Seconds that pass only when a run is measured."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


class Squares:
    """A measurement that takes two seconds, and remembers for which settings it was asked."""

    def __init__(self, clock):
        self.clock = clock
        self.asked = []

    def __call__(self, *, number, sign):
        self.asked.append((number, sign))
        self.clock.seconds += 2.04
        return {"square": number**2}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def run_file(tmp_path, clock):
    return recorded_runs.RunFile(tmp_path / "runs" / "squares.jsonl", ("number", "sign"), {"sign": "−"}, clock)


def settings(*numbers, sign="−"):
    return [{"number": number, "sign": sign} for number in numbers]


def test_a_run_is_a_line_and_is_not_repeated(run_file, clock):
    measure = Squares(clock)
    assert run_file.read() == {}
    first = list(run_file.run_missing(settings(1, 2), measure))
    second = list(run_file.run_missing(settings(2, 3), measure))
    assert measure.asked == [(1, "−"), (2, "−"), (3, "−")]
    assert [run["square"] for run in first] == [1, 4] and [run["square"] for run in second] == [9]
    lines = run_file.path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == '{"number": 1, "sign": "−", "square": 1, "seconds": 2.0}'
    assert list(run_file.read().values()) == [json.loads(line) for line in lines] == first + second


def test_all_settings_tell_runs_apart(run_file, clock):
    measure = Squares(clock)
    assert len(list(run_file.run_missing(settings(1) + settings(1, sign="+") + settings(1), measure))) == 2
    assert list(run_file.read()) == [(1, "−"), (1, "+")]


def test_a_run_is_kept_as_soon_as_it_ends(run_file, clock):
    def fail_on_two(*, number, sign):
        if number == 2:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        list(run_file.run_missing(settings(1, 2), fail_on_two))
    assert list(run_file.read()) == [(1, "−")]


def test_a_run_of_another_process_is_not_repeated(run_file, clock):
    measure = Squares(clock)
    runs = run_file.run_missing(settings(1, 2, 3), measure)
    next(runs)
    list(run_file.run_missing(settings(2), measure))
    assert [run["number"] for run in runs] == [3]


def test_the_first_lines_may_lack_a_setting(run_file):
    run_file.path.parent.mkdir()
    run_file.path.write_text('{"number": 5}\n{"number": 5, "sign": "+"}\n')
    assert list(run_file.read()) == [(5, "−"), (5, "+")]


def test_seconds_that_a_run_has_measured_itself_are_kept(run_file):
    (run,) = run_file.run_missing(settings(1), lambda number, sign: {"seconds": 7})
    assert run["seconds"] == 7


def test_a_table_is_printed_as_markdown(capsys):
    recorded_runs.print_table(["a", "b"], [["1", "x y"]])
    assert capsys.readouterr().out == "| a | b |\n| --- | --- |\n| 1 | x y |\n"


def test_a_cell_has_the_mean_the_smallest_and_the_largest():
    assert recorded_runs.mean_and_range([1.0, 3.0, 8.0]) == "4.00 [1.00, 8.00]"
    assert recorded_runs.mean_and_range([0.5], "+.1f") == "+0.5 [+0.5, +0.5]"


@pytest.mark.heavy
def test_a_table_of_earlier_runs_has_no_load_of_today(tmp_path):
    page = load_example("benchmarks/page")
    path = tmp_path / "t.json"
    kinds = ["penalties", "reward models"]
    page.save_table_of_runs(path, ["β"], [["1"]], "python x.py", kinds=kinds, raw={"runs": [{"β": 1}]})
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    assert list(data) == [
        "command", "date", "commit", "cpu", "cores", "libraries", "depends", "columns", "rows", "runs",
    ]  # fmt: skip
    assert data["command"] == "python x.py" and data["runs"] == [{"β": 1}] and "β" in text
    assert {"algos/ppo.py", "textenv/kl/penalty.py", "algos/finetuning/reward_model.py"} <= data["depends"].keys()
    assert page.table(data).splitlines()[2:5] == ["| β |", "| --- |", "| 1 |"]
