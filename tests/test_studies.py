"""The programs of examples/studies run, and what they compute exactly is right."""

import dataclasses
import json
import re

import numpy as np
import pytest

from tests.helpers.models import EXAMPLES, load_example

ROOT = EXAMPLES.parent


def test_every_study_is_run_here():
    assert {path.stem for path in (EXAMPLES / "studies").glob("*.py")} == {"details", "pass_at_k", "staleness"}


def test_only_the_product_of_all_ratios_has_no_bias():
    figures = load_example("studies/staleness").enumerate_tree(distance=0.7)
    assert figures["product, no limit"]["bias"] < 1e-12
    assert min(row["bias"] for name, row in figures.items() if name != "product, no limit") > 0.1
    assert figures["sequence_truncate"]["variance"] < figures["product, no limit"]["variance"]


@pytest.mark.long
def test_stale_samples_are_trained_on_and_a_run_is_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = load_example("studies/staleness")
    monkeypatch.setattr(study, "ITERATIONS", 2)
    options = ["--staleness", "0,1", "--corrections", "none,sequence_mask", "--seeds", "1"]
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["staleness.py", *options])
        study.main()
    runs = [json.loads(line) for line in (tmp_path / "runs" / "staleness.jsonl").read_text().splitlines()]
    assert [(run["correction"], run["staleness"]) for run in runs] == [("none", 0), ("none", 1), ("sequence_mask", 1)]
    monkeypatch.setattr("sys.argv", ["staleness.py", "--table"])
    capsys.readouterr()
    study.main()
    assert f"| sequence_mask | – | {runs[2]['return']:.2f} |" in capsys.readouterr().out


def test_the_change_of_pass_rates_is_paired_by_prompt():
    study = load_example("studies/pass_at_k")
    before = {"pass@1": [0.0, 0.2, 0.4, 0.6, 0.8]}
    after = [{"pass@1": [0.1, 0.3, 0.5, 0.7, 0.9]}, {"pass@1": [0.3, 0.5, 0.7, 0.9, 1.1]}]
    columns, rows = study.table({study.UNTRAINED: before, 1: after[0], 2: after[1]})
    assert columns == ["", "untrained", "trained, mean of 2 (each seed)", "change"]
    # Each prompt changes by .2, so the limits of the change are equal
    assert rows == [["pass@1", rows[0][1], "0.600 (0.50, 0.70)", "+0.200 [+0.200, +0.200]"]]
    assert study.is_right([" 46.", "46 or 7", "forty-six", "-46"], [46, 46, 46, 46]) == [1, 1, 0, 0]
    texts = [row["prompt"] for row in study.sums()]
    assert len(texts) == len(set(texts)) == 8100


@pytest.mark.long
def test_pass_rates_are_measured_before_and_after(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = load_example("studies/pass_at_k")
    monkeypatch.setattr(study, "TEST_PROMPTS", 5)
    monkeypatch.setattr(study, "K", (1, 2))
    monkeypatch.setattr(study, "LORA", None)
    short_sums = [{"prompt": f"{number} + 1 =", "sum": number + 1} for number in range(50)]
    monkeypatch.setattr(study, "sums", lambda: short_sums)
    options = ["--seeds", "1", "--model", "embedded", "--total-steps", "40"]
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["pass_at_k.py", *options])
        study.main()
    runs = [json.loads(line) for line in (tmp_path / "runs" / "pass_at_k.jsonl").read_text().splitlines()]
    assert [run["seed"] for run in runs] == [0, 1] and len(runs[1]["training"]) > 0
    assert {len(values) for run in runs for values in run["values"].values()} == {5}
    monkeypatch.setattr("sys.argv", ["pass_at_k.py", *options, "--table"])
    capsys.readouterr()
    study.main()
    before = runs[0]["values"]["pass@2"]
    assert f"| pass@2 | {sum(before) / 5:.3f} [" in capsys.readouterr().out


def test_a_detail_is_had_or_lacked_by_the_base_of_each_task():
    study = load_example("studies/details")
    names = [list(study.details_of(task)) for task in study.TASKS.values()]
    assert len(names[0]) == 15 and all(names[0] == those for those in names)
    for task in study.TASKS.values():
        for name, detail in study.details_of(task).items():
            changed, has_it = detail.change(task.base)
            assert changed != task.base, name
            assert has_it == (name == "entropy bonus" or name == "value clipped") or name in (
                "rewards scaled", "discount", "rate annealed", "Adam's ε 1e-5", "last state bootstrapped",
            )  # fmt: skip
    # What control has by default, text lacks, and the other way round
    bootstrapped = [study.details_of(task)["last state bootstrapped"] for task in study.TASKS.values()]
    has_it = [detail.change(task.base)[1] for detail, task in zip(bootstrapped, study.TASKS.values(), strict=True)]
    assert has_it == [False] * 3 + [True] * 3


def test_the_effect_of_a_detail_by_hand():
    """The base goes from 10 to a mean of 60, so the unit is 50."""
    study = load_example("studies/details")
    runs = {}
    for seed, base in ((1, 55.0), (2, 65.0)):
        for detail, change in (("base", 0.0), ("ratio clipped", -25.0), ("entropy bonus", 10.0)):
            runs["CartPole", detail, seed] = {"first": 10.0, "mean": base + change, "last": 0.0, "seconds": 2.0}
    assert study.effects(runs) == {"ratio clipped": {"CartPole": [0.5, 0.5]}, "entropy bonus": {"CartPole": [0.2, 0.2]}}
    assert study.table(runs) == (
        ["detail", "CartPole"],
        [["ratio clipped", "+0.50 [+0.50, +0.50]"], ["entropy bonus", "+0.20 [+0.20, +0.20]"]],
    )
    assert study.mean_of_curve([(0, 0.0), (50, 1.0), (100, 1.0)], 100) == pytest.approx(0.75, abs=0.01)


@pytest.mark.long
def test_details_are_trained_without_each_and_a_run_is_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = load_example("studies/details")
    short = {"CartPole": 2_000, "Empty room": 1_100, "Reviews": 1_000, "Interview": 1_500}
    tasks = {name: dataclasses.replace(study.TASKS[name], total_steps=steps) for name, steps in short.items()}
    monkeypatch.setattr(study, "TASKS", tasks)
    details = {name: detail for name, detail in study.details_of(tasks["CartPole"]).items() if name == "a critic"}
    monkeypatch.setattr(study, "details_of", lambda task: details)
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["details.py", "--seeds", "1"])
        study.main()
    assert len((tmp_path / "runs" / "details.jsonl").read_text().splitlines()) == 2 * len(tasks)
    options = ["--table", "--figure", "details.svg", "--json", "details.json"]
    monkeypatch.setattr("sys.argv", ["details.py", *options])
    study.main()
    assert "| a critic | " in capsys.readouterr().out and "<svg" in (tmp_path / "details.svg").read_text()
    assert [row[0] for row in json.loads((tmp_path / "details-base.json").read_text())["rows"]] == list(tasks)


def test_the_figures_show_the_numbers_of_the_tables(tmp_path):
    pictures = load_example("benchmarks/pictures")
    (tmp_path / "table.json").write_text(
        json.dumps(
            {
                "columns": ["", "K = 0", "K = 4"],
                "rows": [["none", "0.92 [0.90, 0.93]", "−9.63 (-24.67)"], ["x", "–", "1"]],
            }
        )
    )
    columns, rows = pictures.read_table(tmp_path / "table.json")
    assert columns == ["K = 0", "K = 4"]
    assert rows == {"none": [[0.92, 0.90, 0.93], [-9.63, -24.67]], "x": [[], [1]]}


@pytest.mark.parametrize("name", ["staleness", "pass_at_k"])
def test_a_figure_is_drawn_again_from_the_table_of_its_page(name, tmp_path):
    """The file in docs/figures is that of the present table."""
    load_example(f"studies/{name}").draw(tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    published = (ROOT / "docs" / "figures" / f"{name.replace('_', '-')}.svg").read_text()
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("", drawn) == number.sub("", published)
    coordinates = [np.array(number.findall(text), dtype=float) for text in (drawn, published)]
    assert np.allclose(*coordinates, atol=0.01)
