"""A report of `textenv.checks.reward_checker` as tables for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from textenv.checks.reward_checker import RewardReport
from textenv.rendering import printable

SHOWN = 40
"""Characters of an answer in the table."""


def print_report(report: RewardReport, console: Console | None = None) -> None:
    """Print the checks, what cheating answers earn beside ordinary ones, and the time a row.

    Args:
        report: of `run_reward_checks`.
        console: where to; standard output by default.
    """
    console = console or Console()
    checks = Table("check", "result", title=Text(f"reward {printable(report.name)}"), title_justify="left")
    for name, problem, _ in report.results:
        checks.add_row(name, _cell(problem, style="red") if problem else Text("holds", style="green"))
    console.print(checks)
    if report.probes:
        console.print(_probe_table(report))
    console.print(Text(f"{report.seconds_per_row * 1e3:.3g} ms a row"))


def _probe_table(report: RewardReport) -> Table:
    title = "What answers that nobody wants would earn"
    table = Table("answer", "beginning with", "mean", "highest", "note", title=title, title_justify="left")
    table.add_row("ordinary answers", "", _number(report.mean), _number(report.highest), "", end_section=True)
    for probe in report.probes:
        beginning = _cell(repr(probe.answer[:SHOWN]) if probe.answer else "")
        note = _cell(probe.note, style="yellow")
        table.add_row(probe.name, beginning, _number(probe.mean), _number(probe.highest), note)
    return table


def _number(score: float | None) -> str:
    return "-" if score is None else f"{score:.4g}"


def _cell(text: str, style: str = "") -> Text:
    """A stranger's text, which neither commands the terminal nor is read as rich's markup."""
    return Text(printable(text), style=style)
