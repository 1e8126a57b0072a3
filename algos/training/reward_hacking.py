"""Reward-hacking monitor: watches the score and the variety of the texts during the training."""

import warnings

import numpy as np

from algos.training.metrics import Metrics

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


class RewardHackingMonitor:
    """Monitor that warns once when the score rises while the texts become alike."""

    def __init__(self) -> None:
        self._scores: list[float] = []
        self._variety: list[float] = []
        self.warned = False

    def look(self, metrics: Metrics) -> None:
        """Record the metrics of an iteration; those without text metrics are ignored.

        Warns:
            UserWarning: at most once.
        """
        if self.warned or VARIETY not in metrics or SCORE not in metrics:
            return
        self._scores.append(metrics[SCORE])
        self._variety.append(metrics[VARIETY])
        if len(self._scores) < 2 * WINDOW:
            return

        # Means of the first and of the last iterations
        first_score = np.mean(self._scores[:WINDOW])
        last_score = np.mean(self._scores[-WINDOW:])
        first_variety = np.mean(self._variety[:WINDOW])
        last_variety = np.mean(self._variety[-WINDOW:])
        has_risen = last_score - first_score > RISE * abs(first_score)
        has_collapsed = last_variety < COLLAPSE * first_variety
        if has_risen and has_collapsed:
            self.warned = True
            warnings.warn(
                f"the score rises ({first_score:.3g} to {last_score:.3g}) while the texts become alike (distinct "
                f"2-grams {first_variety:.2f} to {last_variety:.2f}): the policy may have found a text that the "
                "reward overrates. Read some answers, try textenv.check_reward on the reward, or raise the KL "
                "coefficient",
                stacklevel=2,
            )
