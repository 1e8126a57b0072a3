"""Figures of runs, looked at by what they draw; curves as a table, beside pandas' own reading of curves.csv."""

import sys

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from algos.lab.comparison.figures import curves, draw_curves, draw_scores, plot_curves, plot_scores
from algos.lab.comparison.page import bands
from algos.lab.comparison.paper import scores_by_algorithm
from algos.lab.comparison.report import write_report
from algos.lab.comparison.runs import read_runs
from algos.lab.comparison.summary import RunResult, name_cases
from algos.statistics.intervals import bootstrap_interval
from tests.helpers.finished_runs import write_run


def named(names, *, seeds=5, envs=("One-v0",)):
    """Runs of named cases that ended at scores by chance."""
    rng = np.random.default_rng(0)
    runs = []
    for env in envs:
        for name in names:
            for seed in range(seeds):
                history = [{"steps": 100 * (i + 1), "episode/return": 10.0 * i + rng.uniform()} for i in range(5)]
                before, after = {"mean_return": 0.0}, {"mean_return": float(rng.uniform(50, 100))}
                run = RunResult(env, "ppo", seed, "MLPPolicy", 10, 100.0, before, after, history, label=name)
                runs.append(run)
    name_cases(runs)
    return runs


SIX = [f"PPO with λ = .{90 + i}, rollouts of 2,048 steps, large batches" for i in range(6)]


def panels(figure):
    """Axes with what is drawn in them, by their x label."""
    figure.draw_without_rendering()
    return {axis.get_xlabel(): axis for axis in figure.axes}


@pytest.mark.heavy
@pytest.mark.parametrize("names", [["ppo"], ["a", "b"], SIX[:3], SIX, [f"{x} {'long name ' * 9}" for x in "abcdefgh"]])
def test_panels_keep_their_size_with_long_names(names):
    """With six named cases, panels were .3 inches wide and names ran into each other."""
    figure = draw_scores(scores_by_algorithm(named(names)))
    inches = np.array(figure.get_size_inches())
    renderer = FigureCanvasAgg(figure).get_renderer()
    for label, axis in panels(figure).items():
        width, height = axis.get_position().size * inches
        assert width > 2 and height > 1.5, label
        boxes = [text.get_window_extent(renderer) for text in axis.get_yticklabels()]
        for upper, lower in zip(boxes, boxes[1:], strict=False):
            assert not upper.overlaps(lower), label
        for box in boxes:
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    assert len(figure.axes) == 2 + (len(names) > 1)


def test_environments_of_one_name_are_drawn_together(tmp_path):
    runs = named(["λ = .9", "λ = .5"], envs=("One-v0", "Two-v0"))
    scores = scores_by_algorithm(runs)
    assert {name: list(of_name) for name, of_name in scores.items()} == {
        "λ = .9": ["One-v0", "Two-v0"], "λ = .5": ["One-v0", "Two-v0"]
    }  # fmt: skip
    assert len({run.case for run in runs}) == 4
    figure = draw_curves(runs)
    assert [axis.get_title() for axis in figure.axes] == ["One-v0", "Two-v0"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["λ = .9", "λ = .5"]


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_a_line_is_the_mean_and_a_band_says_what_it_is(seeds):
    runs = named(["a"], seeds=seeds)
    figure = draw_curves(runs)
    (axis,) = figure.axes
    (line,) = axis.get_lines()
    last = np.array([run.history[-1]["episode/return"] for run in runs])
    assert line.get_xdata()[[0, -1]].tolist() == [100, 500] and line.get_ydata()[-1] == pytest.approx(last.mean())
    said = figure.get_supxlabel()
    if seeds == 1:
        assert not axis.collections and not said
        return
    (band,) = axis.collections
    at_the_end = [y for x, y in band.get_paths()[0].vertices.tolist() if x == 500]
    low, high = bootstrap_interval(last) if seeds == 5 else (last.min(), last.max())
    assert (min(at_the_end), max(at_the_end)) == (pytest.approx(low), pytest.approx(high))
    assert ("95 %" in said) == (seeds == 5) and ("lowest to highest seed" in said) == (seeds == 3)


def test_a_seed_that_ended_early_is_said():
    runs = named(["a"])
    says = "Beyond the end of a seed: means of the others"
    assert says not in draw_curves(runs).get_supxlabel() and says not in bands(runs)
    runs[2].history = runs[2].history[:2]
    figure = draw_curves(runs)
    assert says in figure.get_supxlabel() and says in bands(runs)
    (line,) = figure.axes[0].get_lines()
    last = [run.history[-1]["episode/return"] for run in runs if run is not runs[2]]
    assert line.get_ydata()[-1] == pytest.approx(np.mean(last))

    # The caption fits into a figure of one panel
    figure.draw_without_rendering()
    (caption,) = [text for text in figure.texts if says in text.get_text()]
    box = caption.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


@pytest.mark.heavy
def test_title_colours_order_and_size_are_given(tmp_path):
    write_report(tmp_path, named(["a", "b", "c"]))
    for seed in (1, 2):
        write_run(tmp_path / "runs" / f"slow-{seed}", seed=seed, returns=(0.0, 0.5))
        write_run(tmp_path / "runs" / f"fast-{seed}", seed=seed, returns=(0.0, 1.0), gamma=0.5)
    names = [run.line for run in read_runs([tmp_path / "runs"])][::2]
    order, colours = [names[1]], {names[1]: "red"}
    figure = plot_curves(tmp_path / "runs", title="Mine", order=order, colours=colours, size=(5, 2))
    (line,) = figure.axes[0].get_lines()
    assert (line.get_color(), figure.get_suptitle(), figure.get_size_inches().tolist()) == ("red", "Mine", [5, 2])
    assert (tmp_path / "runs" / "curves.pdf").read_bytes()[:4] == b"%PDF"
    kl = plot_curves(tmp_path / "runs", metric="reference/kl", out=tmp_path / "kl.png")
    assert kl.axes[0].get_ylabel().startswith("KL") and (tmp_path / "kl.png").read_bytes()[1:4] == b"PNG"
    with pytest.raises(ValueError, match="order has 'd', expected of"):
        plot_curves(tmp_path / "runs", order=["d"])
    with pytest.raises(ValueError, match="'no/such', which no run has logged: expected one of episode/length"):
        plot_curves(tmp_path / "runs", metric="no/such")
    with pytest.raises(ValueError, match="has a normalised score"):
        plot_scores(tmp_path / "runs")
    figure = draw_scores(scores_by_algorithm(named(["a", "b", "c"])), order=["c", "a"], colours={"a": "red"}, title="T")
    names = panels(figure)["interquartile mean of the normalised score"].get_yticklabels()
    assert [(text.get_text(), text.get_color()) for text in reversed(names)] == [("c", "#0072b2"), ("a", "red")]


@pytest.mark.heavy
def test_curves_are_a_table_of_pandas(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    for seed in (1, 2):
        write_run(tmp_path / f"{seed}", seed=seed, returns=(0.0, 0.5, 1.0))
    table = curves(tmp_path)
    assert table.columns[:5].tolist() == ["case", "environment", "algorithm", "seed", "iteration"]
    assert table.groupby("seed")["episode/return"].last().tolist() == [1.0, 1.0]
    runs = read_runs([tmp_path])
    write_report(tmp_path / "1", runs)
    pandas.testing.assert_frame_equal(table, pandas.read_csv(tmp_path / "1" / "curves.csv"))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'pandas>="):
        curves(tmp_path)
