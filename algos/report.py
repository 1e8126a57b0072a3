"""The page of a comparison: one table, one picture, a few samples; everything inside one HTML file."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from algos.compare import Run

PANELS = {
    "episode/return": "return of an episode",
    "policy/approx_kl": "approximate KL of an update, nats a step",
    "policy/clip_frac": "share of clipped ratios",
    "policy/entropy": "entropy, nats a step",
    "value/explained_variance": "explained variance of the value",
    "reference/kl": "KL to the reference, nats an episode",
}
"""The quantities drawn, under the names of the log."""
COLOURS = ("#1f6feb", "#bf4b00")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2024 }
h1, h2 { line-height: 1.2 } img { max-width: 100% } small { color: #59636e }
table { border-collapse: collapse; margin: 1rem 0; width: 100% }
td, th { border-bottom: 1px solid #d1d9e0; padding: .35rem .7rem; text-align: left; vertical-align: top }
"""


def summary(runs: Sequence[Run]) -> dict[str, float]:
    """Means over the seeds of what the evaluations and the training say."""
    last = [run.history[-1] for run in runs]
    result = {
        "before": _mean(run.before["mean_return"] for run in runs),
        "mean_return": _mean(run.after["mean_return"] for run in runs),
        "worst_seed": min(run.after["mean_return"] for run in runs),
        "steps": _mean(row["steps"] for row in last),
        "seconds": _mean(row["time/seconds"] for row in last),
        "steps_per_second": _mean(row["time/steps_per_second"] for row in last),
        "approx_kl": _mean(row["policy/approx_kl"] for run in runs for row in run.history),
        "clip_frac": _mean(row["policy/clip_frac"] for run in runs for row in run.history),
        "collect_share": _mean(_share(run, "time/collect") for run in runs),
        "update_share": _mean(_share(run, "time/update") for run in runs),
    }
    if "kl" in runs[0].after:
        result |= {"score": result["mean_return"], "kl": _mean(run.after["kl"] for run in runs)}
    return result


def table_rows(result: dict[str, dict[str, float]]) -> list[list[str]]:
    """The comparison's table, header first; every row a quantity, every column an environment."""
    names = {
        "before": "return before training",
        "mean_return": "return after training",
        "worst_seed": "return after training, worst seed",
        "steps": "steps",
        "seconds": "seconds of training",
        "steps_per_second": "steps a second",
        "approx_kl": "approximate KL of an update, nats a step",
        "clip_frac": "share of clipped ratios",
        "collect_share": "share of time collecting",
        "update_share": "share of time updating",
        "kl": "KL to the reference, nats a response",
    }
    rows = [["", *result]]
    for key, label in names.items():
        rows.append([label, *(_figure(column[key]) if key in column else "–" for column in result.values())])
    return rows


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def print_table(result: dict[str, dict[str, float]]) -> None:
    """Print the table to the terminal."""
    from rich.console import Console
    from rich.table import Table

    header, *rows = table_rows(result)
    table = Table(*header, title="One PPO, two worlds (means over the seeds)")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def write_report(run_dir: Path, runs: Sequence[Run], *, seconds: float) -> Path:
    """Write ``report.html`` and ``report.png``; returns the path of the page."""
    picture = _draw(runs)
    (run_dir / "report.png").write_bytes(picture)
    envs = list(dict.fromkeys(run.env for run in sorted(runs, key=lambda run: run.env)))
    result = {env: summary([run for run in runs if run.env == env]) for env in envs}
    page = run_dir / "report.html"
    page.write_text(_page(runs, result, base64.b64encode(picture).decode(), seconds), encoding="utf-8")
    return page


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _share(run: Run, name: str) -> float:
    return sum(row[name] for row in run.history) / run.history[-1]["time/seconds"]


def _draw(runs: Sequence[Run]) -> bytes:
    """A panel for each quantity and environment: the mean over the seeds, and the range of them shaded."""
    from matplotlib.figure import Figure

    envs = list(dict.fromkeys(run.env for run in sorted(runs, key=lambda run: run.env)))
    figure = Figure(figsize=(11, 2.1 * len(PANELS)), layout="constrained")
    axes = figure.subplots(len(PANELS), len(envs), squeeze=False)
    for column, env in enumerate(envs):
        for row, (name, label) in enumerate(PANELS.items()):
            _panel(axes[row][column], [run for run in runs if run.env == env], name, COLOURS[column % 2])
            axes[row][column].set_title(label, fontsize=9, loc="left")
        axes[0][column].set_title(f"{env}\n{PANELS['episode/return']}", fontsize=10, loc="left")
        axes[-1][column].set_xlabel("steps")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _panel(axis: Any, runs: Sequence[Run], name: str, colour: str) -> None:
    curves = [[(row["steps"], row[name]) for row in run.history if name in row] for run in runs]
    curves = [curve for curve in curves if curve]
    axis.spines[["top", "right"]].set_visible(False)
    if not curves:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "no reference policy", ha="center", va="center", color="#59636e", transform=axis.transAxes)
        return
    grid = np.linspace(max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves), 100)
    values = np.array([np.interp(grid, *np.array(curve).T) for curve in curves])
    axis.plot(grid, values.mean(0), color=colour)
    axis.fill_between(grid, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)


def _page(runs: Sequence[Run], result: dict[str, dict[str, float]], picture: str, seconds: float) -> str:
    policies = {run.env: f"{run.policy}, {run.parameters:,} parameters" for run in runs}
    header, *rows = table_rows(result)
    rows.insert(0, ["policy", *(policies[env] for env in result)])
    seeds = len({run.seed for run in runs})
    samples = next((run.samples for run in runs if run.samples), [])
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>One PPO, two worlds</title><style>{STYLE}</style>
<h1>One PPO, two worlds</h1>
<p>The same class, <code>algos.PPO</code>, trained both columns: it knows neither what a token is nor what a pole is.
Only the environment, the policy and the preset differ. Figures are means over {seeds} seeds; returns are of evaluation
episodes, sampled (text: prompts never trained on). Everything took {seconds:.0f} s.</p>
{_html_table(header, rows)}
<h2>While learning</h2>
<p><small>Lines are means over the seeds, bands their range. Once every episode earns the same, there is no variance
left for the value to explain, and the share that it explains means nothing.</small></p>
<img alt="Learning curves of both environments" src="data:image/png;base64,{picture}">
<h2>What the language model writes</h2>
{_html_table(["prompt", "before", "after"], samples)}
</html>
"""


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(header, "th") + "".join(line(row, "td") for row in rows) + "</table>"
