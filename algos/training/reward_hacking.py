"""Reward-hacking monitor: the score, and the variety of the texts over the training."""

import warnings

import numpy as np

from algos.training.metrics import Metrics

SCORE, VARIETY = "episode/return", "text/distinct_2"
WINDOW = 5
"""Number of first and of last iterations to average."""
COLLAPSE = 0.5
"""The variety has collapsed below this fraction of its initial value."""
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
        (score, variety), (score_now, variety_now) = (
            (np.mean(self._scores[part]), np.mean(self._variety[part]))
            for part in (slice(WINDOW), slice(-WINDOW, None))
        )
        if score_now - score > RISE * abs(score) and variety_now < COLLAPSE * variety:
            self.warned = True
            warnings.warn(
                f"the score rises ({score:.3g} to {score_now:.3g}) while the texts become alike (distinct 2-grams "
                f"{variety:.2f} to {variety_now:.2f}): the policy may have found a text that the reward overrates. "
                "Read some answers, try textenv.check_reward on the reward, or raise the KL coefficient",
                stacklevel=2,
            )
