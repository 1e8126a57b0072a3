"""How seconds and memory of a PPO iteration grow: batch, response, vocabulary, environments, and with the iterations.

Each point is a process of its own on one CPU and one thread, and seconds are that processor's. A line is fitted to the
points of a curve, each weighted by its own size; what counts is the greatest share by which a point departs from it.
"""

import io
import statistics
import sys

import numpy as np
from alternation import HERE, NoFigureError, empty_row, measure, row

CURVES = {
    "batch": ("text", [8, 16, 32, 64, 128, 256]),
    "response": ("text", [16, 32, 64, 128, 256, 512]),
    "vocabulary": ("text", [260, 2048, 8192, 32768, 150_000]),
    "environments": ("control", [1, 4, 16, 64, 256, 1024, 4096]),
}
"""What varies: the kind of environment and the values. The rest is batch 32, response 48, vocabulary 260."""
FITTED = {"response": 128}
"""Values up to which the line is fitted; beyond it attention's own square shows."""
LIMITS = {"seconds": ("s", "seconds", 0.15), "memory": ("MB", "above_mb", 0.10)}
"""Unit, figure and the share by which it may depart from a line."""
ITERATIONS = 60


def growth(*, seeds, chosen):
    """Rows of the table: every point of every curve, then by how much the curve departs from a line."""
    rows = []
    for curve, (kind, values) in CURVES.items():
        if chosen(curve):
            rows += _curve(curve, kind, values, seeds)
    for kind in ("text", "control"):
        if chosen(f"iterations {kind}"):
            rows += _iterations(f"iterations {kind}", kind)
    return rows


def departure(x, y, *, upto=np.inf):
    """The line through points that makes relative errors small, and the greatest of them.

    Args:
        x: values, [n].
        y: positive figures, [n].
        upto: points beyond are not fitted.

    Returns:
        The line at every x, [n], and max abs(y / line - 1) over the points fitted.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    fitted = x <= upto
    line = np.polyval(np.polyfit(x[fitted], y[fitted], 1, w=1 / y[fitted]), x)
    return line, float(np.abs(y / line - 1)[fitted].max())


def _curve(curve, kind, values, seeds):
    points = []
    try:
        for value in values:
            points += _point(kind, f"--{curve}", value, "--iterations", seeds)
            print(f"{curve} {value}: {points[-1]['seconds']:.4g} s, {points[-1]['above_mb']} MB", flush=True)
    except NoFigureError as error:
        return [empty_row("growth", curve, unit="s", peer_name="a line", note=str(error))]
    rows = []
    for what, (unit, figure, limit) in LIMITS.items():
        figures = [point[figure] for point in points]
        line, share = departure(values, figures, upto=FITTED.get(curve, np.inf))
        for value, y, fit in zip(values, figures, line.tolist(), strict=True):
            rows.append(row("growth", f"{curve} {value} {what}", unit=unit, peer_name="a line", ours=[y], peer=[fit]))
        range_ = f"{values[0]} to {FITTED.get(curve, values[-1])}"
        rows.append(
            row("growth", f"{curve} {what} off a line", unit="share", peer_name="limit", ours=[share], peer=[limit],
                note=range_)
            | {"values": {"curve": curve, "what": f"{what}, {unit}", "x": values, "y": figures, "line": line.tolist()}}
        )  # fmt: skip
    return rows


def _iterations(case, kind):
    """The last third of many iterations beside the first: nothing may grow."""
    try:
        (point,) = _point(kind, "--batch", 8, "--iterations", ITERATIONS)
    except NoFigureError as error:
        return [empty_row("growth", case, unit="s", peer_name="first third", note=str(error))]
    third = ITERATIONS // 3
    rows = []
    for what, unit, figures in (("seconds a step", "µs", point["per_step"]), ("memory", "MB", point["resident_mb"])):
        scale = 1e6 if unit == "µs" else 1.0
        first, last = (statistics.median(part) * scale for part in (figures[:third], figures[-third:]))
        note = f"last third of {ITERATIONS}"
        name = f"{case} {what}"
        rows.append(row("growth", name, unit=unit, peer_name="first third", ours=[last], peer=[first], note=note))
    return rows


def _point(kind, *arguments):
    return measure(sys.executable, HERE / "growth_point.py", kind, *arguments)


def draw(rows):
    """A PNG with a panel for each curve and figure: the points, and the line through them."""
    from matplotlib.figure import Figure

    curves = [row["values"] for row in rows if "line" in row.get("values", {})]
    picture = Figure(figsize=(11, 2.8 * max(1, (len(curves) + 1) // 2)), layout="constrained")
    panels = picture.subplots(max(1, (len(curves) + 1) // 2), 2, squeeze=False)
    for axis, curve in zip(panels.flat, curves, strict=False):
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(f"{curve['what']} by {curve['curve']}", fontsize=9, loc="left")
        axis.loglog(curve["x"], curve["line"], color="#57606a", linewidth=1, label="a line")
        axis.loglog(curve["x"], curve["y"], "o", color="#1f6feb", label="measured")
        axis.set_xticks(curve["x"], [f"{x:,}" for x in curve["x"]], fontsize=8)
        axis.set_yticks(curve["y"], [f"{y:.3g}" for y in curve["y"]], fontsize=8)
        axis.minorticks_off()
    for axis in panels.flat[len(curves) :]:
        axis.set_axis_off()
    panels.flat[0].legend(frameon=False, fontsize=8)
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
