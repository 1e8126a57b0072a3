"""`Finding`: one result of an interpretation, as a table, a CSV file and a picture."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from algos.lab.comparison.summary import MIN_SEEDS, bootstrap_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Finding:
    """A table with a name, and maybe a picture of it."""

    name: str
    """Name of its files, such as ``logit_lens``."""
    title: str
    """What it shows, with units: a short phrase."""
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    draw: Callable[[Figure], None] | None = None
    """Draws it into an empty figure."""

    def write(self, folder: str | Path) -> None:
        """Write ``NAME.csv`` and, if it can be drawn, ``NAME.png`` into an existing folder."""
        with Path(folder, f"{self.name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self.columns, *self.rows])
        if self.draw is not None:
            from matplotlib.figure import Figure

            figure = Figure(layout="constrained")
            self.draw(figure)
            figure.savefig(Path(folder, f"{self.name}.png"), dpi=150)


def change(values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Change from the first model to the second."""
    before, after, *_ = values.values()
    return after - before


def compared(
    name: str,
    title: str,
    columns: Sequence[str],
    labels: Iterable[tuple[Any, ...]],
    values: Mapping[str, np.ndarray],
    draw: Callable[[Figure], None] | None = None,
    *,
    ranked: bool = True,
) -> Finding:
    """Means of ``[n, *]`` for each model and their `change`; from `MIN_SEEDS` on with 95 % limits over the n.

    A row for each place of ``*``, with its labels first. ``ranked`` rows begin with the largest change.
    """
    found = [x.reshape(len(x), -1) for x in (*values.values(), change(values))]
    numbers, limits = [x.mean(0).tolist() for x in found], tuple[str, ...]()
    if len(found[-1]) >= MIN_SEEDS:
        limits = ("low", "high")
        numbers += zip(*(bootstrap_interval(x) for x in found[-1].T), strict=True)
    rows = [(*label, *row) for label, row in zip(labels, zip(*numbers, strict=True), strict=True)]
    if ranked:
        rows.sort(key=lambda row: -abs(row[len(columns) + len(values)]))
    return Finding(name, title, (*columns, *values, "change", *limits), rows, draw)


def draw_lines(figure: Figure, panels: Mapping[str, Mapping[str, Any]], *, style: str = ".-", **axes: Any) -> None:
    """Draw a panel for each quantity, with a line (or points) for each name in it."""
    figure.set_size_inches(6.4, 2.4 + 2.4 * len(panels))
    for axis, (quantity, lines) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        for name, values in lines.items():
            axis.plot(values, style, label=ascii(name)[1:-1])
        axis.locator_params(axis="x", integer=True)
        axis.set(ylabel=quantity, **axes)
        axis.legend()


def draw_maps(
    figure: Figure, rows: Sequence[Mapping[str, np.ndarray]], *, signed: bool = False, extent: Any = None, **axes: Any
) -> None:
    """Draw rows of heat maps by title, with the same colours in a row if its ranges overlap; signed: white is 0."""
    figure.set_size_inches(2 + 4.4 * len(rows[0]), 1.8 + 3 * len(rows))
    for maps, line in zip(rows, figure.subplots(len(rows), len(rows[0]), squeeze=False), strict=True):
        lows, highs = ([f(x) for x in maps.values()] for f in (np.min, np.max))
        shared = {"vmin": min(lows), "vmax": max(highs)} if max(lows) <= min(highs) else {}
        most = max(-min(lows), max(highs))
        look: Any = {"cmap": "RdBu_r", "vmin": -most, "vmax": most} if signed else shared
        for axis, (title, values) in zip(line, maps.items(), strict=True):
            figure.colorbar(axis.imshow(values, aspect="auto", extent=extent, **look), ax=axis)
            if extent is None:
                axis.locator_params(integer=True)
            axis.set(title=ascii(title)[1:-1], **axes)
            axis.tick_params("x", rotation=90 * ("xticklabels" in axes))
