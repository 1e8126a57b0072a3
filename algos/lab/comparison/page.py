"""Page of a report: one HTML file from a template, with curves, settings, and prompts and answers; it loads nothing.

Jinja2 escapes whatever a template shows; texts in the data become text nodes. The page's policy allows its own script
alone, so not even markup that slipped through could run one.
"""

from __future__ import annotations

import base64
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from algos.lab.comparison.summary import (
    AFTER_AN_END,
    QUANTITIES,
    RunResult,
    by_case,
    ended_early,
    normalise,
    on_grid,
    steps_grid,
)
from algos.statistics.intervals import MIN_SEEDS, limits
from algos.statistics.pass_rates import PASS_RATE
from algos.storage import run_reader
from algos.storage.run_files import SAMPLES
from algos.training.loggers import SHADED
from textenv.rendering import printable

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
MAX_TEXT_CHARACTERS = 2_500_000
"""Maximum characters of prompts and answers in a page; with pictures and frames, a page stays below 5 MB."""
MAX_PICTURE_BYTES = 1_000_000
"""Maximum bytes of pictures in a page; frames have their own limit (`algos.lab.comparison.episodes`)."""
RETURN = "episode/return"
KL = "reference/kl"
LENGTH = "episode/length"
OF_ENV = {
    RETURN: "return",
    "eval/mean_return": "return of the evaluation",
    LENGTH: "episode length, steps or tokens",
}
"""Quantities with a panel for each game, because their scales differ."""
OF_TEXT = {
    "text/distinct_2": "distinct-2: fraction of distinct 2-grams",
    "text/repeated_4": "fraction of repeated 4-grams",
}
"""Quantities of generated texts."""
OF_UPDATE = {
    "policy/approx_kl": "approx_kl: KL from the behaviour policy while updating",
    "value/loss": "value loss",
}
"""Quantities of a training that only curves show."""
NOT_COMPONENTS = ("reward/failed", "reward/left_out", "reward/loss")
"""Metrics below ``reward/`` that are no components of the reward."""
Panel = dict[str, Any]
"""Data of a chart: its ``title``, its ``lines``, what they are drawn ``over``, and whether they are ``keyed``."""
Line = dict[str, Any]
"""Data of a line of a chart; see `_line`."""
Table = list[dict[str, Any]]
"""Samples of one iteration of a run."""


def render(template: str, **values: Any) -> str:
    """Fill in a template of this folder; every text is escaped, and control characters are spelt out."""
    environment = _environment()
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()

    # Texts of ours, which are not escaped
    mark_safe = environment.filters["safe"]
    page = environment.get_template(template).render(
        script=mark_safe(script),
        script_hash=mark_safe(f"sha256-{digest}"),
        style=mark_safe(style),
        **values,
    )
    return str(page)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_spell_out_text,
        trim_blocks=True,
    )


def _spell_out_text(value: Any) -> Any:
    """Make a text printable. Markup, a subclass of `str` that only we make, and all other values stay as they are."""
    if type(value) is str:
        return printable(value)
    return value


def page_data(runs: Sequence[RunResult], *, live: float = 0) -> dict[str, Any]:
    """Return everything that the page draws: curves of the cases, and samples; ``live``: seconds between refreshes."""
    cases = by_case(runs)
    samples, note = read_samples(runs)
    budgets = [max(run.history[-1]["steps"] for run in of_case) for of_case in cases.values()]

    # Cases of very different budgets are compared over the fraction of it
    axis = "fraction"
    if live or max(budgets) < 2 * min(budgets):
        axis = "steps"

    return samples_data(samples, SHADED) | {
        "note": note,
        "cases": [printable(name) for name in cases],
        "panels": [panel for panel in _panels(cases, runs) if panel["lines"]],
        "axis": axis,
        "live": live,
    }


def samples_data(samples: Sequence[dict[str, Any]], shades: Iterable[str]) -> dict[str, Any]:
    """Return the part of the data that the table of prompts and answers draws; ``shades``: columns of ``tokens``."""
    recorded = set[str]()
    for sample in samples:
        recorded.update(sample["tokens"] or ())
    return {
        "samples": [_spelt_out(sample) for sample in samples],
        "shades": [name for name in shades if name in recorded],
        "cases": [],
        "live": 0,
        "note": "",
    }


def _panels(cases: Mapping[str, Sequence[RunResult]], study: Sequence[RunResult]) -> Iterator[Panel]:
    """Panels in the page's order: returns by game, frontiers, then everything that several cases share."""
    logged = {name for run in study for row in run.history for name in row}
    games = list(dict.fromkeys(run.game_name for run in study))

    # Scores and returns
    yield _panel(QUANTITIES["normalised score"], _case_lines(cases, "normalised score", study))
    for name, label in OF_ENV.items():
        if name in logged:
            for game in games:
                yield _panel(f"{label}: {game}", _case_lines(cases, name, study, game=game))

    # Frontiers
    if KL in logged:
        for game in games:
            yield _panel(
                f"reward–KL frontier: {game} (return over KL, from the small to the large dot)",
                [_frontier(i, runs) for i, runs in enumerate(cases.values()) if runs[0].game_name == game],
                over="KL to the reference, nats per answer",
            )

    # Components of a reward
    for case, runs in cases.items():
        components = _reward_components(runs)
        if len(components) > 1:
            lines = []
            for i, name in enumerate(components):
                label = name.removeprefix("reward/")
                lines.append(_quantity_line(runs, name, study, look=i, case=None, label=label))
            yield _panel(f"reward components: {case}", lines, keyed=True)

    # Pass rates of evaluations during the training
    for case, runs in cases.items():
        lines = []
        for look, name in enumerate(_pass_rates(runs)):
            label = name.removeprefix("eval/")
            lines.append(_quantity_line(runs, name, study, look=look, case=None, label=label))
        yield _panel(f"pass rates of held-out prompts: {case}", lines, keyed=True)

    # Quantities of the training
    for name, label in (QUANTITIES | OF_UPDATE | OF_TEXT).items():
        if name in logged:
            yield _panel(label, _case_lines(cases, name, study))


def _panel(title: str, lines: Iterable[Line | None], *, over: str = "steps", keyed: bool = False) -> Panel:
    drawn = [line for line in lines if line is not None]
    return {"title": printable(title), "lines": drawn, "over": over, "keyed": keyed}


def _pass_rates(runs: Sequence[RunResult]) -> list[str]:
    """Names of the pass rates that evaluations of a case's runs have logged, of all prompts together."""
    logged = dict.fromkeys(name for run in runs for row in run.history for name in row)
    return [name for name in logged if name.count("/") == 1 and name.startswith("eval/") and PASS_RATE.fullmatch(name)]


def _reward_components(runs: Sequence[RunResult]) -> list[str]:
    """Names of the reward components in the last iterations of a case's runs, sorted."""
    logged = {name for run in runs for name in run.history[-1]}
    of_reward = [name for name in sorted(logged) if name.startswith("reward/") and name.count("/") == 1]
    return [name for name in of_reward if name not in NOT_COMPONENTS]


def _case_lines(
    cases: Mapping[str, Sequence[RunResult]], name: str, study: Sequence[RunResult], *, game: str | None = None
) -> list[Line | None]:
    """A quantity's line of each case, or of each case of this game."""
    lines = []
    for i, (case, runs) in enumerate(cases.items()):
        if game is None or runs[0].game_name == game:
            lines.append(_quantity_line(runs, name, study, look=i, case=i, label=case))
    return lines


def _quantity_line(
    runs: Sequence[RunResult], name: str, study: Sequence[RunResult], *, look: int, case: int | None, label: str
) -> Line | None:
    """A quantity of a case over the steps; None if none of its runs has it."""
    if name == "normalised score":
        score = normalise(runs, study=study)
        if score is None:
            return None
        values = on_grid(runs, RETURN, score)
    else:
        values = on_grid(runs, name)
    return _line(steps_grid(runs), values, look=look, case=case, label=label)


def _frontier(case: int, runs: Sequence[RunResult]) -> Line | None:
    """A case's return over its KL, means over its runs, as far as all of them came."""
    kl = on_grid(runs, KL).mean(0)
    returns = on_grid(runs, RETURN).mean(0)
    returns = np.where(np.isnan(kl), np.nan, returns)
    line = _line(kl, returns[np.newaxis], look=case, case=case, label=runs[0].case)
    if line is None:
        return None
    return line | {"steps": _numbers(steps_grid(runs))}


def _line(x: np.ndarray, values: np.ndarray, *, look: int, case: int | None, label: str) -> Line | None:
    """Data of a line: the mean of ``values``, ``[seeds, points]``, and their limits or single seeds.

    ``look``: number of its colour. ``case``: number of the case by whose button it is hidden, if there is one. None if
    there is no finite value.
    """
    # Mean where a run was measured
    measured = np.isfinite(values).any(0)
    if not measured.any():
        return None
    mean = np.full(len(x), np.nan)
    mean[measured] = np.nanmean(values[:, measured], axis=0)
    line: Line = {
        "look": look,
        "case": case,
        "name": printable(label),
        "x": _numbers(x),
        "mean": _numbers(mean),
        "low": None,
        "high": None,
        "seeds": [],
    }

    # Limits, which are NaN where a run has ended; without them, single seeds
    band = limits(values)
    if band is not None:
        low, high = band
        line["low"] = _numbers(low)
        line["high"] = _numbers(high)
    elif len(values) > 1:
        line["seeds"] = [_numbers(row) for row in values]
    return line


def _numbers(values: np.ndarray) -> list[float | None]:
    """Values for JSON, rounded to four digits; None for NaN."""
    return [float(f"{x:.4g}") if np.isfinite(x) else None for x in values.tolist()]


def read_samples(runs: Sequence[RunResult]) -> tuple[list[dict[str, object]], str]:
    """Read the samples of all runs with their tokens.

    Returns:
        The samples, and a sentence for the reader if there are too many for a page, else an empty text.
    """
    cases = list(by_case(runs))
    logged: list[Table] = []
    shown: list[Table] = []
    for run in runs:
        if run.folder:
            tables = _read_tables(run, case=cases.index(run.case))
            logged += tables
            shown += _thinned(tables, MAX_TEXT_CHARACTERS // len(runs))
    samples = [sample for table in shown for sample in table]
    if shown == logged:
        return samples, ""
    total = sum(len(table) for table in logged)
    note = (
        f"This page shows {len(samples)} of {total} answers, long ones cut off; {SAMPLES} of each run has all in full."
    )
    return samples, note


def _read_tables(run: RunResult, *, case: int) -> list[Table]:
    """Read a run's samples, a table for each iteration, with ``case`` (its number), ``seed`` and ``tokens``."""
    folder = Path(run.folder)
    tokens = {(row["iteration"], row["row"]): row for row in run_reader.read_tokens(folder)}

    # What is no sample, such as a line of another program, is left out
    samples = []
    for sample in run_reader.read_samples(folder):
        if {"prompt", "completion"} <= sample.keys() and isinstance(sample.get("iteration"), int):
            samples.append(sample)

    tables = []
    for iteration, rows in itertools.groupby(samples, key=_iteration):
        table = list(rows)
        for i, sample in enumerate(table):
            sample["case"] = case
            sample["seed"] = run.seed
            sample["tokens"] = tokens.get((iteration, i))
            sample.pop("turns", None)  # whose text is the completion
            sample.pop("chat", None)  # whose text is the prompt
        tables.append(table)
    return tables


def _iteration(sample: dict[str, Any]) -> int:
    return int(sample["iteration"])


def _thinned(tables: list[Table], max_characters: int) -> list[Table]:
    """As many of the tables, evenly spread, with the first and the last, as have at most so many characters.

    If even these two are too long, they lose their tokens, then rows, then the ends of their texts.
    """
    sizes = np.array([_size(table) for table in tables])
    fewest = min(len(tables), 2)
    for count in range(len(tables), fewest - 1, -1):
        chosen = np.linspace(0, len(tables) - 1, count).round().astype(int)
        if sizes[chosen].sum() <= max_characters:
            return [tables[i] for i in chosen]

    # The first and the last, which are the same of a single one
    ends = [tables[0], tables[-1]][: len(tables)]
    for num_rows, text_length in ((None, None), (4, None), (1, max_characters // 48)):
        shorter = [[_shortened(sample, text_length) for sample in table[:num_rows]] for table in ends]
        if _size(shorter) <= max_characters:
            break
    return shorter


def _shortened(sample: dict[str, object], length: int | None) -> dict[str, object]:
    """A sample without tokens, its texts cut to this many characters; None cuts nothing."""
    shortened = sample | {"tokens": None}
    for name in ("prompt", "completion"):
        text = str(sample[name])
        if length and len(text) > length:
            text = f"{text[:length]} …"
        shortened[name] = text
    return shortened


def _size(value: object) -> int:
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
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def read_pictures(runs: Sequence[RunResult]) -> list[dict[str, str]]:
    """Pictures of ``algos interpret`` in the runs' folders; beyond `MAX_PICTURE_BYTES`, only where they are."""
    pictures = []
    bytes_left = MAX_PICTURE_BYTES
    for run in runs:
        if not run.folder:
            continue
        for path in sorted(Path(run.folder, "interpret").glob("*.png")):
            if not path.is_file():
                continue
            name = f"{path.parent.parent.name}: {path.stem.replace('_', ' ')}"
            bytes_left -= path.stat().st_size
            if bytes_left >= 0:
                data = base64.b64encode(path.read_bytes()).decode()
                pictures.append({"name": name, "source": f"data:image/png;base64,{data}"})
            else:
                pictures.append({"name": f"{name} (in {path})", "source": ""})
    return pictures


def bands(runs: Sequence[RunResult]) -> str:
    """Return sentences that say what a curve's line and band are."""
    counts = [len(of_case) for of_case in by_case(runs).values()]
    if max(counts) == 1:
        return "One run of each case."
    parts = []
    if any(1 < count < MIN_SEEDS for count in counts):
        parts.append("thin lines are single seeds")
    if max(counts) >= MIN_SEEDS:
        parts.append("bands are 95 % bootstrap confidence intervals")
    sentences = f"Lines are means over the seeds; {', '.join(parts)}."
    if any(ended_early(of_case) for of_case in by_case(runs).values()):
        sentences += f" {AFTER_AN_END}."
    return sentences
