"""Numbers of a comparison for a paper: interquartile means, performance profiles, probability of improvement.

After Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice": scores of all runs of
an algorithm over all environments, with limits by a bootstrap that resamples the seeds of each environment separately.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from algos.lab.comparison.summary import RunResult, by_case, lines_of, normalise
from algos.statistics.intervals import MIN_SEEDS, RESAMPLES, interquartile_mean

Scores = dict[str, np.ndarray]
"""By environment, the normalised score of each seed after training, ``[seeds]``."""
TAUS = np.linspace(0, 1.2, 121)
"""Scores at which profiles are drawn."""


def scores_by_algorithm(runs: Sequence[RunResult]) -> dict[str, Scores]:
    """Return the scores of each algorithm (or named case); environments without a scale are left out.

    Algorithms of different tasks are named with them: their means are no comparison.
    """
    scores: dict[str, Scores] = {}
    lines = lines_of(runs)
    for case, of_case in by_case(runs).items():
        score = normalise(of_case, study=runs)
        if score is not None:
            column = np.array([score(run.after["mean_return"]) for run in of_case])
            scores.setdefault(lines[case], {})[of_case[0].game_name] = column
    if len({frozenset(of_name) for of_name in scores.values()}) > 1:
        return {f"{name} ({', '.join(of_name)})": of_name for name, of_name in scores.items()}
    return scores


def everywhere(scores: Scores) -> np.ndarray:
    """Return the interquartile mean over all runs of all environments: ``[*]``, for scores ``[*, seeds]``."""
    return interquartile_mean(np.concatenate([*scores.values()], axis=-1))


def profile(scores: Scores) -> np.ndarray:
    """Return the fraction of runs whose score is above each of `TAUS`: ``[*, len(TAUS)]`` (run-score distribution)."""
    of_all_runs = np.concatenate([*scores.values()], axis=-1)
    return (of_all_runs[..., None] > TAUS).mean(axis=-2)


def probability_of_improvement(x: Scores, y: Scores) -> np.ndarray:
    """Return the probability that a run of x beats one of y on a random shared environment (eq. 2): ``[*]``.

    NaN if a score is NaN, which can neither win nor lose.
    """
    probabilities = []
    for env in x:
        if env in y:
            # Every run of x against every run of y, [*, seeds of x, seeds of y]
            of_x = x[env][..., :, None]
            of_y = y[env][..., None, :]
            wins = (of_x > of_y) + 0.5 * (of_x == of_y)
            wins = np.where(np.isnan(of_x) | np.isnan(of_y), np.nan, wins)
            probabilities.append(wins.mean(axis=(-2, -1)))
    return np.mean(probabilities, axis=0)


def interval(statistic: Callable[..., np.ndarray], *scores: Scores, seed: int = 0) -> np.ndarray | None:
    """95 % limits of a statistic of these scores by the stratified bootstrap, ``[2, *]``.

    None with fewer than `MIN_SEEDS` seeds of an algorithm in an environment. ``seed``: seed of the resampling.
    """
    num_seeds = [len(column) for by_env in scores for column in by_env.values()]
    if min(num_seeds) < MIN_SEEDS:
        return None
    generator = np.random.default_rng(seed)
    resampled: list[Scores] = []
    for by_env in scores:
        of_algorithm: Scores = {}
        for env, column in by_env.items():
            rows = generator.integers(len(column), size=(RESAMPLES, len(column)))
            of_algorithm[env] = column[rows]
        resampled.append(of_algorithm)
    return np.quantile(statistic(*resampled), [0.025, 0.975], axis=0)


class PaperRow(NamedTuple):
    """A row of the table: a quantity of an algorithm, or of one algorithm over another."""

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
            cells = [row.quantity, row.name, row.over, row.value]
            if row.limits is not None:
                cells += row.limits.tolist()
            writer.writerow(cells)
    (run_dir / "paper.tex").write_text(_latex(rows), encoding="utf-8")


LATEX = {character: rf"\{character}" for character in "_%&#${}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip
"""Commands for the characters that LaTeX reads as commands."""


def _latex(rows: Sequence[PaperRow]) -> str:
    """Return a ``tabular`` for booktabs."""
    lines = [
        "% Normalised score: 0 untrained, 1 solved (reward_threshold, else the best here). CI: stratified bootstrap.",
        r"\begin{tabular}{lll}",
        r"\toprule",
        r"quantity & algorithm & value (95\% CI) \\",
        r"\midrule",
    ]
    for row in rows:
        name = row.name
        if row.over:
            name = f"{row.name} over {row.over}"
        label = "".join(LATEX.get(character, character) for character in name)
        spread = ""
        if row.limits is not None:
            low, high = row.limits
            spread = f" ({low:.2f} to {high:.2f})"
        lines.append(rf"{row.quantity} & {label} & {row.value:.2f}{spread} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
