"""A comparison in words: what the runs reached, with its uncertainty, and which case is better."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from algos.lab.comparison.paper import interval, probability_of_improvement
from algos.lab.comparison.summary import RunResult, by_case, ended_early
from algos.statistics.intervals import MIN_SEEDS, Estimate
from algos.training.reward_hacking import COLLAPSE, VARIETY


def in_words(runs: Sequence[RunResult], summaries: Mapping[str, Mapping[str, Estimate]]) -> list[str]:
    """Return a paragraph for each case, and one for each pair of cases of one game."""
    cases = by_case(runs)
    paragraphs = [_case(name, of_case, summaries[name]) for name, of_case in cases.items()]
    return [*paragraphs, *_pairs(cases)]


def _case(name: str, runs: Sequence[RunResult], metrics: Mapping[str, Estimate]) -> str:
    """Paragraph about a case: its returns, then what a reader should know before trusting them."""
    # Returns of evaluations, or of the training's beginning and end
    if "mean_return" in metrics:
        last = metrics["mean_return"]
        first = metrics["return before"]
        last_when = "after training"
        first_when = "before"
    elif "last return" in metrics:
        last = metrics["last return"]
        first = metrics["first return"]
        last_when = "in the last tenth of the training episodes"
        first_when = "in the first tenth"
    else:
        return f"{name}: no episode has ended yet in some run."
    text = f"{name}: a mean return of {with_interval(last)} {last_when}, from {first.mean:.3g} {first_when}"

    if "reached 0.9" in metrics and runs[0].best is not None:
        fraction = metrics["reached 0.9"].mean
        text += f"; {fraction:.0%} of the runs came to a normalised score of .9 while training"
    if "last kl" in metrics:
        text += f"; the KL to the reference policy is then {with_interval(metrics['last kl'])} nats per episode"
    text += "."

    # Runs that ended early
    longest = max(run.history[-1]["steps"] for run in runs)
    shorter = []
    for run in ended_early(runs):
        shorter.append(f"seed {run.seed} after {run.history[-1]['steps']:,} of {longest:,} steps")
    if shorter:
        text += f" Not all runs have the same length: {', '.join(shorter)}."

    # Runs whose answers are all the same
    collapsed = [str(run.seed) for run in runs if _has_collapsed(run)]
    if collapsed:
        seeds = ", ".join(collapsed)
        text += f" The answers became alike (seed {seeds}: at least half of the distinct 2-grams are gone)."
        text += " Read some: the reward may be hacked."
    return text


def _has_collapsed(run: RunResult) -> bool:
    """Whether the answers of the last iteration have far fewer distinct 2-grams than those of the first."""
    variety = [row[VARIETY] for row in run.history if row.get(VARIETY)]
    return bool(variety) and variety[-1] / variety[0] < COLLAPSE


def _pairs(cases: Mapping[str, Sequence[RunResult]]) -> Iterator[str]:
    """Sentences about pairs of evaluated cases of one game: which one is better, and how surely."""
    for (x, runs_x), (y, runs_y) in itertools.combinations(cases.items(), 2):
        evaluated = all(run.after for run in (*runs_x, *runs_y))
        if runs_x[0].game_name != runs_y[0].game_name or not evaluated:
            continue
        scores_x = {"": np.array([run.after["mean_return"] for run in runs_x])}
        scores_y = {"": np.array([run.after["mean_return"] for run in runs_y])}
        probability = float(probability_of_improvement(scores_x, scores_y))
        if math.isnan(probability):
            yield f"Probability of improvement of {x} over {y}: unknown, because a return after training is NaN."
            continue
        limits = interval(probability_of_improvement, scores_x, scores_y)

        spread = "too few seeds for an interval"
        verdict = ""
        if limits is not None:
            low, high = limits
            spread = f"95 % CI {low:.2f} to {high:.2f}"
            if low <= 0.5 <= high:
                verdict = ": these runs do not say which is better"
        yield f"Probability of improvement of {x} over {y}: {probability:.2f} ({spread}){verdict}."


def with_interval(estimate: Estimate) -> str:
    """Return a mean with its 95 % confidence interval; with few seeds, with the value of each."""
    if estimate.low is not None and estimate.high is not None:
        seeds = len(estimate.values)
        return f"{estimate.mean:.3g} (95 % CI {estimate.low:.3g} to {estimate.high:.3g}, {seeds} seeds)"
    if len(estimate.values) == 1:
        return f"{estimate.mean:.3g} (1 seed)"
    values = ", ".join(f"{value:.3g}" for value in estimate.values)
    return f"{estimate.mean:.3g} (seeds: {values}; {MIN_SEEDS} give an interval)"
