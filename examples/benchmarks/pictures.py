"""What the figures of the studies share: their look, and the numbers of a table of docs/results/data."""

import json
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

NUMBER = re.compile(r"[-+]?\d*\.?\d+")
TIMES = re.compile(r" × \d+\)")
"""As in ``500 (500 × 5)``: five seeds with the same figure."""
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999", "#8c564b", "#332288")
"""Okabe and Ito's, which colour-blind people tell apart, and three more."""


def new_figure(name, columns=1, rows=1, size=(7, 4), **options):
    """Return a figure and its axes. Equal data give equal files, and the background is white on dark pages too."""
    matplotlib.rcParams |= {
        "svg.hashsalt": name,
        "font.size": 11,
        "savefig.facecolor": "white",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
    }
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def save(figure, path):
    """Write a figure without the date, so that it changes only with its data."""
    figure.savefig(path, metadata={"Date": None})


def read_table(path):
    """Return the header of a table of docs/results/data, and by the first cell of each row the others' numbers.

    A cell such as ``0.90 [0.88, 0.91]`` becomes a list of its numbers; one without a number an empty list.
    """
    data = json.loads(Path(path).read_text())
    rows = {}
    for name, *cells in data["rows"]:
        plain = [THOUSANDS.sub("", TIMES.sub("", cell).replace("−", "-")) for cell in cells]
        rows[name] = [[float(number) for number in NUMBER.findall(cell)] for cell in plain]
    return data["columns"][1:], rows
