"""The page of runs: its numbers against numbers by hand, and itself in a real browser."""

import base64
import contextlib
import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import yaml

from algos import cli
from algos.lab.comparison.page import MAX_TEXT_CHARACTERS, page_data, read_samples
from algos.lab.comparison.record import Record, write_record
from algos.lab.comparison.report import report_page
from algos.lab.comparison.runs import read_runs
from algos.lab.comparison.summary import by_case
from tests.helpers.browser import Browser, needs_chromium
from tests.helpers.errors import refused
from tests.helpers.finished_runs import run_of, write_run


def panel(data, title):
    (found,) = [each for each in data["panels"] if title in each["title"]]
    return found


def test_pass_rates_of_evaluations_share_a_panel():
    """Between evaluations the line is straight; those of a column's values have no line."""
    logged = {"eval/pass@1": [0.2, np.nan, 0.4], "eval/pass@8": [0.8, np.nan, 0.6], "eval/level=1/pass@8": [1, 1, 1]}
    run = run_of(1, returns=[0.0, 0.5, 1.0], after=1.0, **logged)
    lines = panel(page_data([run]), "pass rates of held-out prompts: Some-v0:ppo")["lines"]
    assert [line["name"] for line in lines] == ["pass@1", "pass@8"]
    halfway = 200 * 101 // 300
    assert lines[0]["mean"][halfway] == pytest.approx(0.3, abs=0.01) and lines[1]["mean"][-1] == 0.6


def test_curves_frontier_and_parts_by_hand(tmp_path):
    write_run(tmp_path / "a-1", seed=1, returns=(0.0, 0.5, 1.0))
    write_run(tmp_path / "a-2", seed=2, returns=(0.0, 0.1, 0.2))
    data = page_data(read_runs([tmp_path]))
    assert data["cases"] == ["textenv/Reviews-v0:ppo"]
    (line,) = panel(data, "return: textenv")["lines"]
    assert line["x"][0] == 0 and line["x"][-1] == 300 and len(line["x"]) == 101
    assert line["mean"][33] is None and line["mean"][34] is not None  # the first iteration ends at step 100
    assert line["mean"][-1] == 0.6 and [seed[-1] for seed in line["seeds"]] == [1.0, 0.2] and line["low"] is None
    assert line["mean"][50] == pytest.approx((0.25 + 0.05) / 2, abs=1e-3)  # step 150: half way from 100 to 200
    (line,) = panel(data, "frontier")["lines"]
    assert (line["x"][-1], line["mean"][-1], line["steps"][-1]) == (0.2, 0.6, 300)
    parts = panel(data, "reward components")["lines"]
    assert [part["name"] for part in parts] == ["a", "b"] and parts[0]["mean"][-1] == 0.3
    assert not [each for each in data["panels"] if "normalised" in each["title"]]


def test_a_run_under_way_has_its_classs_name(tmp_path):
    """What `compare` writes at its beginning has the plain form of functions and classes."""
    for number, (env, algo) in enumerate(
        [("CartPole-v1", "ppo"), ("own.py:made", "own.sub:Mine"), ("x:m.n", "old.Mine")]
    ):
        folder = tmp_path / str(number)
        write_run(folder, seed=1)
        settings = {"env": env, "algo": algo}
        if number:
            settings = {name: {"import": value} for name, value in settings.items()}
        write_record(folder, Record("", 1, settings, None))
    names = {(run.env, run.algorithm) for run in read_runs([tmp_path])}
    assert names == {("CartPole-v1", "ppo"), ("made", "Mine"), ("m.n", "Mine")}


def test_five_seeds_have_a_band(tmp_path):
    """And a run that ended early ends its line."""
    for seed in range(5):
        write_run(tmp_path / f"{seed}", seed=seed, returns=np.linspace(0, seed, 10 if seed else 4).tolist())
    (line,) = panel(page_data(read_runs([tmp_path])), "return: textenv")["lines"]
    assert line["seeds"] == [] and line["low"][20] <= line["mean"][20] <= line["high"][20]
    assert line["low"][-1] is None and line["mean"][-1] == np.mean([1, 2, 3, 4])


def test_a_case_is_what_differs_but_for_the_seed(tmp_path):
    write_run(tmp_path / "a", seed=1)
    write_run(tmp_path / "b", seed=2)
    write_run(tmp_path / "c", seed=1, learning_rate=0.01)
    cases = by_case(read_runs([tmp_path]))
    assert {name: len(own) for name, own in cases.items()} == {
        "textenv/Reviews-v0:ppo (learning_rate 0.001)": 2, "textenv/Reviews-v0:ppo (learning_rate 0.01)": 1
    }  # fmt: skip
    page = report_page(read_runs([tmp_path]))
    (settings,) = re.findall(r'id="settings">.*?</section>', page, re.S)
    assert re.findall(r"<td>(.*?)</td>", settings) == ["learning_rate", "0.001", "0.01"]


def test_the_words_have_uncertainty_and_equal_answers(tmp_path):
    for seed in range(5):
        write_run(tmp_path / f"{seed}", seed=seed, returns=(0.0, 1.0 + seed))
    page = report_page(read_runs([tmp_path]))
    assert "a mean return of 3 (95 % CI" in page and "5 seeds) in the last tenth" in page and "alike" not in page
    write_run(tmp_path / "alike", seed=9, returns=(0.0, 1.0, 1.0))  # distinct 2-grams .5, .3, .1
    assert "The answers became alike (seed 9:" in report_page(read_runs([tmp_path]))


def test_algorithms_have_a_probability_of_improvement():
    """Five against five, all better: 1 (1.00 to 1.00); the same five: a half."""
    better = [run_of(seed, returns=[1.0, 9.0], after=9.0 + seed) for seed in range(5)]
    worse = [run_of(seed, returns=[1.0, 9.0], after=1.0 + seed / 10) for seed in range(5)]
    for run in worse:
        run.algorithm = "a2c"
    said = report_page([*better, *worse])
    assert "Probability of improvement of Some-v0:ppo over Some-v0:a2c: 1.00 (95 % CI 1.00 to 1.00)." in said
    for run, other in zip(worse, better, strict=True):
        run.after = other.after
    assert "over Some-v0:a2c: 0.50" in report_page([*better, *worse])
    assert "these runs do not say which is better" in report_page([*better, *worse])


@pytest.mark.heavy
def test_ten_long_runs_stay_below_five_megabytes(tmp_path):
    """With first and last samples."""
    for seed in range(10):
        write_run(
            tmp_path / f"{seed}", seed=seed, returns=np.linspace(0, 1, 200).tolist(), samples=4, words="word " * 240
        )
    runs = read_runs([tmp_path])
    shown, note = read_samples(runs)
    found = [row for row in shown if row["seed"] == 3]
    assert {1, 200} <= {row["iteration"] for row in found} and len(json.dumps(found)) < MAX_TEXT_CHARACTERS / 10
    page = report_page(runs)
    assert len(page.encode()) < 5_000_000 and f"This page shows {len(shown)} of 8000 answers" in note and note in page


@pytest.mark.heavy
@pytest.mark.parametrize("words", ["word " * 20_000, "<&" * 200_000])
def test_of_long_answers_the_first_and_last_are_cut(tmp_path, words):
    for seed in range(4):
        write_run(tmp_path / f"{seed}", seed=seed, returns=[0.0, 0.5, 0.7, 1.0], samples=4, words=words)
    runs = read_runs([tmp_path])
    shown, note = read_samples(runs)
    assert {(row["seed"], row["iteration"]) for row in shown} == {
        (seed, i) for seed in range(4) for i in (1, 4)
    } and note
    assert all(row["completion"].endswith("…") for row in shown) and len(report_page(runs).encode()) < 5_000_000


def test_nothing_is_drawn_where_nothing_was_measured(tmp_path):
    write_run(tmp_path / "a", returns=[1.0, 2.0, float("nan"), float("nan")])
    (line,) = panel(page_data(read_runs([tmp_path])), "return: textenv")["lines"]
    assert line["mean"][24] is None and line["mean"][25] == 1 and line["mean"][50] == 2 and line["mean"][51] is None


def test_runs_of_one_seed_are_of_different_cases(tmp_path):
    """Beside hyper-parameters: arguments of the policy, steps that were planned, and more than three settings."""
    many = dict(gamma=0.9, clip_range=0.1, num_epochs=1, minibatch_size=32)
    write_run(tmp_path / "a", seed=1, **many)
    write_run(tmp_path / "b", seed=1, **many | dict(gamma=0.99, clip_range=0.2, num_epochs=2))
    write_run(tmp_path / "c", seed=1, **many | dict(minibatch_size=64))
    assert [len(own) for own in by_case(read_runs([tmp_path])).values()] == [1, 1, 1]
    for name in ("d", "e"):
        write_run(tmp_path / name, seed=1, **many)
    write_run(tmp_path / "long", seed=1, reward="x" * 50 + "1")
    write_run(tmp_path / "longer", seed=2, reward="x" * 50 + "2")  # cut off they look alike
    names = list(by_case(read_runs([tmp_path])))
    assert len(names) == 7 and sum(name.endswith(f" in {tmp_path / 'd'}") for name in names) == 1


def test_a_training_run_joins_the_case_of_its_options(tmp_path):
    options = {
        "env": "some:Some-v0",
        "algo": "ppo",
        "kl_coef": 0.1,
        "total_steps": 300,
        "config": {"learning_rate": 0.1},
    }
    for seed, total, episodes in ((1, 300, 8), (2, 300, 8), (3, 600, 8), (4, 300, 64)):
        write_run(tmp_path / f"{seed}", seed=seed)
        config = {"learning_rate": 0.1, "num_episodes": episodes, "seed": seed}  # of a rollout, not of the evaluation
        text = yaml.safe_dump(options | {"seed": seed, "total_steps": total, "num_episodes": seed, "config": config})
        (tmp_path / f"{seed}" / "run.yaml").write_text(text)
        (tmp_path / f"{seed}" / "config.json").unlink()
    cases = by_case(read_runs([tmp_path]))
    assert {name: [run.seed for run in own] for name, own in cases.items()} == {
        "Some-v0:ppo (total_steps 300, num_episodes 8)": [1, 2],
        "Some-v0:ppo (total_steps 600, num_episodes 8)": [3],
        "Some-v0:ppo (total_steps 300, num_episodes 64)": [4],
    }  # fmt: skip


@pytest.mark.parametrize("given", ["nowhere", "empty"])
def test_a_folder_without_runs_is_said(tmp_path, given):
    (tmp_path / "empty").mkdir()
    with refused(FileNotFoundError, "holds no run with an iteration", "algos runs FOLDER"):
        read_runs([tmp_path / given])


def test_a_folder_is_not_replaced_by_the_page(tmp_path, capsys):
    write_run(tmp_path / "runs" / "a")
    for out, says in (("runs", "out is runs, which is a folder"), ("none/page.html", "none does not exist")):
        with pytest.raises(SystemExit) as ended, contextlib.chdir(tmp_path):
            cli.main(["report", "runs", "--out", out])
        assert ended.value.code == 2 and says in capsys.readouterr().err
    assert (tmp_path / "runs" / "a" / "metrics.jsonl").is_file()


def test_the_command_writes_the_page_twice(tmp_path, capsys):
    write_run(tmp_path / "a")
    for _ in range(2):
        cli.main(["report", str(tmp_path / "a")])
    assert str(tmp_path / "a" / "report.html") in capsys.readouterr().out
    cli.main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "mine.html"), "--json"])
    assert (tmp_path / "mine.html").is_file()


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.mark.heavy
@needs_chromium
def test_the_page_works_in_a_browser(tmp_path):
    """It sorts, filters, shades, prints, and has no error."""
    write_run(tmp_path / "a-1", seed=1)
    write_run(tmp_path / "a-2", seed=2, words="<img src=x onerror=alert(1)> $x^2$ \x1b[2J")
    (tmp_path / "a-1" / "interpret").mkdir()
    (tmp_path / "a-1" / "interpret" / "logit_lens.png").write_bytes(base64.b64decode(PIXEL))
    cli.main(["report", str(tmp_path), "--json"])
    with Browser() as browser:
        browser.open(f"file://{tmp_path}/report.html")
        assert browser.run("document.querySelectorAll('#charts path').length") > 10
        place = browser.run("[...document.querySelectorAll('#samples th')].findIndex(x => x.innerText === 'score')")
        scores = f"[...document.querySelectorAll('#samples tbody tr')].map(row => Number(row.cells[{place}].innerText))"
        browser.click("#samples th button", place)
        rising = browser.run(scores)
        assert len(rising) == 12 and rising == sorted(rising) and len(set(rising)) > 2
        browser.click("#samples th button", place)
        assert browser.run(scores) == rising[::-1]
        assert browser.run("document.querySelector('#find').shade.value") == "log_ratio"
        shaded = "document.querySelectorAll('#samples tbody span')[1].style.background"
        assert "--bad" in browser.run(shaded), "a log-ratio of -1 is red"
        browser.click("[name=search]")
        browser.type("film 2.1")
        assert browser.run("document.querySelector('#count').textContent") == "1 of 12 answers."
        browser.run(
            "(form => { form.reset(); form.shade.value = ''; form.oninput() })(document.querySelector('#find'))"
        )
        assert browser.run("document.body.innerText.includes('<img src=x onerror=alert(1)> $x^2$ \\\\x1b[2J')")
        assert not browser.run("document.querySelector('td img, td script')")
        assert browser.run("document.querySelector('#inside img').naturalWidth") == 1
        browser.run(
            "(select => { select.value = 'fraction'; select.onchange() })(document.querySelector('[name=axis]'))"
        )
        assert browser.run("document.querySelector('#charts').innerHTML.includes('fraction of training')")
        browser.click("#legend button")
        assert browser.run("document.querySelector('#legend button').getAttribute('aria-pressed')") == "false"
        browser.click("nav a", 2)
        assert browser.run("location.hash") == "" and browser.run("scrollY") > 0, "a link scrolls, in a notebook too"
        assert browser.printed().startswith(b"%PDF") and browser.problems == []


@pytest.mark.heavy
@needs_chromium
def test_a_watched_training_keeps_the_readers_choice(tmp_path):
    command = [sys.executable, "-m", "algos", "watch", str(tmp_path), "--every", "1"]
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  (ignored in what nohup has started)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=listen) as watch, Browser() as browser:
        url = watch.stdout.readline().split()[1]
        browser.open(url)
        browser.wait("document.body.innerText.includes('has finished an iteration yet')")
        write_run(tmp_path / "a", returns=(0.0, 0.5))
        browser.wait("document.querySelector('#samples tbody tr')")
        browser.click("[name=search]")
        browser.type("prompt 1")
        assert browser.run("document.querySelector('#count').textContent") == "2 of 4 answers."
        write_run(tmp_path / "b", seed=2)
        browser.wait("document.querySelector('#count').textContent === '5 of 10 answers.'")
        assert browser.run("document.activeElement.name + document.activeElement.value") == "searchprompt 1"
        write_run(tmp_path / "c", seed=3, learning_rate=0.01)
        browser.wait("document.querySelectorAll('#legend button').length === 2")
        browser.click("#legend button", 1)  # hides the case of c
        write_run(tmp_path / "aa", seed=4, learning_rate=0.5)  # which is listed before it from now on
        browser.wait("document.querySelectorAll('#legend button').length === 3")
        hidden = "[...document.querySelectorAll('#legend [aria-pressed=false]')].map(x => x.innerText)"
        assert browser.run(hidden) == ["textenv/Reviews-v0:ppo (learning_rate 0.01)"]
        config = (tmp_path / "c" / "config.json").read_text()
        (tmp_path / "c" / "config.json").write_text(config[:20])
        browser.wait("document.querySelector('main').innerText.includes('config.json')")
        (tmp_path / "c" / "config.json").write_text(config)
        browser.wait("document.querySelectorAll('#legend button').length === 3")
        browser.open(url.partition("?")[0])
        assert "wrong token or host" in browser.run("document.body.innerText")
        assert [problem for problem in browser.problems if "403" not in problem] == []
        watch.send_signal(signal.SIGINT)
        assert watch.wait(timeout=30) == 0
