"""`Finding`: one result of an interpretation, as a table, a CSV file and a picture."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from algos.statistics.intervals import MIN_SEEDS, bootstrap_interval

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
    """Texts and numbers."""
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
    first, second, *_ = values.values()
    return second - first


def compared(
    name: str,
    title: str,
    columns: Sequence[str],
    labels: Iterable[tuple[object, ...]],
    values: Mapping[str, np.ndarray],
    draw: Callable[[Figure], None] | None = None,
    *,
    ranked: bool = True,
) -> Finding:
    """Return the means of a quantity of each model and their `change`; from `MIN_SEEDS` on with 95 % limits over the n.

    Args:
        name, title, draw: see `Finding`.
        columns: names of the labels' parts.
        labels: labels of the rows, in the order of the elements of ``*``.
        values: the quantity by model, ``[n, *]``; two models at least.
        ranked: begin with the largest change; otherwise, the rows stay in the labels' order.
    """
    by_model = [x.reshape(len(x), -1) for x in values.values()]
    changes = change(values)
    changes = changes.reshape(len(changes), -1)

    # Columns of numbers, each as long as there are rows
    numbers = [x.mean(0).tolist() for x in (*by_model, changes)]
    limits: tuple[str, ...] = ()
    if len(changes) >= MIN_SEEDS:
        limits = ("low", "high")
        numbers += zip(*(bootstrap_interval(x) for x in changes.T), strict=True)

    rows = [(*label, *row) for label, row in zip(labels, zip(*numbers, strict=True), strict=True)]
    if ranked:
        change_column = len(columns) + len(values)
        rows.sort(key=lambda row: -abs(row[change_column]))
    return Finding(name, title, (*columns, *values, "change", *limits), rows, draw)


def draw_lines(
    figure: Figure, panels: Mapping[str, Mapping[str, object]], *, style: str = ".-", **axes: object
) -> None:
    """Draw a panel for each quantity, with a line (or points) for each name in it."""
    figure.set_size_inches(6.4, 2.4 + 2.4 * len(panels))
    column = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axis, (quantity, lines) in zip(column, panels.items(), strict=True):
        for name, values in lines.items():
            axis.plot(values, style, label=ascii(name)[1:-1])
        axis.locator_params(axis="x", integer=True)
        axis.set(ylabel=quantity, **axes)
        axis.legend()


def draw_maps(
    figure: Figure,
    rows: Sequence[Mapping[str, np.ndarray]],
    *,
    signed: bool = False,
    extent: Sequence[float] | None = None,
    **axes: object,
) -> None:
    """Draw rows of heat maps by title.

    The maps of a row have the same colours if their ranges overlap. ``signed``: white is 0, and the colours reach to
    the largest absolute value.
    """
    figure.set_size_inches(2 + 4.4 * len(rows[0]), 1.8 + 3 * len(rows))
    panels = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for maps, axes_of_row in zip(rows, panels, strict=True):
        # Range of the colours
        lows = [np.min(x) for x in maps.values()]
        highs = [np.max(x) for x in maps.values()]
        look: dict[str, object] = {}
        if signed:
            largest = max(-min(lows), max(highs))
            look = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
        elif max(lows) <= min(highs):
            look = {"vmin": min(lows), "vmax": max(highs)}

        for axis, (title, values) in zip(axes_of_row, maps.items(), strict=True):
            image = axis.imshow(values, aspect="auto", extent=extent, **look)
            figure.colorbar(image, ax=axis)
            if extent is None:
                axis.locator_params(integer=True)
            axis.set(title=ascii(title)[1:-1], **axes)
            if "xticklabels" in axes:
                axis.tick_params("x", rotation=90)
