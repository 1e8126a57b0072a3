"""Details of PPO: which the bases have, effects by hand, and the script in miniature."""

import dataclasses
import json

import numpy as np
import pytest

from tests.helpers.models import load_example


@pytest.fixture
def study():
    return load_example("studies/details")


def base_has(study, detail_name):
    """Whether the base of each task has a detail: then the changed config lacks it."""
    details = [(study.details_of(task)[detail_name], task.base) for task in study.TASKS.values()]
    return [not changed_has for _, changed_has in (detail.change(base) for detail, base in details)]


def test_all_tasks_have_the_same_15_details(study):
    names = {tuple(study.details_of(task)) for task in study.TASKS.values()}
    assert [len(each) for each in names] == [15]


@pytest.mark.heavy
def test_a_detail_changes_only_its_fields(study):
    for task in study.TASKS.values():
        for name, detail in study.details_of(task).items():
            changed, _ = detail.change(task.base)
            fields = {
                field.name
                for field in dataclasses.fields(changed)
                if getattr(changed, field.name) != getattr(task.base, field.name)
            }
            assert fields and fields <= detail.having.keys() | detail.lacking.keys(), name


def test_every_base_has_these_details_and_lacks_two(study):
    depends_on_task = {"rewards scaled", "discount", "rate annealed", "Adam's ε 1e-5", "last state bootstrapped"}
    lacked = {"entropy bonus", "value clipped"}
    for name in study.details_of(study.TASKS["CartPole"]).keys() - depends_on_task:
        assert base_has(study, name) == [name not in lacked] * 6, name


@pytest.mark.parametrize(
    ("detail", "on_tasks"),
    [
        # CartPole, Acrobot, empty room; Reviews, Periods, Interview
        ("rewards scaled", [False, True, True, False, False, False]),
        ("rate annealed", [True, True, False, True, True, True]),
        ("discount", [True, True, True, False, False, False]),
        ("Adam's ε 1e-5", [True, True, True, False, False, False]),
        ("last state bootstrapped", [True, True, True, False, False, False]),
    ],
)
def test_some_details_are_only_in_the_bases_of_some_tasks(study, detail, on_tasks):
    assert base_has(study, detail) == on_tasks


def test_the_effect_of_a_detail_by_hand(study):
    """The base goes from 10 to a mean of 60, so the unit is 50."""
    runs = {}
    for seed, base in ((1, 55.0), (2, 65.0)):
        for detail, change in (("base", 0.0), ("ratio clipped", -25.0), ("entropy bonus", 10.0)):
            runs["CartPole", detail, seed] = {"first": 10.0, "mean": base + change, "last": 0.0, "seconds": 2.0}
    assert study.effects(runs) == {"ratio clipped": {"CartPole": [0.5, 0.5]}, "entropy bonus": {"CartPole": [0.2, 0.2]}}
    assert study.table(runs) == (
        ["detail", "CartPole"],
        [["ratio clipped", "+0.50 [+0.50, +0.50]"], ["entropy bonus", "+0.20 [+0.20, +0.20]"]],
    )
    _, rows = study.bases(runs)
    assert rows == [["CartPole", "35,000", "2", "10", "60", "0", "2"]]


def test_a_base_that_learns_nothing_has_no_effects(study):
    runs = {("CartPole", detail, 1): {"first": 10.0, "mean": 9.0} for detail in ("base", "ratio clipped")}
    assert study.effects(runs) == {}


def test_the_mean_of_a_curve_is_its_area(study):
    """Half of the training on a slope from 0 to 1, half at 1: (1/2 + 1) / 2."""
    assert study.mean_of_curve([(0, 0.0), (50, 1.0), (100, 1.0)], 100) == pytest.approx(0.75, abs=0.01)
    # Before the first point and after the last, the curve is level
    assert study.mean_of_curve([(50, 3.0)], 100) == pytest.approx(3.0)


def test_the_figure_shows_the_means_of_the_table(study, tmp_path):
    data = {"columns": ["detail", "A", "B"], "rows": [["x", "-0.40 [-0.50, -0.19]", "–"], ["y", "+1.09 [+1, +2]", "0"]]}
    (tmp_path / "data.json").write_text(json.dumps(data))
    tasks, details, effect = study.read_effects(tmp_path / "data.json")
    assert (tasks, details) == (["A", "B"], ["x", "y"])
    assert np.array_equal(effect, [[-0.4, np.nan], [1.09, 0.0]], equal_nan=True)


@pytest.mark.long
def test_details_are_trained_without_each_and_a_run_is_not_repeated(study, call, tmp_path, monkeypatch):
    short = {"CartPole": 6_000, "Empty room": 1_100, "Reviews": 4_000, "Interview": 1_500}
    tasks = {name: dataclasses.replace(study.TASKS[name], total_steps=steps) for name, steps in short.items()}
    monkeypatch.setattr(study, "TASKS", tasks)
    details = {name: detail for name, detail in study.details_of(tasks["CartPole"]).items() if name == "a critic"}
    monkeypatch.setattr(study, "details_of", lambda task: details)
    for _ in range(2):
        call(study, "--seeds", "1")
    lines = (tmp_path / "runs" / "details.jsonl").read_text().splitlines()
    assert [tuple(run) for run in study.RUNS.read()] == [
        (task, detail, 1) for task in tasks for detail in ("base", "a critic")
    ]
    assert len(lines) == 2 * len(tasks)
    output = call(study, "--table", "--figure", "details.svg", "--json", "details.json")
    assert "| a critic | " in output and "<svg" in (tmp_path / "details.svg").read_text()
    assert [row[0] for row in json.loads((tmp_path / "details-base.json").read_text())["rows"]] == list(tasks)
