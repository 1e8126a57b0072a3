"""A comparison in words: what the runs reached, with its uncertainty, and which case is better."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from algos.lab.comparison.paper import interval, probability_of_improvement
from algos.lab.comparison.summary import MIN_SEEDS, SAME_LENGTH, Figure, RunResult, by_case
from algos.training.reward_hacking import COLLAPSE, VARIETY


def in_words(runs: Sequence[RunResult], summaries: Mapping[str, Mapping[str, Figure]]) -> list[str]:
    """Return a paragraph for each case, and one for each pair of cases in the same environment."""
    cases = by_case(runs)
    return [*(_case(name, own, summaries[name]) for name, own in cases.items()), *_pairs(cases)]


def _case(name: str, runs: Sequence[RunResult], metrics: Mapping[str, Figure]) -> str:
    evaluated = "mean_return" in metrics
    after, before = ("mean_return", "return before") if evaluated else ("last return", "first return")
    if after not in metrics:
        return f"{name}: no episode has ended yet in some run."
    when = "after training" if evaluated else "in the last tenth of the training episodes"
    first = "before" if evaluated else "in the first tenth"
    said = f"{name}: a mean return of {with_interval(metrics[after])} {when}, from {metrics[before].mean:.3g} {first}"
    if "reached 0.9" in metrics and runs[0].best is not None:
        fraction = metrics["reached 0.9"].mean
        said += f"; {fraction:.0%} of the runs came to a normalised score of .9 while training"
    if "last kl" in metrics:
        said += f"; the KL to the reference policy is then {with_interval(metrics['last kl'])} nats per episode"
    said += "."
    longest = max(run.history[-1]["steps"] for run in runs)
    if early := [run for run in runs if run.history[-1]["steps"] < SAME_LENGTH * longest]:
        ended = ", ".join(f"seed {run.seed} after {run.history[-1]['steps']:,} of {longest:,} steps" for run in early)
        said += f" Not all runs have the same length: {ended}."
    alike = [run for run in runs if _variety(run) is not None and (_variety(run) or 0) < COLLAPSE]
    if alike:
        seeds = ", ".join(str(run.seed) for run in alike)
        said += f" The answers became alike (seed {seeds}: at least half of the distinct 2-grams are gone)."
        said += " Read some: the reward may be hacked."
    return said


def _variety(run: RunResult) -> float | None:
    """Distinct 2-grams of the last iteration by those of the first; None if they were not measured."""
    found = [row[VARIETY] for row in run.history if row.get(VARIETY)]
    return found[-1] / found[0] if found else None


def _pairs(cases: Mapping[str, Sequence[RunResult]]) -> Iterator[str]:
    for (x, first), (y, second) in itertools.combinations(cases.items(), 2):
        if first[0].env != second[0].env or not all(run.after for run in (*first, *second)):
            continue
        scores = [{"": np.array([run.after["mean_return"] for run in own])} for own in (first, second)]
        probability = float(probability_of_improvement(*scores))
        limits = interval(probability_of_improvement, *scores)
        spread = "too few seeds for an interval" if limits is None else f"95 % CI {limits[0]:.2f} to {limits[1]:.2f}"
        unsure = (
            ": these runs do not say which is better" if limits is not None and limits[0] <= 0.5 <= limits[1] else ""
        )
        yield f"Probability of improvement of {x} over {y}: {probability:.2f} ({spread}){unsure}."


def with_interval(figure: Figure) -> str:
    """Return a mean with its 95 % confidence interval; with few seeds, with the value of each."""
    if figure.low is not None and figure.high is not None:
        seeds = len(figure.values)
        return f"{figure.mean:.3g} (95 % CI {figure.low:.3g} to {figure.high:.3g}, {seeds} seeds)"
    if len(figure.values) == 1:
        return f"{figure.mean:.3g} (1 seed)"
    values = ", ".join(f"{value:.3g}" for value in figure.values)
    return f"{figure.mean:.3g} (seeds: {values}; {MIN_SEEDS} give an interval)"
