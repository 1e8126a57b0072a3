"""Report of runs: one HTML file of `algos.lab.comparison.page`, CSV files, and a table in the terminal."""

import csv
import html
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from algos.lab.comparison.episodes import read_episodes
from algos.lab.comparison.page import RETURN, bands, page_data, read_pictures, render
from algos.lab.comparison.paper import scores_by_algorithm, write_paper
from algos.lab.comparison.runs import differences, listed, read_runs
from algos.lab.comparison.summary import QUANTITIES, RunResult, by_case, summary
from algos.lab.comparison.words import in_words
from algos.lab.insight.finding import Finding
from algos.statistics.intervals import MIN_SEEDS, Estimate
from algos.statistics.pass_rates import PASS_RATE
from algos.storage.run_folder import check_new_file, replacing
from textenv.rendering import printable, text_of

MAX_FINDING_ROWS = 100
"""Maximum number of a finding's rows in a page; the CSV file has all of them."""
ROW_LABELS = {
    "first return": "return of the first tenth of the training",
    "last return": "return of the last tenth of the training",
    "return before": "return before training",
    "mean_return": "return after training",
    "normalised score": "normalised score",
    "normalised score, interquartile mean": "the same, interquartile mean",
    "area under the curve": "sample efficiency: area under the curve of the normalised score, up to the steps that all"
    " cases of the game have",
    "reached 0.9": "fraction of runs whose training score reached .9",
    "steps to 0.9": "steps until the score reached .9",
    "last kl": "KL to the reference policy after training, nats per episode",
    **{name: f"mean while training: {label}" for name, label in QUANTITIES.items() if name != "normalised score"},
    "steps": "steps",
    "processor seconds": "processor seconds of training",
    "seconds": "seconds of training",
    "steps_per_second": "steps per second",
    "time fraction: collect": "fraction of time collecting",
    "time fraction: penalty": "fraction of time on the KL penalty",
    "time fraction: update": "fraction of time updating",
    "trained parameters": "parameters that are trained",
    "parameters": "parameters, all",
}
"""Rows of the table."""
TERMINAL_LABELS = {
    "mean_return": "return",
    "normalised score": "normalised score",
    "steps to 0.9": "steps to .9",
    "update/kl": "KL of an update",
    "last kl": "KL to the reference",
    "steps_per_second": "steps per second",
    "processor seconds": "processor seconds",
    "trained parameters": "parameters trained",
    "parameters": "of all",
}
"""Columns of the table in the terminal; the page has all quantities."""
TERMINAL_LABELS_OF_TRAINING = {
    "last return": "return of the last tenth of the training",
    "last kl": "KL to the reference",
}
"""Columns for runs that were not evaluated after the training."""
RUN_COLUMNS = ("case", "seed", "folder", "status", "steps", "minutes", "date", "commit")
"""Columns of `listed`."""
MISSING = "–"
"""Cell of a quantity that a case does not have."""

Summaries = dict[str, dict[str, Estimate]]
"""`summary` of each case."""


def table_rows(summaries: Summaries) -> list[list[tuple[str, str]]]:
    """Return the comparison's table, no header: a row per quantity, a column per case, cells (text, small print)."""
    rows = []
    for name, label in _row_labels(summaries).items():
        cells = [_format_estimate(metrics.get(name)) for metrics in summaries.values()]
        if any(text != MISSING for text, _ in cells):
            rows.append([(label, ""), *cells])
    return rows


def _row_labels(summaries: Summaries) -> dict[str, str]:
    """Return `ROW_LABELS`, with the pass rates of the cases below their returns."""
    labels = {}
    for name, label in ROW_LABELS.items():
        labels[name] = label
        if name == "mean_return":
            for pass_rate in _pass_rates(summaries):
                label = pass_rate.replace("greedy", "greedy pass rate")
                labels[f"{pass_rate} before"] = f"{label} before training"
                labels[pass_rate] = f"{label} after training"
    return labels


def _pass_rates(summaries: Summaries) -> list[str]:
    """Return the names of the pass rates that a case has, in their order."""
    names = dict.fromkeys(name for metrics in summaries.values() for name in metrics)
    return [name for name in names if PASS_RATE.fullmatch(name)]


def _format_estimate(estimate: Estimate | None) -> tuple[str, str]:
    """Format a mean and, if the seeds differ, its limits (with few seeds, the value of each)."""
    if estimate is None:
        return MISSING, ""
    mean = _format_number(estimate.mean)
    if math.isclose(min(estimate.values), max(estimate.values), rel_tol=1e-9):
        return mean, ""
    if estimate.low is not None and estimate.high is not None:
        return mean, f"{_format_number(estimate.low)} to {_format_number(estimate.high)}"
    return mean, ", ".join(_format_number(value) for value in estimate.values)


def _format_number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _spread(counts: Iterable[int]) -> str:
    """Describe the small print below a mean, from the numbers of seeds of the cases."""
    few = [count < MIN_SEEDS for count in counts]
    single = f"each seed ({MIN_SEEDS} give 95 % confidence intervals)"
    intervals = "95 % bootstrap confidence intervals"
    if all(few):
        return single
    if any(few):
        return f"{intervals} or {single}"
    return intervals


def summaries_table(summaries: Summaries) -> str:
    """Return the main quantities as a table for the terminal, a row for each case.

    It is as wide as the terminal; if the output is no terminal but, for example, a file, as wide as its contents.
    """
    counts = [len(next(iter(metrics.values())).values) for metrics in summaries.values()]
    labels = TERMINAL_LABELS_OF_TRAINING
    when = "While training"
    if all("mean_return" in metrics for metrics in summaries.values()):
        labels = TERMINAL_LABELS
        when = "After training"
    tables = [_terminal_table(summaries, labels, title=f"{when}: means over the seeds, and {_spread(counts)}")]

    # Pass rates in a table of their own, so that both fit into a narrow terminal
    pass_rates = _pass_rates(summaries)
    if pass_rates:
        tables.append(
            _terminal_table(summaries, {name: name for name in pass_rates}, title="Pass rates after training")
        )
    return "".join(tables)


def _terminal_table(summaries: Summaries, labels: Mapping[str, str], *, title: str) -> str:
    """Return a table of those quantities that a case has, a row for each case."""
    from rich.table import Column, Table
    from rich.text import Text

    # Header; a narrow terminal cuts no name of a case
    quantities = [name for name in labels if any(name in metrics for metrics in summaries.values())]
    name_width = max(map(len, summaries))
    columns = [Column("", overflow="fold", min_width=min(28, name_width))]
    columns += [Column(labels[name], overflow="fold") for name in quantities]
    table = Table(*columns, title=title)

    for case, metrics in summaries.items():
        cells = []
        for name in quantities:
            text, small_print = _format_estimate(metrics.get(name))
            if small_print:
                text += f"\n[dim]{small_print}[/dim]"
            cells.append(text)
        table.add_row(Text(printable(case)), *cells)
    return text_of(table)


def write_report(run_dir: Path, runs: Sequence[RunResult]) -> Path:
    """Write page, CSV files and figures of a comparison; return the page's path.

    Figures of scores, and `write_paper`'s files, are left out if no environment has a scale of scores.
    """
    from algos.lab.comparison.figures import curve_rows, draw_curves, draw_scores, identity, save_figure

    # Tables
    rows = []
    for of_case in by_case(runs).values():
        for quantity, estimate in summary(of_case, study=runs).items():
            row = identity(of_case[0]) | {"seeds": len(of_case), "quantity": quantity} | estimate._asdict()
            row["values"] = " ".join(map(str, estimate.values))
            rows.append(row)
    _write_csv(run_dir / "summary.csv", rows)
    _write_csv(run_dir / "curves.csv", curve_rows(runs))

    # Figures
    if any(RETURN in row for run in runs for row in run.history):
        save_figure(draw_curves(runs), [run_dir / "curves.pdf", run_dir / "curves.svg"])
    scores = scores_by_algorithm(runs)
    if scores:
        write_paper(run_dir, scores)
        save_figure(draw_scores(scores), [run_dir / "paper.pdf", run_dir / "paper.svg"])

    return write_page(run_dir / "report.html", runs)


class Report(dict[str, Any]):
    """Results, with the path of their page under ``report``; printed, it is a table, and a notebook shows the page.

    Args:
        results: the results by name.
        summaries: `algos.lab.comparison.summary.summary` of each case, for the table.
    """

    def __init__(self, results: Mapping[str, Any], *, summaries: Summaries) -> None:
        super().__init__(results)
        self.summaries = summaries

    def __str__(self) -> str:
        return summaries_table(self.summaries).rstrip("\n")

    def _repr_html_(self) -> str:
        page = html.escape(Path(self["report"]).read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width:100%;height:44rem;border:0"></iframe>'


def report(*folders: str | Path, out: str | Path | None = None) -> Report:
    """Write one page about runs: curves, settings, prompts and answers with their tokens.

    Args:
        folders: of runs or comparisons, or folders above them.
        out: page to write; by default ``report.html`` in the folder, or here if there are several.

    Raises:
        FileNotFoundError: if a folder has no run with at least one iteration, or that of ``out`` does not exist.
        IsADirectoryError: if ``out`` is a folder.
        ValueError: if a file of a run is damaged.
    """
    if out:
        check_new_file("out", out)
    runs = read_runs(folders)
    if not out:
        folder = Path()
        if len(folders) == 1:
            folder = Path(folders[0])
        out = folder / "report.html"
    page = Path(out).resolve()
    write_page(page, runs)
    summaries = {case: summary(of_case, study=runs) for case, of_case in by_case(runs).items()}
    return Report({"report": str(page), "runs": [run.folder for run in runs]}, summaries=summaries)


def write_page(path: Path, runs: Sequence[RunResult]) -> Path:
    """Write the page of `report_page` and return its path; a reader never sees half a page."""
    with replacing(path) as new:
        new.write_text(report_page(runs), encoding="utf-8")
    return path


def report_page(runs: Sequence[RunResult], *, live: float = 0) -> str:
    """Return the page of these runs as HTML; ``live``: seconds after which it is loaded again, 0 for never."""
    cases = by_case(runs)
    summaries = {name: summary(of_case, study=runs) for name, of_case in cases.items()}
    policies = [("policy", ""), *((_policy_label(of_case[0]), "") for of_case in cases.values())]
    texts = {name: _plain_cells(of_case[0].samples) for name, of_case in cases.items() if of_case[0].samples}

    # Settings, and the list of runs with a count of each status
    settings_header, settings = differences(runs)
    run_rows = listed(runs)
    status_column = RUN_COLUMNS.index("status")
    statuses = Counter(row[status_column] for row in run_rows if row[status_column])

    return render(
        "report.html",
        title="Training report",
        data=page_data(runs, live=live),
        words=in_words(runs, summaries),
        results={
            "header": ["", *summaries],
            "rows": [policies, *table_rows(summaries)],
            "note": _results_note(runs, summaries),
        },
        states=", ".join(f"{count} {status}" for status, count in statuses.items()),
        settings={"header": settings_header, "rows": _plain_cells(settings)},
        bands=bands(runs),
        runs={
            "header": RUN_COLUMNS,
            "rows": _plain_cells(run_rows),
        },
        before_after=texts,
        word_episodes=read_episodes(runs),
        pictures=read_pictures(runs),
        made="A + after a commit: the files differed from it.",
    )


def _results_note(runs: Sequence[RunResult], summaries: Summaries) -> str:
    """Return what the means, the small print and the normalised scores of the results' table are."""
    counts = [len(of_case) for of_case in by_case(runs).values()]
    note = "One seed of each case."
    if max(counts) > 1:
        note = f"Means over the seeds, below them {_spread(counts)}."
    if any("normalised score" in metrics for metrics in summaries.values()):
        note += (
            " A normalised score of 0 is the policy before training, in each game the lowest of its cases; 1 is the"
            " return at which the game counts as solved (its reward_threshold)"
        )
        without_threshold = sorted({run.game_name for run in runs if run.before and run.best is None})
        if without_threshold:
            note += f"; for {', '.join(without_threshold)}, which has none, the best evaluation of these runs"
        note += "."
    described = list(dict.fromkeys(run.case for run in runs if "tokens" in run.history[-1]))
    if described:
        note += (
            f" In {', '.join(described)}, a step is a turn: one step of the game, of one or several tokens, over which"
            " entropies and KLs are added up. Clip fractions are of tokens."
        )
    return note


def _plain_cells(rows: Iterable[Sequence[object]]) -> list[list[tuple[str, str]]]:
    """Cells of a table, without small print."""
    return [[(str(x), "") for x in row] for row in rows]


def _policy_label(run: RunResult) -> str:
    if not run.parameters:
        return run.policy
    if run.trained_parameters not in (None, run.parameters):
        return f"{run.policy}, {run.trained_parameters:,} of {run.parameters:,} parameters trained"
    return f"{run.policy}, {run.parameters:,} parameters"


def _write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)


def write_findings(folder: Path, title: str, findings: Sequence[Finding]) -> Path:
    """Replace a folder by the files of findings and a page of their first rows; return the page's path.

    The page shows `MAX_FINDING_ROWS` rows of each finding.
    """
    sections = []
    with replacing(folder) as draft:
        draft.mkdir()
        for finding in findings:
            finding.write(draft)

            # Its section of the page
            picture = None
            if finding.draw is not None:
                picture = f"{finding.name}.png"
            shown = finding.rows[:MAX_FINDING_ROWS]
            section = {
                "title": finding.title,
                "file": f"{finding.name}.csv",
                "picture": picture,
                "header": finding.columns,
                "rows": [[(_format_cell(cell), "") for cell in row] for row in shown],
                "count": len(finding.rows),
            }
            sections.append(section)
        page = render("findings.html", title=title, findings=sections)
        (draft / "interpret.html").write_text(page, encoding="utf-8")
    return folder / "interpret.html"


def _format_cell(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return str(cell)
