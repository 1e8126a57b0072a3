"""Metrics of a batch of completions, for the log: contribution of each reward component, diversity of the texts."""

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import TypeVar

import numpy as np

from textenv.rewards.scores import Scores, total

T = TypeVar("T")


def reward_metrics(scores: Scores, answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """Compute the log metrics of a batch of scores, with the token ids of each completion.

    Returns:
        For each component NAME:

        - ``reward/NAME``: its mean contribution to the scored completions, 0 where it does not apply. So the
          components add up to the score.
        - ``reward_raw/NAME``: its mean value before the weight, where it applies.
        - ``reward_applied/NAME``: the fraction of the scored completions to which it applies.
        - ``reward_share/NAME``: its fraction of all contributions, by absolute value.
        - ``reward_length_correlation/NAME``: Pearson's correlation of its value and the completion's length; 0 if one
          of them is constant.

        For each NAME that a function logged, ``reward/log/NAME``: its mean over the completions with a number. For the
        batch, ``reward/failed`` and ``reward/left_out``: numbers of completions; ``text/distinct_2``: `distinct`;
        ``text/repeated_4``: `repeated`.
    """
    # Contribution and raw value of each component, NaN where it does not apply
    parts = scores.parts or {"score": [total(score) for score in scores.score]}
    contributions = _as_arrays(parts)
    raw_values = _as_arrays(scores.raw or parts)

    metrics: dict[str, float] = {
        "reward/failed": len(scores.failed),
        "reward/left_out": sum(score is None for score in scores.score),
        "text/distinct_2": distinct(answers),
        "text/repeated_4": repeated(answers),
    }

    # Components
    magnitudes = {name: float(np.nansum(np.abs(column))) for name, column in contributions.items()}
    total_magnitude = sum(magnitudes.values())
    lengths = np.array([len(ids) for ids in answers])
    num_scored = sum(score is not None for score in scores.score)
    for name, column in contributions.items():
        applies = ~np.isnan(column)
        if not num_scored or not applies.any():
            continue
        applied_values = raw_values[name][applies]
        share = 0.0
        if total_magnitude:
            share = magnitudes[name] / total_magnitude
        metrics[f"reward/{name}"] = float(column[applies].sum()) / num_scored
        metrics[f"reward_raw/{name}"] = float(applied_values.mean())
        metrics[f"reward_applied/{name}"] = int(applies.sum()) / num_scored
        metrics[f"reward_share/{name}"] = share
        metrics[f"reward_length_correlation/{name}"] = correlation(applied_values, lengths[applies])

    # Logged numbers
    for name, logged_column in scores.logged.items():
        numbers = [number for number in logged_column if number is not None]
        if numbers:
            metrics[f"reward/log/{name}"] = fmean(numbers)
    return metrics


def _as_arrays(columns: Mapping[str, Sequence[float | None]]) -> dict[str, np.ndarray]:
    """Return columns as float64 ``[n]``, with NaN for None."""
    arrays = {}
    for name, column in columns.items():
        numbers = [np.nan if value is None else value for value in column]
        arrays[name] = np.array(numbers, dtype=float)
    return arrays


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; 0 if one of the two is constant."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def distinct(answers: Sequence[Sequence[int]], n: int = 2) -> float:
    """Fraction of distinct n-grams in all completions (Li et al. 2016, "distinct-n"); 1 if there are no n-grams."""
    ngrams = list(chain.from_iterable(_ngrams(ids, n) for ids in answers))
    if not ngrams:
        return 1.0
    return len(set(ngrams)) / len(ngrams)


def repeated(answers: Sequence[Sequence[object]], n: int = 4) -> float:
    """Mean fraction of a completion's n-grams that repeat an earlier one; 0 if no completion has an n-gram."""
    fractions = []
    for ids in answers:
        ngrams = _ngrams(ids, n)
        if ngrams:
            fractions.append(1 - len(set(ngrams)) / len(ngrams))
    if not fractions:
        return 0.0
    return sum(fractions) / len(fractions)


def _ngrams(ids: Sequence[T], n: int) -> list[tuple[T, ...]]:
    return [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
