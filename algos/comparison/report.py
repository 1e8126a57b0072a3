"""Report of a comparison: a table, a figure and a few samples in one HTML file; and CSV files."""

import base64
import csv
import html
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from algos.comparison.paper import write_paper
from algos.comparison.summary import MIN_SEEDS, QUANTITIES, Figure, RunResult, by_case, curves, limits, summary
from algos.insight.finding import Finding
from algos.training.run_folder import replacing
from textenv.rendering import printable

SHOWN = 100
"""Maximum number of a finding's rows in a page; the CSV file has all of them."""
COLOURS = ("#1f6feb", "#bf4b00", "#2a7d3f", "#8250df", "#b3261e", "#00707a", "#8a6100", "#57606a")
"""Colours of the cases, in their order; beyond the eighth, cases differ by line style."""
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c2024 }
h1, h2 { line-height: 1.2 } img { max-width: 100% } small { color: #59636e } .wide { overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0; width: 100% }
td, th { border-bottom: 1px solid #d1d9e0; padding: .35rem .7rem; text-align: left; vertical-align: top }
td { overflow-wrap: anywhere }
td small { white-space: nowrap }
"""
ROW_LABELS = {
    "return before": "return before training",
    "mean_return": "return after training",
    "normalised score": "normalised score: 0 untrained, 1 solved",
    "normalised score, interquartile mean": "the same, interquartile mean",
    "area under the curve": "sample efficiency: mean normalised score while training",
    "reached 0.9": "share of runs whose training score reached .9",
    "steps to 0.9": "steps until the score reached .9",
    **{name: label for name, label in QUANTITIES.items() if name != "normalised score"},
    "steps": "steps",
    "seconds": "seconds of training",
    "steps_per_second": "steps a second",
    "share of time: collect": "share of time collecting",
    "share of time: penalty": "share of time on the KL penalty",
    "share of time: update": "share of time updating",
}
"""Rows of the table."""
MISSING = "–"
"""Cell of a quantity that a case does not have."""

Cases = Mapping[str, Sequence[RunResult]]
"""Runs of each case."""
Summaries = dict[str, dict[str, Figure]]
"""`summary` of each case."""


def table_rows(summaries: Summaries) -> list[list[tuple[str, str]]]:
    """Return the comparison's table, no header: a row per quantity, a column per case, cells (text, small print)."""
    rows = [
        [(label, ""), *(_format_figure(metrics.get(name)) for metrics in summaries.values())]
        for name, label in ROW_LABELS.items()
    ]
    return [row for row in rows if any(text != MISSING for text, _ in row[1:])]


def _format_figure(figure: Figure | None) -> tuple[str, str]:
    """Format a mean and, if the seeds differ, its limits (with few seeds, the value of each)."""
    if figure is None:
        return MISSING, ""
    mean, *values = map(_format_number, (figure.mean, *figure.values))
    if math.isclose(min(figure.values), max(figure.values), rel_tol=1e-9):
        return mean, ""
    ends = [_format_number(x) for x in (figure.low, figure.high) if x is not None]
    return mean, " to ".join(ends) or ", ".join(values)


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _spread(seeds: int) -> str:
    """Description of the small print below a mean."""
    return "95 % limits by the bootstrap" if seeds >= MIN_SEEDS else f"each seed ({MIN_SEEDS} give 95 % limits)"


def print_summaries(summaries: Summaries) -> None:
    """Print the main quantities to the terminal, one line per case; the page has all of them."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    chief = {
        "mean_return": "return", "normalised score": "normalised score", "steps to 0.9": "steps to .9",
        "update/kl": "KL of an update", "reference/kl": "KL to the reference", "steps_per_second": "steps a second",
    }  # fmt: skip
    seeds = max(len(metrics["mean_return"].values) for metrics in summaries.values())
    columns = [Column(name, overflow="fold") for name in ("", *chief.values())]  # a narrow terminal cuts no name
    table = Table(*columns, title=f"After training: means over the seeds, and {_spread(seeds)}")
    for case, metrics in summaries.items():
        cells = [_format_figure(metrics.get(name)) for name in chief]
        shown = (f"{text}\n[dim]{small}[/dim]" if small else text for text, small in cells)
        table.add_row(Text(printable(case)), *shown)
    Console().print(table)


def write_report(run_dir: Path, runs: Sequence[RunResult], *, seconds: float) -> Path:
    """Write page, picture, ``curves.csv``, ``summary.csv`` and `write_paper`'s files; return the page's path."""
    cases = by_case(runs)
    summaries = {name: summary(own, study=runs) for name, own in cases.items()}
    _plot_curves(cases, runs, run_dir / "report.png")
    rows = [
        _identity(own[0], seeds=len(own), quantity=quantity, **figure._asdict())
        | {"values": " ".join(map(str, figure.values))}
        for own, metrics in zip(cases.values(), summaries.values(), strict=True)
        for quantity, figure in metrics.items()
    ]
    _write_csv(run_dir / "summary.csv", rows)
    _write_csv(run_dir / "curves.csv", [_identity(run, seed=run.seed) | row for run in runs for row in run.history])
    write_paper(run_dir, runs)
    page, picture = run_dir / "report.html", base64.b64encode((run_dir / "report.png").read_bytes()).decode()
    page.write_text(_page(cases, summaries, picture, seconds), encoding="utf-8")
    return page


def _identity(run: RunResult, **others: Any) -> dict[str, Any]:
    return {"environment": run.env, "algorithm": run.algorithm} | others


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def _plot_curves(cases: Cases, study: Sequence[RunResult], path: Path) -> None:
    """Plot one panel per quantity over the fraction of the budget; per case the mean, with limits or every seed."""
    from matplotlib.figure import Figure as Picture
    from matplotlib.lines import Line2D

    looks: Any = list(itertools.islice(itertools.product(("-", "--"), COLOURS), len(cases)))
    logged = {name for run in study for row in run.history for name in row}
    plotted = {x: label for x, label in QUANTITIES.items() if x in logged or x == "normalised score"}
    picture = Picture(figsize=(11, 0.5 + 1.5 * len(plotted)), layout="constrained")
    panels = picture.subplots(-(-len(plotted) // 2), 2, squeeze=False)
    panels[-1, 1].set_visible(len(plotted) % 2 == 0)
    for axis, (name, label) in zip(panels.flat, plotted.items(), strict=False):
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(label, fontsize=9, loc="left")
        for runs, (style, colour) in zip(cases.values(), looks, strict=True):
            found = curves(runs, name, study=study)
            if found is None:
                continue
            grid = np.linspace(0, 1, found.shape[1])
            axis.plot(grid, found.mean(0), style, color=colour)
            if band := limits(found):
                axis.fill_between(grid, *band, color=colour, alpha=0.2, linewidth=0)
            elif len(found) > 1:
                axis.plot(grid, found.T, style, color=colour, alpha=0.4, linewidth=0.7)
    for axis in panels[-1]:
        axis.set_xlabel("share of the budget of steps")
    handles = [Line2D([], [], color=colour, linestyle=style) for style, colour in looks]
    names = [printable(name) for name in cases]
    legend = picture.legend(handles, names, loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)
    picture.savefig(path, dpi=110)


def _page(cases: Cases, summaries: Summaries, picture: str, seconds: float) -> str:
    every = [runs[0] for runs in cases.values()]
    policies = [("policy", ""), *((f"{run.policy}, {run.parameters:,} parameters", "") for run in every)]
    seeds = len(next(iter(cases.values())))
    bands = "bands 95 % limits" if seeds >= MIN_SEEDS else "thin lines single seeds"
    unknown = sorted({run.env for run in every if run.best is None})
    aside = f" {', '.join(unknown)}: no threshold, so 1 is the best evaluation of these runs." if unknown else ""
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Comparison</title><style>{STYLE}</style>
<h1>One kit, {len(every)} {"case" if len(every) == 1 else "cases"}</h1>
<p>Every column is an environment and an algorithm, trained by the same classes: only environment, policy and preset
differ. Means over {seeds} {"seed" if seeds == 1 else "seeds"}, below them {_spread(seeds)}. Returns
are from evaluation episodes with sampled actions (text: held-out prompts). The total time was {seconds:.0f} s.</p>
<div class="wide">{_html_table(["", *summaries], [policies, *table_rows(summaries)])}</div>
<p><small>A normalised score of 0 is the policy before training; 1 is the return at which the environment counts as
solved, its <code>reward_threshold</code>, so scores beyond 1 are possible.{_escape(aside)} There is no score
if the return at 1 is not above the return at 0. Other quantities are means over the iterations. KL of an update:
KL(old‖new) over all its gradient steps, on the rollout that it used.</small></p>
<h2>While learning</h2>
<p><small>Lines are means over the seeds, {bands}. Each case has its own budget, so the horizontal axis is the fraction
of it that is spent (<code>curves.csv</code> has the steps). A panel leaves out the cases without its quantity. When
all episodes have the same return, there is no variance to explain, and the explained variance means
nothing.</small></p>
<img alt="Learning curves of all cases" src="data:image/png;base64,{picture}">
{_samples_html(cases)}
</html>
"""


def _samples_html(cases: Cases) -> str:
    """Samples of the language model before and after training, from the first run of each text case."""
    parts = []
    for name, (first, *_) in cases.items():
        if first.samples:
            table = _html_table(["prompt", "before", "after"], [[(x, "") for x in sample] for sample in first.samples])
            parts.append(f"<h2>Samples of the language model: {_escape(name)}</h2>\n{table}")
    return "\n".join(parts)


def write_findings(folder: Path, title: str, findings: Sequence[Finding]) -> Path:
    """Replace a folder by the files of findings and a page of their first `SHOWN` rows; return the page's path."""
    parts = [f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><style>{STYLE}</style><h1>{_escape(title)}</h1>']
    with replacing(folder) as draft:
        draft.mkdir()
        for x in findings:
            x.write(draft)
            rows = [[(f"{cell:.4g}" if isinstance(cell, float) else str(cell), "") for cell in row] for row in x.rows]
            picture = "" if x.draw is None else f'<img alt="" src="{x.name}.png">'
            table = _html_table(x.columns, rows[:SHOWN])
            parts.append(f'<h2>{_escape(x.title)}</h2>{picture}<div class="wide">{table}</div>')
            parts.append(f'<p><a href="{x.name}.csv">All rows ({len(rows)})</a></p>')
        (draft / "interpret.html").write_text("\n".join(parts) + "\n", encoding="utf-8")
    return folder / "interpret.html"


def _html_table(header: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]]) -> str:
    def line(cells: Sequence[tuple[str, str]], tag: str) -> str:
        parts = [(_escape(text), f"<br><small>{_escape(small)}</small>" if small else "") for text, small in cells]
        return "<tr>" + "".join(f"<{tag}>{text}{small}</{tag}>" for text, small in parts) + "</tr>"

    lines = [line([(name, "") for name in header], "th"), *(line(row, "td") for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _escape(text: str) -> str:
    """Escape untrusted text, so that it contains no markup and does not change the direction of text around it."""
    return html.escape(printable(text))
