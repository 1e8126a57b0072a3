"""Tables of docs/results are those of their data, and say when other work was running."""

import json
import sys
from dataclasses import replace

import pytest

from tests.helpers.models import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "benchmarks"))
import page
import ratios

PAGES = [path for path in (EXAMPLES.parent / "docs").rglob("*.md") if page.MARK.search(path.read_text())]


def test_pages_show_what_their_data_says():
    assert "speed.md" in [path.name for path in PAGES]
    for path in PAGES:
        assert page.rewritten(path) == path.read_text(), f"run: python examples/benchmarks/page.py {path}"


def test_the_summary_of_speeds_is_that_of_the_measured_files():
    assert json.loads(ratios.TABLE.read_text()) == ratios.summary(), "run: python examples/benchmarks/ratios.py"
    text = (ratios.DATA.parent / "speed.md").read_text()
    for line in ratios.LINES:
        assert f"\n## {line.section}\n" in text
        # The ratio stands in the section that the line links to, too
        section = text.partition(f"\n## {line.section}\n")[2].partition("\n## ")[0]
        assert f" {ratios.cells(line)[2].partition(';')[0]} |" in section, line


@pytest.mark.parametrize(
    ("verdict", "heading"), [("**not reached**", "missed"), ("reached by some pairs", "undecided")]
)
def test_the_goals_that_the_page_of_speed_names_are_those_of_the_summary(verdict, heading):
    text = (ratios.DATA.parent / "speed.md").read_text()
    entry = text.partition(f"\n| {heading} |")[2].partition("\n")[0]
    lines = [line for line in ratios.LINES if ratios.cells(line)[2].endswith(verdict) and line.file != "gpu"]
    assert lines
    for line in lines:
        assert f"{ratios.ratios(line, line.case)[1]:.2f}".lstrip("0") in entry, line


def test_a_line_of_the_summary_names_the_goal_and_a_missing_row(tmp_path, monkeypatch):
    rows = [{"case": "a", "peer_name": "other", "ratio": 1.2, "ratios": [1.1, 1.2, 1.6], "note": ""}]
    (tmp_path / "one.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(ratios, "DATA", tmp_path)
    line = ratios.Line("work", "On a GPU", "one", "a", "other", goal=1.7)
    time = "1.20 (1.10 to 1.60); goal 1.7: **not reached**"
    assert ratios.cells(line) == ["[work](#on-a-gpu)", "other", time, ""]
    assert ratios.cells(replace(line, goal=1.1))[2] == "1.20 (1.10 to 1.60); goal 1.1: reached"
    assert ratios.cells(replace(line, goal=1.2))[2] == "1.20 (1.10 to 1.60); goal 1.2: reached by some pairs"
    with pytest.raises(ValueError, match=r"one\.json has no row 'b' beside 'other'"):
        ratios.cells(replace(line, case="b"))


def test_the_matrix_of_games_and_minds_is_that_of_all_rows():
    games = {
        "lake": "FrozenLake 4 × 4", "lake 8x8": "FrozenLake 8 × 8", "cliff": "CliffWalking", "taxi": "Taxi",
        "cartpole": "CartPole", "empty": "Empty", "doorkey": "DoorKey",
    }  # fmt: skip
    cells = {name: [] for name in games.values()}
    data = json.loads((page.DATA / "same-world.json").read_text())
    for game, mind, _, _, _, learnt, steps, *_ in data["rows"]:
        if mind.endswith("all layers"):
            continue
        number, _, seeds = learnt.partition(" of ")
        if number == "0":
            steps = "never"
        elif number != seeds:
            steps = f"{steps} ({learnt})"
        cells[games[game]].append(steps)
    text = (page.DATA.parent / "same-world.md").read_text()
    for name, steps in cells.items():
        assert f"\n| {name} | {' | '.join(steps)} |\n" in text


def row(ours, peer, unit, **more):
    values = {"ours": ours, "peer": peer}
    return {"case": "x", "unit": unit, "ours": ours[1], "peer": peer[1], "peer_name": "other", "floor_share": None,
            "ratio": 2.0, "note": "", "values": values} | more  # fmt: skip


def test_a_ratio_above_1_means_ours_is_better():
    about = page.machine("command")
    about["began"] -= 1e6  # long ago, so that what else this machine does now is next to nothing
    assert about["cores"] >= 1 and about["libraries"]["torch"] and about["cpu"]
    rows = [row([10, 20, 30], [10, 10, 10], "steps/s", floor_share=0.5), row([10, 20, 30], [20, 40, 90], "MB")]
    found = page.record(rows, about)
    assert [each["ratios"] for each in found["rows"]] == [[1, 2, 3], [2, 2, 3]]
    assert "values" not in json.dumps(found)
    lines = page.table(found).splitlines()
    assert "not final" not in lines[0] and lines[4] == "| x | 20 | other | 10 steps/s | 2.00 (1.00 to 3.00) | 0.50 |"
    assert "**not final: other work took 1.3 cores" in page.table(found | {"final": False, "others": 1.3})
    busy = page.machine("command")
    busy |= {"others": busy["others"] - 1_000, "began": busy["began"] - 1_000}
    busy = page.record(rows, busy)
    assert busy["others"] >= 0.9 and not busy["final"]


def test_a_peer_without_a_figure_says_why():
    """One that is not installed is left out."""
    rows = [row([1, 2], [1, 1], "s", ratio=None, note=note) for note in ("it failed: no disk", "not installed")]
    lines = page.table(page.machine("command") | {"final": True, "rows": rows}).splitlines()
    assert lines[-2] == "| x | 2 | other | it failed: no disk | | |"


@pytest.mark.parametrize("before", ["", "`old`\n\n| old |\n| --- |\n\n"])
def test_only_the_table_of_a_page_is_rewritten(tmp_path, before):
    (tmp_path / "data").mkdir()
    data = page.machine("command") | {"final": True, "rows": [row([10, 20], [10, 10], "steps/s")]}
    (tmp_path / "data" / "one.json").write_text(json.dumps(data))
    path = tmp_path / "page.md"
    path.write_text(f"# Title\n\n<!-- data/one.json -->\n\n{before}Words, `code`.\n\n| mine |\n")
    once = page.rewritten(path)
    assert once.startswith("# Title\n\n<!-- data/one.json -->\n\n`command`") and "old" not in once
    assert once.endswith("\n\nWords, `code`.\n\n| mine |\n")
    path.write_text(once)
    assert page.rewritten(path) == once


def test_only_a_change_of_code_makes_a_figure_old():
    before = '"""Words."""\nimport os\n\n\ndef f(x):\n    """Say."""\n    return x + 1\n'
    same = "import sys\nfrom a import b\n\n\ndef f(x):  # a comment\n    '''Other words.'''\n    return (x + 1)\n"
    assert page.digest(before) == page.digest(same) != page.digest(before.replace("+ 1", "+ 2"))
    known = {page.digest(same)}
    assert page.outdated({"depends": {"old/place.py": page.digest(before)}}, known) == []
    assert page.outdated({"depends": {"a.py": page.digest("x = 1")}}, known) == ["a.py"]


@pytest.mark.heavy
def test_figures_depend_on_files_and_are_up_to_date():
    present = page.digests()
    for kind, patterns in page.KINDS.items():
        assert all(any(page.ROOT.glob(pattern)) for pattern in patterns), kind
        assert page.outdated({"depends": page.depends(kind)}, present) == []


def test_measured_tables_name_command_and_machine():
    for path in page.DATA.glob("*.json"):
        data = json.loads(path.read_text())
        assert {"command", "date", "commit", "depends", "rows"} <= data.keys() and ("cpu" in data or "machine" in data)
        assert data["depends"] and data["rows"], path
        assert len([each for each in PAGES if f"data/{path.name}" in each.read_text()]) == 1, (
            f"{path.name} is on no page"
        )


def test_a_scripts_own_table_is_drawn_as_it_is(tmp_path):
    about = page.machine("python x.py")
    about["began"] -= 1e6
    page.save_table(tmp_path / "t.json", ["a", "b"], [["x", "1 [0, 2]"]], about, kind="control")
    data = json.loads((tmp_path / "t.json").read_text())
    assert page.outdated(data) == [] and "algos/ppo.py" in data["depends"]
    lines = page.table(data).splitlines()
    assert lines[0].startswith("`python x.py`, ") and lines[2:] == [
        "| a | b |",
        "| --- | --- |",
        "| x | 1 [0, 2] |",
        "",
    ]
