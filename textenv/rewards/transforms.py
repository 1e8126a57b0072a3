"""Transforms of reward functions: each takes a reward function and returns one.

`Normalize` and `whiten` make a row's score depend on other rows; use `textenv.check_reward` on the inner function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from textenv.rewards.calling import call_reward, reward_name
from textenv.rewards.scores import RewardError, Rows, read_scores

MaybeScores = list[float | None]


class Normalize:
    """Normalize scores by their running mean and running standard deviation.

    Each batch first updates the statistics (parallel formula of Chan, Golub and LeVeque 1979), then is scaled by them.
    While all scores so far are equal the divisor is 1. None stays None and does not enter the statistics.

    Args:
        function: a reward function.
        center: subtract the mean.
        scale: divide by the standard deviation (of the population).

    Raises:
        ValueError: if a score is not finite, because it would stay in the running mean.

    Example:
        >>> rate = Normalize(lambda prompts, completions: [float(len(text)) for text in completions])
        >>> rate(prompts=["a"] * 2, completions=["b", "bcd"])
        [-1.0, 1.0]
    """

    depends_on_batch = True

    def __init__(self, function: Callable[..., Any], *, center: bool = True, scale: bool = True) -> None:
        self.function, self.center, self.scale = function, center, scale
        self.__name__ = reward_name(function)
        self.count, self.mean, self.variance = 0, 0.0, 0.0

    def __call__(self, *, tokenizer: Any = None, **columns: Any) -> MaybeScores:
        """Call the function, update the statistics, and return its normalized scores."""
        scores = _scores(self.function, columns, tokenizer)
        self._add(_known(scores, self.__name__))
        shift = self.mean if self.center else 0.0
        divisor = _deviation(self.variance, self.mean) if self.scale else 1.0
        return [None if score is None else (score - shift) / divisor for score in scores]

    def _add(self, scores: np.ndarray) -> None:
        if not len(scores):
            return
        count = self.count + len(scores)
        share, delta = len(scores) / count, float(scores.mean()) - self.mean
        self.variance = (1 - share) * self.variance + share * float(scores.var()) + share * (1 - share) * delta**2
        self.mean += share * delta
        self.count = count

    def state_dict(self) -> dict[str, float]:
        """Return the running statistics, ready for JSON."""
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the statistics that `state_dict` returned."""
        self.count, self.mean, self.variance = int(state["count"]), float(state["mean"]), float(state["variance"])


def clip(function: Callable[..., Any], low: float, high: float) -> Callable[..., MaybeScores]:
    """Clip the function's scores to [`low`, `high`]; None stays None.

    Raises:
        ValueError: unless low <= high.

    Example:
        >>> rate = clip(lambda completions: [len(text) for text in completions], 0, 2)
        >>> rate(prompts=["a"] * 2, completions=["b", "bcd"])
        [1.0, 2.0]
    """
    if not low <= high:
        raise ValueError(f"low and high are {low} and {high}, expected low <= high")

    def clipped(*, tokenizer: Any = None, **columns: Any) -> MaybeScores:
        scores = _scores(function, columns, tokenizer)
        return [None if score is None else float(np.clip(score, low, high)) for score in scores]

    return _named(clipped, function)


def whiten(function: Callable[..., Any], *, shift_mean: bool = True) -> Callable[..., MaybeScores]:
    """Scale the function's scores to population variance 1 in each batch; mean 0 or, with ``shift_mean=False``, kept.

    Equal scores are divided by 1; None stays None. Raises the same error as `Normalize`.

    Example:
        >>> rate = whiten(lambda completions: [len(text) for text in completions])
        >>> rate(prompts=["a"] * 2, completions=["b", "bcd"])
        [-1.0, 1.0]
    """

    def whitened(*, tokenizer: Any = None, **columns: Any) -> MaybeScores:
        scores = _scores(function, columns, tokenizer)
        known = _known(scores, reward_name(function))
        if not len(known):
            return scores
        mean, divisor = float(known.mean()), _deviation(float(known.var()), float(known.mean()))
        back = 0.0 if shift_mean else mean
        return [None if score is None else (score - mean) / divisor + back for score in scores]

    whitened.depends_on_batch = True  # type: ignore[attr-defined]
    return _named(whitened, function)


def _named(wrapper: Callable[..., MaybeScores], function: Callable[..., Any]) -> Callable[..., MaybeScores]:
    wrapper.__name__ = reward_name(function)
    return wrapper


def _scores(function: Callable[..., Any], columns: dict[str, Any], tokenizer: Any) -> MaybeScores:
    """Return one number per completion, or None.

    Raises:
        RewardError: on an invalid return value, and on per-token rewards, which have no single number.
    """
    rows = Rows({"completion_ids": [[0]] * len(Rows(columns))} | columns)
    scores = read_scores(call_reward(function, columns, tokenizer), rows, name=reward_name(function))
    if any(isinstance(earned, np.ndarray) for earned in scores.earned):
        raise RewardError(
            f"reward {reward_name(function)!r} pays by the token, but Normalize, clip and whiten take "
            "one number an answer"
        )
    return [None if earned is None else float(earned) for earned in scores.earned]


def _known(scores: MaybeScores, name: str) -> np.ndarray:
    known = np.array([score for score in scores if score is not None], dtype=np.float64)
    if not np.isfinite(known).all():
        row = next(row for row, score in enumerate(scores) if score is not None and not math.isfinite(score))
        raise ValueError(f"reward {name!r} returned {scores[row]!r} in row {row}: expected a finite number or None")
    return known


def _deviation(variance: float, mean: float) -> float:
    """Return the standard deviation, or 1 if it is within rounding error."""
    deviation = math.sqrt(variance)
    return deviation if deviation > 1e-8 * max(1.0, abs(mean)) else 1.0
