"""Report of runs: one HTML file of `algos.lab.comparison.page`, CSV files, and a table in the terminal."""

import csv
import html
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from algos.lab.comparison.page import RETURN, bands, page_data, read_pictures, render
from algos.lab.comparison.paper import scores_by_algorithm, write_paper
from algos.lab.comparison.runs import differences, listed, read_runs
from algos.lab.comparison.summary import MIN_SEEDS, QUANTITIES, Figure, RunResult, by_case, summary
from algos.lab.comparison.words import in_words
from algos.lab.insight.finding import Finding
from algos.storage.run_folder import replacing
from textenv.rendering import printable, text_of

SHOWN = 100
"""Maximum number of a finding's rows in a page; the CSV file has all of them."""
ROW_LABELS = {
    "first return": "return of the first tenth of the training",
    "last return": "return of the last tenth of the training",
    "return before": "return before training",
    "mean_return": "return after training",
    "normalised score": "normalised score",
    "normalised score, interquartile mean": "the same, interquartile mean",
    "area under the curve": "sample efficiency: area under the curve of the normalised score",
    "reached 0.9": "fraction of runs whose training score reached .9",
    "steps to 0.9": "steps until the score reached .9",
    "last kl": "KL to the reference policy after training, nats per episode",
    **{name: f"mean while training: {label}" for name, label in QUANTITIES.items() if name != "normalised score"},
    "steps": "steps",
    "seconds": "seconds of training",
    "steps_per_second": "steps per second",
    "time fraction: collect": "fraction of time collecting",
    "time fraction: penalty": "fraction of time on the KL penalty",
    "time fraction: update": "fraction of time updating",
}
"""Rows of the table."""
MISSING = "–"
"""Cell of a quantity that a case does not have."""

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


def _spread(counts: Iterable[int]) -> str:
    """Description of the small print below a mean, from the numbers of seeds of the cases."""
    few = [count < MIN_SEEDS for count in counts]
    single, whole = f"each seed ({MIN_SEEDS} give 95 % confidence intervals)", "95 % bootstrap confidence intervals"
    return single if all(few) else f"{whole} or {single}" if any(few) else whole


CHIEF = {
    "mean_return": "return", "normalised score": "normalised score", "steps to 0.9": "steps to .9",
    "update/kl": "KL of an update", "last kl": "KL to the reference", "steps_per_second": "steps per second",
}  # fmt: skip
"""Quantities of the table in the terminal; the page has all of them."""
OF_TRAINING = {"last return": "return of the last tenth of the training", "last kl": "KL to the reference"}
"""The same of runs that were not evaluated afterwards."""


def summaries_table(summaries: Summaries) -> str:
    """Return the main quantities as a table for the terminal, a row for each case.

    It is as wide as the terminal; if the output is none, such as a file, as wide as its contents.
    """
    from rich.table import Column, Table
    from rich.text import Text

    evaluated = all("mean_return" in metrics for metrics in summaries.values())
    chief = CHIEF if evaluated else OF_TRAINING
    chief = {name: label for name, label in chief.items() if any(name in metrics for metrics in summaries.values())}
    counts = [len(next(iter(metrics.values())).values) for metrics in summaries.values()]
    when = "After training" if evaluated else "While training"
    title = f"{when}: means over the seeds, and {_spread(counts)}"
    names = Column("", overflow="fold", min_width=min(28, max(map(len, summaries))))  # a narrow terminal cuts no name
    columns = [names, *(Column(name, overflow="fold") for name in chief.values())]
    table = Table(*columns, title=title)
    for case, metrics in summaries.items():
        cells = []
        for name in chief:
            text, small = _format_figure(metrics.get(name))
            cells.append(f"{text}\n[dim]{small}[/dim]" if small else text)
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
        for quantity, figure in summary(of_case, study=runs).items():
            row = identity(of_case[0]) | {"seeds": len(of_case), "quantity": quantity} | figure._asdict()
            rows.append(row | {"values": " ".join(map(str, figure.values))})
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
        FileNotFoundError: if a folder has no run with at least one iteration.
        ValueError: if a file of a run is damaged.
    """
    runs = read_runs(folders)
    page = Path(out or Path(folders[0] if len(folders) == 1 else ".") / "report.html").resolve()
    write_page(page, runs)
    summaries = {case: summary(of_case, study=runs) for case, of_case in by_case(runs).items()}
    return Report({"report": str(page), "runs": [run.folder for run in runs]}, summaries=summaries)


def write_page(path: Path, runs: Sequence[RunResult]) -> Path:
    """Write the page of `report_page`; a reader never sees a part of it."""
    with replacing(path) as new:
        new.write_text(report_page(runs), encoding="utf-8")
    return path


def report_page(runs: Sequence[RunResult], *, live: float = 0) -> str:
    """Page of these runs; ``live``: seconds after which it is loaded again, 0 for never."""
    cases = by_case(runs)
    summaries = {name: summary(own, study=runs) for name, own in cases.items()}
    policies = [("policy", ""), *((_made(own[0]), "") for own in cases.values())]
    unknown = sorted({run.env for run in runs if run.before and run.best is None})
    aside = f"; for {', '.join(unknown)}, which has none, the best evaluation of these runs" if unknown else ""
    counts = [len(own) for own in cases.values()]
    note = f"Means over the seeds, below them {_spread(counts)}." if max(counts) > 1 else "One seed of each case."
    if any("normalised score" in each for each in summaries.values()):
        note += (
            " A normalised score of 0 is the policy before training; 1 is the return at which the environment counts"
        )
        note += f" as solved (its reward_threshold){aside}."
    states = Counter(row[3] for row in listed(runs) if row[3])
    header, differ = differences(runs)
    runs_header = ["case", "seed", "folder", "status", "steps", "minutes", "date", "commit"]
    return render(
        "report.html", title="Training report", data=page_data(runs, live=live), words=in_words(runs, summaries),
        results={"header": ["", *summaries], "rows": [policies, *table_rows(summaries)], "note": note},
        states=", ".join(f"{count} {state}" for state, count in states.items()),
        settings={"header": header, "rows": _small(differ)}, bands=bands(runs),
        runs={"header": runs_header, "rows": _small(listed(runs))},
        before_after={name: _small(own[0].samples) for name, own in cases.items() if own[0].samples},
        pictures=read_pictures(runs), made="A + after a commit: the files differed from it.",
    )  # fmt: skip


def _small(rows: Iterable[Sequence[Any]]) -> list[list[tuple[str, str]]]:
    """Cells of a table, without small print."""
    return [[(str(x), "") for x in row] for row in rows]


def _made(run: RunResult) -> str:
    return f"{run.policy}, {run.parameters:,} parameters" if run.parameters else run.policy


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def write_findings(folder: Path, title: str, findings: Sequence[Finding]) -> Path:
    """Replace a folder by the files of findings and a page of their first `SHOWN` rows; return the page's path."""
    parts = []
    with replacing(folder) as draft:
        draft.mkdir()
        for x in findings:
            x.write(draft)
            rows = [[(f"{cell:.4g}" if isinstance(cell, float) else str(cell), "") for cell in row] for row in x.rows]
            names = {"title": x.title, "file": f"{x.name}.csv", "picture": x.draw and f"{x.name}.png"}
            parts.append(names | {"header": x.columns, "rows": rows[:SHOWN], "count": len(rows)})
        page = render("findings.html", title=title, findings=parts)
        (draft / "interpret.html").write_text(page, encoding="utf-8")
    return folder / "interpret.html"
