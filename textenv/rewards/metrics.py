"""Metrics of a batch of completions, for the log: contribution of each reward component, diversity of the texts."""

from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np

from textenv.rewards.scores import Scores, total


def reward_metrics(scores: Scores, answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """Compute the log metrics of a batch of scores, with the token ids of each completion.

    Returns:
        For each component NAME: ``reward/NAME``, its mean contribution to the scored completions (0 where it
        does not apply), so that the components add up to the score; ``reward_raw/NAME``, its mean value before the
        weight, where it applies; ``reward_applied/NAME``, the fraction where it applies; ``reward_share/NAME``, its
        fraction of all contributions, by absolute value; ``reward_length_correlation/NAME``, Pearson's correlation of
        its value and the completion's length (0 if one of them is constant). For each NAME that a function logged,
        ``reward/log/NAME``: its mean over the completions with a number. ``reward/failed`` and
        ``reward/left_out`` count completions; ``text/distinct_2`` and ``text/repeated_4``: `distinct`, `repeated`.
    """
    parts = scores.parts or {"score": [total(earned) for earned in scores.earned]}
    columns, values = (
        {name: np.array([np.nan if x is None else x for x in column], dtype=float) for name, column in each.items()}
        for each in (parts, scores.raw or parts)
    )
    added = {name: float(np.nansum(np.abs(column))) for name, column in columns.items()}
    everything = sum(added.values())
    found: dict[str, float] = {
        "reward/failed": len(scores.failed),
        "reward/left_out": sum(earned is None for earned in scores.earned),
        "text/distinct_2": distinct(answers),
        "text/repeated_4": repeated(answers),
    }
    lengths = np.array([len(ids) for ids in answers])
    count = sum(earned is not None for earned in scores.earned)
    for name, column in columns.items():
        here = ~np.isnan(column)
        if count and here.any():
            found[f"reward/{name}"] = float(column[here].sum()) / count
            found[f"reward_raw/{name}"] = float(values[name][here].mean())
            found[f"reward_applied/{name}"] = int(here.sum()) / count
            found[f"reward_share/{name}"] = added[name] / everything if everything else 0.0
            found[f"reward_length_correlation/{name}"] = correlation(values[name][here], lengths[here])
    for name, logged in scores.logged.items():
        if known := [x for x in logged if x is not None]:
            found[f"reward/log/{name}"] = fmean(known)
    return found


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; 0 if one of the two is constant."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def distinct(answers: Sequence[Sequence[int]], n: int = 2) -> float:
    """Fraction of distinct n-grams in all completions (Li et al. 2016, "distinct-n"); 1 if there are no n-grams."""
    grams = list(chain.from_iterable(_grams(ids, n) for ids in answers))
    return len(set(grams)) / len(grams) if grams else 1.0


def repeated(answers: Sequence[Sequence[Any]], n: int = 4) -> float:
    """Mean fraction of a completion's n-grams that repeat an earlier one, over completions with n-grams (else 0)."""
    shares = [1 - len(set(grams)) / len(grams) for grams in (_grams(ids, n) for ids in answers) if grams]
    return sum(shares) / len(shares) if shares else 0.0


def _grams(ids: Sequence[Any], n: int) -> list[tuple[Any, ...]]:
    return [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
