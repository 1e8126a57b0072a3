"""Numbers of a comparison for a paper: interquartile means, performance profiles, probability of improvement.

After Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice": scores of all runs of
an algorithm over all environments, with limits by a bootstrap that resamples the seeds of each environment separately.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from algos.lab.comparison.summary import MIN_SEEDS, RESAMPLES, RunResult, by_case, interquartile_mean, normalise

Scores = dict[str, np.ndarray]
"""By environment, the normalised score of each seed after training, ``[seeds]``."""
TAUS = np.linspace(0, 1.2, 121)
"""Scores at which profiles are drawn."""


def scores_by_algorithm(runs: Sequence[RunResult]) -> dict[str, Scores]:
    """Return the scores of each algorithm (or named case); environments without a scale are left out.

    Algorithms of different tasks are named with them: their means are no comparison.
    """
    scores: dict[str, Scores] = {}
    for of_case in by_case(runs).values():
        score = normalise(of_case, study=runs)
        if score is not None:
            column = np.array([score(run.after["mean_return"]) for run in of_case])
            scores.setdefault(of_case[0].line, {})[of_case[0].env] = column
    if len({frozenset(of_name) for of_name in scores.values()}) > 1:
        return {f"{name} ({', '.join(of_name)})": of_name for name, of_name in scores.items()}
    return scores


def everywhere(scores: Scores) -> np.ndarray:
    """Return the interquartile mean over all runs, of ``[*, seeds]`` by environment: ``[*]``."""
    return interquartile_mean(np.concatenate([*scores.values()], axis=-1))


def profile(scores: Scores) -> np.ndarray:
    """Return the fraction of runs whose score is above each of `TAUS`: ``[*, len(TAUS)]`` (run-score distribution)."""
    whole = np.concatenate([*scores.values()], axis=-1)
    return (whole[..., None] > TAUS).mean(axis=-2)


def probability_of_improvement(x: Scores, y: Scores) -> np.ndarray:
    """Return the probability that a run of x beats one of y on a random shared environment (eq. 2): ``[*]``."""
    pairs = [(x[env][..., :, None], y[env][..., None, :]) for env in x if env in y]
    return np.mean([((a > b) + 0.5 * (a == b)).mean(axis=(-2, -1)) for a, b in pairs], axis=0)


def interval(statistic: Callable[..., np.ndarray], *scores: Scores, seed: int = 0) -> np.ndarray | None:
    """95 % limits ``[2, *]`` by the stratified bootstrap; None with fewer than `MIN_SEEDS` seeds somewhere."""
    if min(len(column) for each in scores for column in each.values()) < MIN_SEEDS:
        return None
    generator = np.random.default_rng(seed)
    drawn = [
        {env: x[generator.integers(len(x), size=(RESAMPLES, len(x)))] for env, x in each.items()} for each in scores
    ]
    return np.quantile(statistic(*drawn), [0.025, 0.975], axis=0)


class PaperRow(NamedTuple):
    """A quantity of the table: of an algorithm, or of one over another."""

    quantity: str
    name: str
    over: str
    """Empty, except for a probability of improvement."""
    value: float
    limits: np.ndarray | None
    """95 % limits, ``[2]``; None with few seeds."""


def paper_rows(scores: Mapping[str, Scores]) -> list[PaperRow]:
    """Return the interquartile mean of each name, and the probability of improvement of each pair."""
    rows = []
    for name, of_name in scores.items():
        limits = interval(everywhere, of_name)
        rows.append(PaperRow("interquartile mean", name, "", float(everywhere(of_name)), limits))
    for (first, x), (second, y) in itertools.combinations(scores.items(), 2):
        if x.keys() & y.keys():
            limits = interval(probability_of_improvement, x, y)
            probability = float(probability_of_improvement(x, y))
            rows.append(PaperRow("probability of improvement", first, second, probability, limits))
    return rows


def write_paper(run_dir: Path, scores: Mapping[str, Scores]) -> None:
    """Write the numbers, ``paper.csv`` and ``paper.tex``; the figure is `algos.lab.comparison.figures.draw_scores`."""
    rows = paper_rows(scores)
    with (run_dir / "paper.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["quantity", "algorithm", "over", "value", "low", "high"])
        for row in rows:
            low_and_high = [] if row.limits is None else row.limits.tolist()
            writer.writerow([row.quantity, row.name, row.over, row.value, *low_and_high])
    (run_dir / "paper.tex").write_text(_latex(rows), encoding="utf-8")


def _latex(rows: Sequence[PaperRow]) -> str:
    """Return a ``tabular`` for booktabs."""
    about = (
        "% Normalised score: 0 untrained, 1 solved (reward_threshold, else the best here). CI: stratified bootstrap."
    )
    lines = [about, r"\begin{tabular}{lll}", r"\toprule", r"quantity & algorithm & value (95\% CI) \\", r"\midrule"]
    for row in rows:
        name = f"{row.name} over {row.over}" if row.over else row.name
        label = re.sub(r"([_%&#$])", r"\\\1", name)
        spread = "" if row.limits is None else f" ({row.limits[0]:.2f} to {row.limits[1]:.2f})"
        lines.append(rf"{row.quantity} & {label} & {row.value:.2f}{spread} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
