"""Figures of runs for a paper, and their curves as a table: learning curves with bands, and scores of algorithms."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from algos.lab.comparison.page import OF_ENV, OF_TEXT, OF_UPDATE, RETURN
from algos.lab.comparison.paper import TAUS, PaperRow, Scores, interval, paper_rows, profile, scores_by_algorithm
from algos.lab.comparison.runs import read_runs
from algos.lab.comparison.summary import AFTER_AN_END, QUANTITIES, RunResult, ended_early, lines_of, on_grid, steps_grid
from algos.statistics.intervals import MIN_SEEDS, limits
from textenv.optional import package
from textenv.rendering import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from pandas import DataFrame

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")
"""Okabe and Ito's colours, which colour-blind people tell apart."""
DASHES = ("-", "--", ":", "-.")
"""Line styles; the next one begins when all colours are used."""
LINE_LENGTH = 36
"""Characters after which a name is continued on the next line."""
CHARACTER = 0.085
"""Width of a character, in inches."""
LINE_HEIGHT = 0.22
"""Height of a line of text, in inches."""
PANEL = (3.2, 2.6)
"""Width and height of a panel without its labels, in inches."""
FEW_PAIRS = 6
"""Up to this number of pairs, a figure of scores has one row of panels."""

Look = dict[str, tuple[str, str]]
"""Colour and line style by name."""


def curves(*folders: str | Path) -> DataFrame:
    """Read the learning curves of runs as a pandas table.

    A row is an iteration of a run. Columns: ``case``, ``environment``, ``algorithm``, ``seed``, and every logged
    metric, such as ``steps`` and ``episode/return``; NaN where it was not logged.

    Args:
        folders: of runs or comparisons, or folders above them.

    Raises:
        FileNotFoundError: if a folder has no run with at least one iteration.
        ImportError: if pandas is not installed.
        ValueError: if a file of a run is damaged.

    Example:
        >>> table = curves("runs/compare")  # doctest: +SKIP
        >>> table.groupby(["case", "seed"])["episode/return"].max()  # doctest: +SKIP
    """
    pandas = package("pandas", "pandas")
    return pandas.DataFrame(curve_rows(read_runs(folders)))


def curve_rows(runs: Sequence[RunResult]) -> list[dict[str, str | int | float]]:
    """Return a row for each iteration of each run, with the run's `identity`."""
    return [identity(run) | {"seed": run.seed} | row for run in runs for row in run.history]


def identity(run: RunResult) -> dict[str, str | int]:
    """Return the columns that say which case a row of a table belongs to."""
    return {"case": run.case, "environment": run.env, "algorithm": run.algorithm}


def plot_curves(
    *folders: str | Path,
    metric: str = RETURN,
    out: str | Path | None = None,
    title: str = "",
    order: Sequence[str] | None = None,
    colours: Mapping[str, str] | None = None,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw a logged quantity of runs over the steps, a panel for each game, and write the figure.

    Lines are means over the seeds. Bands are 95 % bootstrap intervals of the mean or, with fewer than five seeds, reach
    from the lowest seed to the highest; the figure says which.

    Args:
        folders: of runs or comparisons, or folders above them.
        metric: name of the quantity in the log (docs/metrics.md).
        out: file to write; its name's end says how (``.pdf``, ``.svg``, ``.png``). None writes ``curves.pdf`` and
            ``curves.svg`` into the folder (into the working folder, if there are several).
        title: title of the figure.
        order: names of the cases to draw, in this order; None draws all.
        colours: colour of a case by its name, as matplotlib takes it.
        size: width and height in inches.

    Returns:
        The figure, for further changes.

    Raises:
        FileNotFoundError: if a folder has no run with at least one iteration.
        ValueError: if no run has logged the quantity, or there is no case of a name in ``order`` or ``colours``.
    """
    figure = draw_curves(read_runs(folders), metric=metric, title=title, order=order, colours=colours, size=size)
    save_figure(figure, _files(folders, out, "curves"))
    return figure


def plot_scores(
    *folders: str | Path,
    out: str | Path | None = None,
    title: str = "",
    order: Sequence[str] | None = None,
    colours: Mapping[str, str] | None = None,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw what `compare` draws for a paper, and write the figure: interquartile means, profiles, and who beats whom.

    Args:
        folders, title, size: as of `plot_curves`.
        out: as of `plot_curves`; None writes ``paper.pdf`` and ``paper.svg``.
        order: names of the algorithms (or named cases) to draw, in this order; None draws all.
        colours: colour of an algorithm (or named case) by its name.

    Returns:
        The figure, for further changes.

    Raises:
        FileNotFoundError: if a folder has no run with at least one iteration.
        ValueError: if no environment has a scale of scores (`algos.lab.comparison.summary.normalise`), or there is
            nothing of a name in ``order`` or ``colours``.
    """
    scores = scores_by_algorithm(read_runs(folders))
    if not scores:
        raise ValueError(
            f"no run in {', '.join(map(str, folders))} has a normalised score: it takes evaluations before and after "
            "the training, which compare makes, and a policy that got better. Use plot_curves"
        )
    figure = draw_scores(scores, title=title, order=order, colours=colours, size=size)
    save_figure(figure, _files(folders, out, "paper"))
    return figure


def draw_curves(
    runs: Sequence[RunResult],
    *,
    metric: str = RETURN,
    title: str = "",
    order: Sequence[str] | None = None,
    colours: Mapping[str, str] | None = None,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw `plot_curves` of these runs."""
    from matplotlib.figure import Figure

    # Runs of each line in each panel
    having = [run for run in runs if any(metric in row for row in run.history)]
    if not having:
        logged = sorted({name for run in runs for row in run.history for name in row})
        raise ValueError(f"metric is {metric!r}, which no run has logged: expected one of {', '.join(logged)}")
    lines_by_case = lines_of(having)
    names = _chosen(dict.fromkeys(lines_by_case.values()), order, colours)
    looks = _looks(names, colours)
    panels: dict[str, dict[str, list[RunResult]]] = {}
    for run in having:
        name = lines_by_case[run.case]
        if name in names:
            panels.setdefault(run.game_name, {}).setdefault(name, []).append(run)

    # Lines and bands
    legend_width = CHARACTER * max(map(len, names)) + 0.6
    width = PANEL[0] * len(panels) + 0.6 * len(panels) + legend_width
    further_lines = max(_folded(game).count("\n") for game in panels)
    default_size = (width, PANEL[1] + 0.6 + LINE_HEIGHT * further_lines)
    figure = Figure(figsize=size or default_size, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    kinds = set()
    handles: dict[str, Line2D] = {}
    for axis, (game, lines) in zip(axes, panels.items(), strict=True):
        for name in names:
            if name in lines:
                handles[name], kind = _draw_line(axis, lines[name], metric, *looks[name])
                kinds.add(kind)
        axis.set_title(_folded(game), fontsize="medium")
        axis.set_xlabel("steps")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel((OF_ENV | QUANTITIES | OF_UPDATE | OF_TEXT).get(metric, metric))

    # Legend, and what the bands are
    lines_of_legend = [handles[name] for name in names]
    figure.legend(lines_of_legend, [_shown(name) for name in names], loc="outside right upper", frameon=False)
    bands = "; ".join(sorted(kinds - {""}))
    if bands:
        caption = f"Bands: {bands}."
        if any(ended_early(of_line) for lines in panels.values() for of_line in lines.values()):
            caption += f"\n{AFTER_AN_END}."
        figure.supxlabel(caption, fontsize="small", color="0.4")
    if title:
        figure.suptitle(title)
    return figure


def _draw_line(axis: Axes, runs: Sequence[RunResult], metric: str, colour: str, dashes: str) -> tuple[Line2D, str]:
    """Draw a case's mean over its seeds, and its band; return the line, and what the band is."""
    steps = steps_grid(runs)
    values = on_grid(runs, metric)
    measured = np.isfinite(values).any(axis=0)
    steps = steps[measured]
    values = values[:, measured]
    (line,) = axis.plot(steps, np.nanmean(values, axis=0), color=colour, ls=dashes)
    if len(runs) == 1:
        return line, ""
    band = limits(values)
    if band is not None:
        kind = "95 % bootstrap intervals of the mean"
    else:
        lowest = np.nanmin(values, axis=0)
        highest = np.nanmax(values, axis=0)
        band = (lowest, highest)
        kind = f"lowest to highest seed (of fewer than {MIN_SEEDS})"
    axis.fill_between(steps, *band, color=colour, alpha=0.2, lw=0)
    return line, kind


def draw_scores(
    scores: Mapping[str, Scores],
    *,
    title: str = "",
    order: Sequence[str] | None = None,
    colours: Mapping[str, str] | None = None,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw `plot_scores` of these scores, by name."""
    from matplotlib.figure import Figure

    names = _chosen(scores, order, colours)
    scores = {name: scores[name] for name in names}
    looks = _looks(names, colours)
    rows = paper_rows(scores)
    means = [row for row in rows if row.quantity == "interquartile mean"]
    pairs = [row for row in rows if row.quantity == "probability of improvement"]

    # Room for the names: a panel keeps its size, however long they are
    mean_labels = [_folded(row.name) for row in means]
    pair_labels = [f"{_folded(row.name)}\nover {_folded(row.over)}" for row in pairs]
    widths = [PANEL[0] + _text_width(mean_labels), PANEL[0] + 0.6]
    heights = [_text_height(mean_labels)]
    if not pairs:
        mosaic: Any = [["means", "profiles"]]
    elif len(pairs) <= FEW_PAIRS:
        mosaic = [["means", "profiles", "pairs"]]
        widths.append(PANEL[0] + _text_width(pair_labels))
        heights = [max(heights[0], _text_height(pair_labels))]
    else:
        mosaic = [["means", "pairs"], ["profiles", "pairs"]]
        widths = [max(widths), PANEL[0] + _text_width(pair_labels)]
        heights = [heights[0], max(PANEL[1], _text_height(pair_labels) - heights[0])]
    default_size = (sum(widths), sum(heights) + 0.4 * bool(title))
    figure = Figure(figsize=size or default_size, layout="constrained")
    axes = figure.subplot_mosaic(mosaic, width_ratios=widths, height_ratios=heights)

    # Interquartile means: names have the colours of the profiles, which need no legend
    _draw_rows(axes["means"], means, mean_labels, looks, seeds_of=scores)
    axes["means"].set_xlabel("interquartile mean of the normalised score")
    for label, row in zip(axes["means"].get_yticklabels(), reversed(means), strict=True):
        label.set_color(looks[row.name][0])

    # Profiles
    for name, of_name in scores.items():
        colour, dashes = looks[name]
        axes["profiles"].plot(TAUS, profile(of_name), color=colour, ls=dashes)
        band = interval(profile, of_name)
        if band is not None:
            axes["profiles"].fill_between(TAUS, *band, color=colour, alpha=0.2, lw=0)
    axes["profiles"].set(xlabel="normalised score τ", ylabel="fraction of runs with score > τ", ylim=(0, 1.02))

    # Probabilities of improvement
    if pairs:
        _draw_rows(axes["pairs"], pairs, pair_labels, looks)
        axes["pairs"].axvline(0.5, color="grey", lw=1, ls=":")
        axes["pairs"].set(xlabel="probability of improvement, P(X > Y)", xlim=(-0.02, 1.02))

    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    return figure


def _draw_rows(
    axis: Axes,
    rows: Sequence[PaperRow],
    labels: Sequence[str],
    looks: Look,
    *,
    seeds_of: Mapping[str, Scores] | None = None,
) -> None:
    """Draw a mark for each row, from the top, with its limits or, if there are none, a dot for each seed."""
    for height, row in enumerate(reversed(rows)):
        colour = looks[row.name][0]
        if row.limits is not None:
            axis.plot(row.limits, [height, height], color=colour, lw=6, alpha=0.4, solid_capstyle="butt")
        elif seeds_of is not None:
            seeds = np.concatenate([*seeds_of[row.name].values()])
            axis.plot(seeds, [height] * len(seeds), ".", color=colour, alpha=0.4)
        axis.plot(row.value, height, "|", color=colour, ms=14, mew=2)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_yticks(range(len(rows)), list(reversed(labels)))


def save_figure(figure: Figure, paths: Sequence[Path]) -> None:
    """Write a figure to each path, with TrueType fonts in PDF, which journals ask for."""
    import matplotlib

    with matplotlib.rc_context({"pdf.fonttype": 42}):
        for path in paths:
            figure.savefig(path)


def _files(folders: Sequence[str | Path], out: str | Path | None, name: str) -> list[Path]:
    """Return the files to write."""
    if out is not None:
        return [Path(out)]
    home = Path(folders[0]) if len(folders) == 1 else Path()
    return [home / f"{name}.pdf", home / f"{name}.svg"]


def _chosen(names: Mapping[str, object], order: Sequence[str] | None, colours: Mapping[str, str] | None) -> list[str]:
    """Return the names to draw, in their order; raise a ValueError for one that there is not."""
    for option, requested in (("order", order or ()), ("colours", colours or {})):
        unknown = [name for name in requested if name not in names]
        if unknown:
            raise ValueError(f"{option} has {', '.join(map(repr, unknown))}, expected of {', '.join(map(repr, names))}")
    return list(names) if order is None else list(order)


def _looks(names: Sequence[str], colours: Mapping[str, str] | None) -> Look:
    """Return colour and line style of each name."""
    styles = ((colour, dashes) for dashes in DASHES for colour in PALETTE)
    looks = dict(zip(names, itertools.cycle(styles), strict=False))
    for name, colour in (colours or {}).items():
        if name in looks:
            looks[name] = (colour, looks[name][1])
    return looks


def _folded(name: str) -> str:
    return "\n".join(textwrap.wrap(_shown(name), LINE_LENGTH)) or _shown(name)


def _shown(name: str) -> str:
    """Return the text that shows a name, on one line; matplotlib would read what is between dollars as mathematics."""
    return " ".join(printable(name).split()).replace("$", r"\$")


def _text_width(labels: Sequence[str]) -> float:
    """Width of the longest line, in inches."""
    return CHARACTER * max(len(line) for label in labels for line in label.splitlines())


def _text_height(labels: Sequence[str]) -> float:
    """Height of a panel with a row for each label, in inches."""
    lines = sum(label.count("\n") + 1 for label in labels)
    return max(PANEL[1], LINE_HEIGHT * lines + 0.1 * len(labels) + 0.7)
