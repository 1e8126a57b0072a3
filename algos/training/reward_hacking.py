"""Reward-hacking monitor: watches the score and the variety of the texts during the training."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SCORE = "episode/return"
"""Metric of the score."""
VARIETY = "text/distinct_2"
"""Metric of the variety: the share of distinct 2-grams."""
WINDOW = 5
"""Number of first and of last iterations to average."""
COLLAPSE = 0.5
"""Fraction of its initial value below which the variety has collapsed."""
RISE = 0.1
"""Minimum rise of the score for a warning, relative to the size of its initial value."""


ADVICE = "Read some answers, try textenv.check_reward on the reward, or raise the KL coefficient"
"""What to do about it."""


@dataclass(frozen=True)
class AlikeTexts:
    """A score that has risen while the texts became alike: means over the first and the last iterations."""

    first_score: float
    last_score: float
    first_variety: float
    last_variety: float

    def __str__(self) -> str:
        return (
            f"the score rises ({self.first_score:.3g} to {self.last_score:.3g}) while the texts become alike (distinct "
            f"2-grams {self.first_variety:.2f} to {self.last_variety:.2f}): the policy may have found a text that the "
            "reward overrates"
        )


def alike_texts(scores: Sequence[float], variety: Sequence[float]) -> AlikeTexts | None:
    """Return the sign of reward hacking in two metrics of the same iterations; None if they do not show it.

    Args:
        scores: `SCORE` of each iteration.
        variety: `VARIETY` of each iteration.
    """
    if len(scores) < 2 * WINDOW:
        return None
    sign = AlikeTexts(
        first_score=float(np.mean(scores[:WINDOW])),
        last_score=float(np.mean(scores[-WINDOW:])),
        first_variety=float(np.mean(variety[:WINDOW])),
        last_variety=float(np.mean(variety[-WINDOW:])),
    )
    has_risen = sign.last_score - sign.first_score > RISE * abs(sign.first_score)
    has_collapsed = sign.last_variety < COLLAPSE * sign.first_variety
    if has_risen and has_collapsed:
        return sign
    return None


class RewardHackingMonitor:
    """Monitor that warns once when the score rises while the texts become alike."""

    def __init__(self) -> None:
        self._scores: list[float] = []
        self._variety: list[float] = []
        self.warned = False

    def look(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an iteration; those without text metrics are ignored.

        Warns:
            UserWarning: at most once.
        """
        if self.warned or VARIETY not in metrics or SCORE not in metrics:
            return
        self._scores.append(metrics[SCORE])
        self._variety.append(metrics[VARIETY])
        sign = alike_texts(self._scores, self._variety)
        if sign is not None:
            self.warned = True
            warnings.warn(f"{sign}. {ADVICE}", stacklevel=2)
