"""Logged metrics: means over the True entries of a rollout and over the minibatches of an update."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from textenv.rollout import join_episodes, masked_mean

Metrics = dict[str, float]
"""Metrics of one iteration by name."""
StepMetrics = dict[str, Tensor]
"""Metrics of one minibatch by name, scalars; of a part of a minibatch, its share of them, so that parts add up."""


class LeftOut(NamedTuple):
    """Episodes that were generated for a rollout, but are not learnt from (`algos.refills`)."""

    returns: Sequence[float] = ()
    """Return of each episode."""
    lengths: Sequence[int] = ()
    """Steps of each episode."""
    steps: int = 0
    """Their steps (True entries)."""
    turns: int = 0
    """Their turns (text)."""
    metrics: Mapping[str, float] = {}
    """Counts for the log, by name."""


class EpisodeMeter:
    """Return and length of the episodes that end in a rollout; unfinished ones are carried over to the next one."""

    def __init__(self) -> None:
        # Of each row's last episode so far; `_open` is False if that has ended
        self._total = np.zeros(0)
        self._steps = np.zeros(0, dtype=np.int64)
        self._open = np.zeros(0, dtype=bool)

    def finished(self, rollout: TensorDict) -> tuple[list[float], list[int]]:
        """Return (sum of ``reward``) and length (True entries) of each episode that ends here."""
        rollout = join_episodes(rollout)
        reward, mask, begins = (rollout[key].cpu().numpy() for key in ("reward", "mask", "is_init"))
        done = (rollout["terminated"] | rollout["truncated"]).cpu().numpy()
        if len(self._total) != len(mask):
            self._total = np.zeros(len(mask))
            self._steps = np.zeros(len(mask), dtype=np.int64)
            self._open = np.zeros(len(mask), dtype=bool)

        # An entry is inside an episode if the last event before it was a start, not an end. In column t, a start comes
        # before the entry, at time 2t + 1, and an end after it, at time 2t + 2. An episode that is carried over has
        # started at 0, and -1 means never.
        start_times = np.arange(1, 2 * mask.shape[1], 2)
        carried_start = np.where(self._open, 0, -1)[:, None]
        last_start = np.maximum.accumulate(np.where(begins, start_times, carried_start), axis=1)
        last_end = np.maximum.accumulate(np.where(done, start_times + 1, -1), axis=1)
        never = np.full((len(mask), 1), -1)
        end_before = np.concatenate([never, last_end[:, :-1]], axis=1)
        inside = last_start > end_before

        # Cut the rows into segments, each from one start to the next, or from the first column. Add up each segment's
        # rewards: those on False entries inside an episode count, those after its end do not.
        starts = begins.copy()
        starts[:, 0] = True
        segment = starts.cumsum().reshape(starts.shape) - 1
        segment_starts = np.flatnonzero(starts)
        counted_reward = np.where(inside, reward.astype(np.float64), 0.0)
        counted_steps = (inside & mask).astype(np.int64)
        totals = np.add.reduceat(counted_reward.ravel(), segment_starts)
        steps = np.add.reduceat(counted_steps.ravel(), segment_starts)

        # The first segment of a row may go on with an episode of the last rollout
        goes_on = ~begins[:, 0]
        totals[segment[goes_on, 0]] += self._total[goes_on]
        steps[segment[goes_on, 0]] += self._steps[goes_on]

        # A False entry with both a start and an end marks a failed environment: no episode finished.
        has_failed = begins & ~mask
        is_finish = inside & done & ~has_failed
        finished = segment.T[is_finish.T]  # in time order
        last_segment = segment[:, -1]
        self._total = totals[last_segment]
        self._steps = steps[last_segment]
        self._open = inside[:, -1] & ~done[:, -1]
        return totals[finished].tolist(), steps[finished].tolist()


def ending_metrics(rollout: TensorDict) -> Metrics:
    """How the episodes of a rollout ended, by name.

    Returns:
        ``episode/truncated``, the fraction of the finished episodes that a limit ended; absent if none finished. And
        ``rollout/failed_episodes``, the number of episodes whose environment failed; absent if none did.
    """
    rollout = join_episodes(rollout)
    done = rollout["terminated"] | rollout["truncated"]
    has_failed = done & rollout["is_init"] & ~rollout["mask"]  # as in `EpisodeMeter.finished`
    finished = done & ~has_failed
    metrics: Metrics = {}
    if finished.any():
        by_limit = finished & ~rollout["terminated"]
        metrics["episode/truncated"] = int(by_limit.sum()) / int(finished.sum())
    if has_failed.any():
        metrics["rollout/failed_episodes"] = int(has_failed.sum())
    return metrics


class MetricMeans:
    """Means of quantities over the minibatches of an update, read off the device once at the end."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = defaultdict(list)
        self.count = 0
        """Minibatches so far."""
        self.skipped = 0
        """Minibatches whose step was skipped."""

    def add(self, values: dict[str, Tensor]) -> None:
        """Add one value per quantity, a scalar without gradient; an empty dictionary if the step was skipped."""
        self.count += 1
        self.skipped += not values
        for name, value in values.items():
            self._values[name].append(value)

    def result(self) -> dict[str, float]:
        """Return the mean of each quantity, and ``update/skipped``, the number of skipped steps."""
        means: dict[str, float] = {}
        if self._values:
            # All quantities in one copy from the device; one of an own loss may be on another
            counts = [len(values) for values in self._values.values()]
            values = list(itertools.chain.from_iterable(self._values.values()))
            device = values[0].device
            numbers = torch.stack([value.to(device) for value in values]).cpu().double()
            for name, of_minibatches in zip(self._values, numbers.split(counts), strict=True):
                means[name] = of_minibatches.mean().item()
        return means | {"update/skipped": self.skipped}


def minibatch_means(batch: TensorDict, entries: dict[str, Tensor]) -> StepMetrics:
    """Mean of each quantity over the True entries of a minibatch; of a part of it, its share of the mean.

    Args:
        batch: the minibatch or part, with the column ``log_weight``.
        entries: one number per entry, 0 where the mask is False.
    """
    weight = batch["log_weight"].flatten()
    stacked = torch.stack([x.detach().flatten().to(weight.dtype) for x in entries.values()])
    means = stacked @ weight
    return dict(zip(entries, means.unbind(), strict=True))


def sampler_gap(batch: TensorDict, log_ratio: Tensor) -> StepMetrics:
    """Mean absolute difference between log-probabilities when sampled and when scored, nats per step.

    For the first minibatch of an update, while the policy is the one that acted.
    """
    return {"policy/sampler_gap": (log_ratio.detach().abs() * batch["log_weight"]).sum()}


def ratio_metrics(
    batch: TensorDict, log_ratio: Tensor, *, clip_range: float, clip_higher: float | None = None
) -> StepMetrics:
    """Distance between the policy and the old policy on a minibatch.

    Args:
        batch: the minibatch, or a part of it, with the column ``log_weight``.
        log_ratio: 0 where the mask is False.
        clip_range: ε of the loss; ratios are clipped to [1 - ε, 1 + ε].
        clip_higher: ε of the upper bound; None: ``clip_range``.

    Returns:
        ``policy/approx_kl``, nats per step, mean of ``ratio - 1 - log ratio`` (Schulman 2020, k3), and
        ``policy/clip_frac``, the fraction of ratios outside the clip range.
    """
    log_ratio = log_ratio.detach()
    weight = batch["log_weight"]
    change = log_ratio.expm1()
    if clip_higher is None:
        clip_higher = clip_range
    is_clipped = (change < -clip_range) | (change > clip_higher)
    return {
        "policy/approx_kl": ((change - log_ratio) * weight).sum(),
        "policy/clip_frac": (is_clipped * weight).sum(),
    }


def rollout_metrics(rollout: TensorDict) -> dict[str, float]:
    """Advantage statistics of a rollout over its True entries, and value statistics if it has values."""
    mask = rollout["mask"]
    has_steps = mask.any(dim=1)
    metrics: dict[str, float] = {
        "rollout/rows": int(has_steps.sum()),
        "rollout/empty_rows": int((~has_steps).sum()),
    }
    if not mask.any():
        return metrics
    metrics |= {
        "advantage/mean": masked_mean(rollout["advantage"], mask=mask).item(),
        "advantage/std": rollout["advantage"][mask].std(correction=0).item(),
    }
    if "staleness" in rollout.keys():
        metrics["rollout/staleness"] = masked_mean(rollout["staleness"].float(), mask=mask).item()
    if "value_target" not in rollout.keys():
        return metrics

    # Values, if there are any
    value = rollout["value"]
    target = rollout["value_target"]
    squared_error = (target - value)[mask].square().mean().item()
    variance = target[mask].var(correction=0).item()
    return metrics | {
        "value/mean": masked_mean(value, mask=mask).item(),
        "value/relative_error": squared_error / max(variance, 1e-12),  # 1: no better than the mean target
        "value/explained_variance": explained_variance(value=value, value_target=target, mask=mask),
    }


def count_turns(mask: Tensor) -> int:
    """Return the number of turns in a text rollout: of stretches of neighbouring True entries of ``mask``, ``[B, T]``.

    Between two turns stands the environment's reply, whose entries are False.

    Example:
        >>> count_turns(torch.tensor([[False, True, True, False, True], [True, False, False, False, False]]))
        3
    """
    begins = mask[:, 1:] & ~mask[:, :-1]
    return int(begins.sum()) + int(mask[:, 0].sum())


def group_metrics(rollout: TensorDict) -> dict[str, float]:
    """Number of silent rows: they have steps, but all episodes of their group have the same return."""
    groups, index = rollout["group"][:, 0].unique(return_inverse=True)
    # A single row may equal its baseline by chance, so the whole group is checked.
    has_signal = rollout["advantage"].any(dim=1).int()
    rows_with_signal = has_signal.new_zeros(len(groups)).index_add_(0, index, has_signal)
    silent = rows_with_signal[index] == 0
    has_steps = rollout["mask"].any(dim=1)
    return {"rollout/silent_rows": int((has_steps & silent).sum())}


def explained_variance(*, value: Tensor, value_target: Tensor, mask: Tensor) -> float:
    """1 - var(target - value) / var(target) over the True entries; 0 where the target does not vary."""
    variance = value_target[mask].var(correction=0)
    if not variance > 1e-12:
        return 0.0
    error = (value_target - value)[mask]
    return (1 - error.var(correction=0) / variance).item()


def reference_metrics(rollout: TensorDict, *, coefficient: float) -> dict[str, float]:
    """KL to the reference in nats per finished episode (text: a completion) and per step, and the coefficient."""
    total = torch.where(rollout["mask"], rollout["kl"], 0).sum().item()
    episodes = int((rollout["terminated"] | rollout["truncated"]).sum())
    return {
        "reference/kl": total / max(episodes, 1),
        "reference/kl_per_step": total / max(int(rollout["mask"].sum()), 1),
        "reference/coefficient": coefficient,
    }
