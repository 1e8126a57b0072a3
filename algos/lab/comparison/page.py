"""Page of a report: one HTML file from a template, with curves, settings, and prompts and answers; it loads nothing.

Jinja2 escapes whatever a template shows; texts in the data become text nodes. The page's policy allows its own script
alone, so not even markup that slipped through could run one.
"""

from __future__ import annotations

import base64
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from algos.lab.comparison.summary import (
    MIN_SEEDS,
    QUANTITIES,
    RunResult,
    by_case,
    limits,
    normalise,
    on_grid,
    steps_grid,
)
from algos.storage import run_reader
from algos.training.loggers import SAMPLES, SHADED
from textenv.rendering import printable

TEMPLATES = Path(__file__).with_name("templates")
MOST_TEXT, MOST_PICTURES = 2_500_000, 1_000_000
"""Maximum characters of prompts and answers, and bytes of pictures, in a page: both together are below 5 MB."""
RETURN, KL, LENGTH = "episode/return", "reference/kl", "episode/length"
OF_ENV = {
    RETURN: "return", "eval/mean_return": "return of the evaluation", LENGTH: "episode length, steps or tokens",
}  # fmt: skip
"""Quantities with a panel for each environment, because their scales differ."""
OF_TEXT = {
    "text/distinct_2": "distinct-2: fraction of distinct 2-grams", "text/repeated_4": "fraction of repeated 4-grams",
}  # fmt: skip
OF_UPDATE = {"policy/approx_kl": "approx_kl: KL from the behaviour policy while updating", "value/loss": "value loss"}
"""Quantities of a training that only curves show."""
NO_PART = ("reward/failed", "reward/left_out", "reward/loss")
Panel = dict[str, Any]


def render(template: str, **values: Any) -> str:
    """Fill in a template of this folder; every text is escaped, and control characters are spelt out."""
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    own = {name: _environment().filters["safe"](text) for name, text in {
        "script": script, "script_hash": f"sha256-{digest}", "style": (TEMPLATES / "report.css").read_text(),
    }.items()}  # fmt: skip
    return str(_environment().get_template(template).render(**own, **values))


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    shown = lambda x: printable(x) if type(x) is str else x  # noqa: E731  (not of Markup, which is ours)
    loader = FileSystemLoader(TEMPLATES)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, finalize=shown, trim_blocks=True)


def page_data(runs: Sequence[RunResult], *, live: float = 0) -> dict[str, Any]:
    """Everything that the page draws: curves of the cases, and samples; ``live``: seconds between refreshes."""
    cases, (samples, left_out) = by_case(runs), read_samples(runs)
    budgets = [max(run.history[-1]["steps"] for run in own) for own in cases.values()]
    return samples_data(samples, SHADED) | {
        "note": left_out,
        "cases": [printable(name) for name in cases],
        "panels": [panel for panel in _panels(cases, runs) if panel["lines"]],
        "axis": "steps" if live or max(budgets) < 2 * min(budgets) else "fraction",
        "live": live,
    }


def samples_data(samples: Sequence[dict[str, Any]], shades: Iterable[str]) -> dict[str, Any]:
    """The part of the data that the table of prompts and answers draws; ``shades``: columns of ``tokens``."""
    known = [name for name in shades if any(name in (row["tokens"] or ()) for row in samples)]
    return {"samples": [_spelt_out(row) for row in samples], "shades": known, "cases": [], "live": 0, "note": ""}


def _panels(cases: Mapping[str, Sequence[RunResult]], study: Sequence[RunResult]) -> Iterable[Panel]:
    """Panels in the page's order: returns by environment, frontiers, then everything that several cases share."""
    logged = {name for run in study for row in run.history for name in row}
    envs = dict.fromkeys(run.env for run in study)
    named = list(enumerate(cases.values()))
    yield _panel(QUANTITIES["normalised score"], [_line(i, own, "normalised score", study) for i, own in named])
    for name, label in OF_ENV.items():
        for env in envs if name in logged else ():
            yield _panel(f"{label}: {env}", [_line(i, own, name, study) for i, own in named if own[0].env == env])
    for env in envs if KL in logged else ():
        lines = [_frontier(i, own) for i, own in named if own[0].env == env]
        title = f"reward–KL frontier: {env} (return over KL, from the small to the large dot)"
        yield _panel(title, lines, over="KL to the reference, nats per answer")
    for case, own in cases.items():
        logged_here = sorted({name for run in own for name in run.history[-1]} - {*NO_PART})
        parts = [name for name in logged_here if name.startswith("reward/") and name.count("/") == 1]
        if len(parts) > 1:
            lines = [_line(i, own, part, study, named=part.removeprefix("reward/")) for i, part in enumerate(parts)]
            yield _panel(f"reward components: {case}", lines, keyed=True)
    for name, label in (QUANTITIES | OF_UPDATE | OF_TEXT).items():
        if name in logged:
            yield _panel(label, [_line(i, own, name, study) for i, own in named])


def _panel(title: str, lines: Iterable[dict[str, Any] | None], *, over: str = "steps", keyed: bool = False) -> Panel:
    return {"title": printable(title), "lines": [line for line in lines if line], "over": over, "keyed": keyed}


def _line(
    place: int, runs: Sequence[RunResult], name: str, study: Sequence[RunResult], *, named: str = ""
) -> dict[str, Any] | None:
    """A case's line over the steps; None if none of its runs has the quantity."""
    score = normalise(runs, study=study) if name == "normalised score" else None
    if name == "normalised score" and score is None:
        return None
    values = on_grid(runs, RETURN if score else name, score)
    return _drawn(place, None if named else place, named or runs[0].case, steps_grid(runs), values)


def _frontier(place: int, runs: Sequence[RunResult]) -> dict[str, Any] | None:
    """A case's return over its KL, means over its runs, as far as all of them came."""
    kl, returns = on_grid(runs, KL).mean(0), on_grid(runs, RETURN).mean(0)
    line = _drawn(place, place, runs[0].case, kl, np.where(np.isnan(kl), np.nan, returns)[np.newaxis])
    return line and line | {"steps": _numbers(steps_grid(runs))}


def _drawn(look: int, case: int | None, name: str, x: np.ndarray, values: np.ndarray) -> dict[str, Any] | None:
    known = np.isfinite(values).any(0)
    if not known.any():
        return None
    mean = np.full(len(x), np.nan)
    mean[known] = np.nanmean(values[:, known], axis=0)
    whole, line = limits(values), {"look": look, "case": case, "name": printable(name), "x": _numbers(x)}
    line |= {"mean": _numbers(mean), "low": None, "high": None, "seeds": []}
    if whole is not None:  # NaN where a run has ended
        return line | {"low": _numbers(whole[0]), "high": _numbers(whole[1])}
    return line | {"seeds": [_numbers(row) for row in values] if len(values) > 1 else []}


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{x:.4g}") if np.isfinite(x) else None for x in values.tolist()]


def read_samples(runs: Sequence[RunResult]) -> tuple[list[dict[str, Any]], str]:
    """Samples of all runs with their tokens, and a sentence if there are too many for a page, else no text."""
    names, shown, found = list(by_case(runs)), list[list[dict[str, Any]]](), list[list[dict[str, Any]]]()
    for run in [run for run in runs if run.folder]:
        folder = Path(run.folder)
        tokens = {(x["iteration"], x["row"]): x for x in run_reader.read_tokens(folder)}
        samples = run_reader.read_samples(folder)
        rows = [x for x in samples if {"prompt", "completion"} <= x.keys() and isinstance(x.get("iteration"), int)]
        tables = [list(rows) for _, rows in itertools.groupby(rows, key=lambda row: row["iteration"])]
        for table in tables:
            for i, row in enumerate(table):
                row |= {"case": names.index(run.case), "seed": run.seed, "tokens": tokens.get((row["iteration"], i))}
                row.pop("turns", None)  # whose text is the completion
                row.pop("chat", None)  # whose text is the prompt
        found += tables
        shown += _thinned(tables, MOST_TEXT // len(runs))
    count, whole = sum(map(len, shown)), sum(map(len, found))
    few = f"This page shows {count} of {whole} answers, long ones cut off; {SAMPLES} of each run has all in full."
    return [row for table in shown for row in table], few if shown != found else ""


def _thinned(tables: list[list[dict[str, Any]]], most: int) -> list[list[dict[str, Any]]]:
    """As many of the tables, evenly spread, with the first and the last, as have at most so many characters.

    If even these two are too long, they lose their tokens, then rows, then the ends of their texts.
    """
    sizes = np.array([_size(table) for table in tables])
    for count in range(len(tables), min(len(tables), 2) - 1, -1):
        chosen = np.linspace(0, len(tables) - 1, count).round().astype(int)
        if sizes[chosen].sum() <= most:
            return [tables[i] for i in chosen]
    ends = [tables[0], tables[-1]][: len(tables)]
    for rows, length in ((None, None), (4, None), (1, most // 48)):
        shorter = [[_shortened(row, length) for row in table[:rows]] for table in ends]
        if _size(shorter) <= most:
            break
    return shorter


def _shortened(row: dict[str, Any], length: int | None) -> dict[str, Any]:
    """A sample without tokens, its texts cut to this many characters; None cuts nothing."""
    texts = {name: str(row[name]) for name in ("prompt", "completion")}
    cut = {name: f"{x[:length]} …" if length and len(x) > length else x for name, x in texts.items()}
    return row | cut | {"tokens": None}


def _size(value: Any) -> int:
    """Characters of a value on the page, where markup is escaped."""
    from jinja2.utils import htmlsafe_json_dumps

    return len(htmlsafe_json_dumps(value))


def _spelt_out(value: Any) -> Any:
    """The same with printable texts and, for JSON, finite numbers."""
    if isinstance(value, dict):
        return {printable(str(name)): _spelt_out(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_spelt_out(x) for x in value]
    if isinstance(value, str):
        return printable(value)
    return None if isinstance(value, float) and not np.isfinite(value) else value


def read_pictures(runs: Sequence[RunResult]) -> list[dict[str, str]]:
    """Pictures of ``algos interpret`` in the runs' folders; beyond `MOST_PICTURES`, only where they are."""
    found, left = [], MOST_PICTURES
    paths = [path for run in runs if run.folder for path in sorted(Path(run.folder, "interpret").glob("*.png"))]
    for path in filter(Path.is_file, paths):
        left -= path.stat().st_size
        name = f"{path.parent.parent.name}: {path.stem.replace('_', ' ')}"
        source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" if left >= 0 else ""
        found.append({"name": name if source else f"{name} (in {path})", "source": source})
    return found


def bands(runs: Sequence[RunResult]) -> str:
    """What a curve's line and band are."""
    counts = [len(own) for own in by_case(runs).values()]
    if max(counts) == 1:
        return "One run of each case."
    inside = ["thin lines are single seeds"] * any(1 < count < MIN_SEEDS for count in counts)
    inside += ["bands are 95 % bootstrap confidence intervals"] * (max(counts) >= MIN_SEEDS)
    return f"Lines are means over the seeds; {', '.join(inside)}."
