"""Transforms of reward functions: each takes a reward function and returns one.

`Normalize` and `whiten` make a row's score depend on other rows; use `textenv.check_reward` on the inner function.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from textenv.device import move
from textenv.rewards.calling import call_reward, reward_name
from textenv.rewards.scores import RewardError, Rows, count_rows, read_scores
from textenv.rewards.training import NOW, log_again

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_warn_once = functools.cache(logging.getLogger(__name__).warning)


class Transform:
    """Reward function that changes the scores of another one; None stays None.

    Args:
        function: a reward function.
        change: function from the scores of a batch, float64 ``[k]`` with k > 0, to the new ones.
        by_batch: True if a new score depends on the scores of other rows.

    Raises:
        RewardError: when called, on an invalid return value, and on per-token rewards, which have no single number.
        ValueError: when called, if ``by_batch`` and a score is not finite.
    """

    def __init__(
        self, function: Callable[..., object], change: Callable[[np.ndarray], np.ndarray], *, by_batch: bool
    ) -> None:
        self.function = function
        self.change = change
        self.by_batch = by_batch or depends_on_batch(function)
        self.__name__ = reward_name(function)

    def __call__(
        self, /, *, tokenizer: "PreTrainedTokenizerBase | None" = None, **columns: Sequence[object]
    ) -> list[float | None]:
        """Call the function and return the changed scores."""
        # Rows have `completion_ids`, which are missing if this is called with texts only
        rows = Rows({"completion_ids": [[0]] * count_rows(columns)} | columns)
        scores = read_scores(call_reward(self.function, columns, tokenizer), rows, name=self.__name__)
        log_again(scores.logged)
        former_scores = scores.score
        if any(isinstance(score, np.ndarray) for score in former_scores):
            raise RewardError(
                f"reward {self.__name__!r} is per token, but Normalize, clip and whiten need one number per completion"
            )

        # Change the numbers; None stays where it is
        numbers = np.array([score for score in former_scores if score is not None], dtype=np.float64)
        if self.by_batch and not np.isfinite(numbers).all():
            raise ValueError(
                f"reward {self.__name__!r} returned {former_scores!r:.200}: expected finite numbers or None"
            )
        if not len(numbers):
            return [None] * len(former_scores)
        changed_numbers = iter(self.change(numbers).tolist())
        return [None if score is None else next(changed_numbers) for score in former_scores]

    def to(self, device: "torch.device") -> None:
        """Move the function, if it is a reward model, to a device."""
        move(self.function, device)


class Normalize(Transform):
    """Normalize scores by their running mean and running standard deviation.

    Each batch first updates the statistics (parallel formula of Chan, Golub and LeVeque 1979), then is scaled by them.
    The divisor is 1 while all scores are equal. None stays None and does not enter the statistics. An evaluation scales
    by the statistics of the training and does not change them. Before any training it scales by those of its own batch.

    Args:
        function: a reward function.
        center: subtract the mean.
        scale: divide by the standard deviation (of the population).

    Raises:
        ValueError: when called, if a score is not finite, because it would stay in the running mean.

    Example:
        >>> rate = Normalize(lambda prompts, completions: [float(len(text)) for text in completions])
        >>> rate(prompts=["a"] * 2, completions=["b", "bcd"])
        [-1.0, 1.0]
    """

    def __init__(self, function: Callable[..., object], *, center: bool = True, scale: bool = True) -> None:
        super().__init__(function, self._normalize, by_batch=True)
        self.center = center
        self.scale = scale
        self.count = 0
        """Number of scores so far."""
        self.mean = 0.0
        self.variance = 0.0
        """Population variance."""

    def _normalize(self, scores: np.ndarray) -> np.ndarray:
        """Normalize a batch of scores, float64 ``[k]``, k > 0, and update the statistics except in an evaluation."""
        evaluating = NOW.get().evaluating
        statistics = self.state_dict()

        # An evaluation without a training before it uses its own statistics
        if evaluating and not self.count:
            _warn_once("%s: no training has made statistics yet, so an evaluation normalizes by its own", self.__name__)
        if not evaluating or not self.count:
            self._update(scores)

        mean = 0.0
        if self.center:
            mean = self.mean
        divisor = 1.0
        if self.scale:
            divisor = _deviation(self.variance, self.mean)
        if evaluating:
            self.load_state_dict(statistics)
        return (scores - mean) / divisor

    def _update(self, scores: np.ndarray) -> None:
        """Merge mean and variance of a batch of scores, float64 ``[k]``, k > 0, into the running statistics."""
        self.count += len(scores)
        fraction = len(scores) / self.count
        delta = float(scores.mean()) - self.mean
        within = (1 - fraction) * self.variance + fraction * float(scores.var())
        between = fraction * (1 - fraction) * delta**2
        self.variance = within + between
        self.mean += fraction * delta

    def state_dict(self) -> dict[str, float]:
        """Return the running statistics, ready for JSON."""
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the statistics that `state_dict` returned."""
        self.count = int(state["count"])
        self.mean = float(state["mean"])
        self.variance = float(state["variance"])


def clip(function: Callable[..., object], low: float, high: float) -> Transform:
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
    return Transform(function, functools.partial(np.clip, a_min=low, a_max=high), by_batch=False)


def whiten(function: Callable[..., object], *, shift_mean: bool = True) -> Transform:
    """Scale the function's scores to population variance 1 in each batch; the mean becomes 0 if ``shift_mean``.

    If all scores are equal, the divisor is 1. None stays None. Raises the same error as `Normalize`.

    Example:
        >>> rate = whiten(lambda completions: [len(text) for text in completions])
        >>> rate(prompts=["a"] * 2, completions=["b", "bcd"])
        [-1.0, 1.0]
    """

    def change(scores: np.ndarray) -> np.ndarray:
        mean = float(scores.mean())
        whitened = (scores - mean) / _deviation(float(scores.var()), mean)
        if shift_mean:
            return whitened + 0.0  # without negative zeros
        return whitened + mean

    return Transform(function, change, by_batch=True)


@runtime_checkable
class ByBatch(Protocol):
    """A reward function that declares whether its score of a row depends on other rows; any function may."""

    by_batch: bool


def depends_on_batch(function: object) -> bool:
    """Return True if a reward function declares that its score of a row depends on other rows (`ByBatch`).

    Example:
        >>> depends_on_batch(clip(whiten(len), 0, 1)), depends_on_batch(clip(len, 0, 1))
        (True, False)
    """
    return isinstance(function, ByBatch) and function.by_batch


def _deviation(variance: float, mean: float) -> float:
    """Return the standard deviation, or 1 if it is 0 up to rounding."""
    deviation = math.sqrt(variance)
    if deviation > 1e-8 * max(1.0, abs(mean)):
        return deviation
    return 1.0
