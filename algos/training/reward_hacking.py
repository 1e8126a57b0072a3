"""Reward-hacking monitor: score against KL, and the variety of the texts over the training."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from algos.training.metrics import Metrics

SCORE, VARIETY = "episode/return", "text/distinct_2"
WINDOW = 5
"""Number of first and of last iterations to average."""
COLLAPSE = 0.5
"""The variety has collapsed below this fraction of its initial value."""
RISE = 0.1
"""Minimum rise of the score for a warning, relative to the size of its initial value."""

PANELS = {"episode/length": "tokens an answer", "text/repeated_4": "repeated 4-grams", VARIETY: "distinct 2-grams"}


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


def plot_frontier(history: Sequence[Metrics], path: Path) -> None:
    """Plot a text run: score against KL over the training, and length, repetition and variety of the answers.

    Args:
        history: metrics of each iteration, some of which have `VARIETY`.
        path: PNG file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplots(2, 2).flat
    steps = np.array([metrics["steps"] for metrics in history])
    has_kl = any("reference/kl" in metrics for metrics in history)
    x = _column(history, "reference/kl") if has_kl else steps
    axes[0].plot(x, _column(history, SCORE), color="0.8", zorder=1)
    points = axes[0].scatter(x, _column(history, SCORE), c=steps, s=14, cmap="viridis", zorder=2)
    figure.colorbar(points, ax=axes[0], label="steps")
    axes[0].set(
        xlabel="KL to the reference, nats per completion" if has_kl else "steps",
        ylabel="score",
        title="reward–KL frontier",
    )
    for axis, (name, label) in zip(axes[1:], PANELS.items(), strict=True):
        axis.plot(steps, _column(history, name))
        axis.set(xlabel="steps", title=label)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _column(history: Sequence[Metrics], name: str) -> np.ndarray:
    return np.array([metrics.get(name, np.nan) for metrics in history])
