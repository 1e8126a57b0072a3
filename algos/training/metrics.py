"""What is logged: means over the True entries of a rollout and over the minibatches of an update."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from textenv.rollout import masked_mean

Metrics = dict[str, float]
"""Numbers of one iteration by name."""


class EpisodeMeter:
    """Return and length of the episodes that end in a rollout; those under way are carried to the next one."""

    def __init__(self) -> None:
        self._total = np.zeros(0)
        self._steps = np.zeros(0, dtype=np.int64)
        self._open = np.zeros(0, dtype=bool)

    def finished(self, rollout: TensorDict) -> tuple[list[float], list[int]]:
        """Return (sum of ``reward``) and length (True entries) of each episode that ends here."""
        reward, mask, begins = (rollout[key].cpu().numpy() for key in ("reward", "mask", "is_init"))
        done = (rollout["terminated"] | rollout["truncated"]).cpu().numpy()
        if len(self._total) != len(mask):
            self._total, self._steps = np.zeros(len(mask)), np.zeros(len(mask), dtype=np.int64)
            self._open = np.zeros(len(mask), dtype=bool)
        # An entry is inside an episode if what happened last before it was a beginning and not an end. Times are
        # counted in halves, and what was carried over came first.
        times = np.arange(1, 2 * mask.shape[1], 2)
        begun = np.maximum.accumulate(np.where(begins, times, np.where(self._open, 0, -1)[:, None]), axis=1)
        ended = np.maximum.accumulate(np.where(done, times + 1, -1), axis=1)
        inside = begun > np.concatenate([np.full((len(mask), 1), -1), ended[:, :-1]], axis=1)
        # Rewards on False entries inside an episode count; what follows its end does not.
        starts = begins.copy()
        starts[:, 0] = True
        part = starts.cumsum().reshape(starts.shape) - 1
        first = np.flatnonzero(starts)
        totals = np.add.reduceat(np.where(inside, reward.astype(np.float64), 0.0).ravel(), first)
        steps = np.add.reduceat((inside & mask).astype(np.int64).ravel(), first)
        carried = ~begins[:, 0]
        totals[part[carried, 0]] += self._total[carried]
        steps[part[carried, 0]] += self._steps[carried]
        # An end without a step that is a beginning too is where an environment failed: it finished nothing.
        finished = part.T[(inside & done & ~(begins & ~mask)).T]  # in the order of time
        self._total, self._steps = totals[part[:, -1]], steps[part[:, -1]]
        self._open = inside[:, -1] & ~done[:, -1]
        return totals[finished].tolist(), steps[finished].tolist()


class MetricMeans:
    """MetricMeans of quantities over the minibatches of an update, read off the device once at the end."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = defaultdict(list)
        self.count = 0
        """Minibatches so far."""
        self.skipped = 0
        """Those of them whose step was not taken."""

    def add(self, values: dict[str, Tensor]) -> None:
        """Take one value of each quantity, a scalar without gradient; none at all if the step was skipped."""
        self.count += 1
        self.skipped += not values
        for name, value in values.items():
            self._values[name].append(value)

    def result(self) -> dict[str, float]:
        """Mean of each quantity, and ``update/skipped``, the number of steps that were not taken."""
        means = {name: torch.stack(values).double().mean().item() for name, values in self._values.items()}
        return means | {"update/skipped": self.skipped}


def ratio_metrics(log_ratio: Tensor, *, share: Tensor, clip_range: float | None, first: bool) -> dict[str, Tensor]:
    """How far a minibatch has moved from the old policy.

    Args:
        log_ratio: 0 where the mask is False.
        share: one over the True entries of the whole minibatch, at each of them; 0 elsewhere.
        clip_range: of the loss; None where the policy takes one step and has not moved.
        first: True before the first step of an update, where the policy is the one that acted.

    Returns:
        ``policy/approx_kl``, nats a step, mean of ``ratio - 1 - log ratio`` (Schulman 2020, k3), and
        ``policy/clip_frac``, the share of ratios outside the clip range. The first time also ``policy/sampler_gap``,
        nats a step: mean distance of the log-probabilities when sampled and when scored.
    """
    gap = {"policy/sampler_gap": (log_ratio.abs() * share).sum()} if first else {}
    if clip_range is None:
        return gap
    change = log_ratio.expm1()
    return gap | {
        "policy/approx_kl": ((change - log_ratio) * share).sum(),
        "policy/clip_frac": ((change.abs() > clip_range) * share).sum(),
    }


def rollout_metrics(rollout: TensorDict) -> dict[str, float]:
    """What a rollout with advantages says about itself, over its True entries; of its values, if it has any."""
    mask = rollout["mask"]
    metrics: dict[str, float] = {"rollout/empty_rows": int((~mask.any(dim=1)).sum())}
    if not mask.any():
        return metrics
    metrics |= {
        "advantage/mean": masked_mean(rollout["advantage"], mask=mask).item(),
        "advantage/std": rollout["advantage"][mask].std(correction=0).item(),
    }
    if "value_target" not in rollout.keys():
        return metrics
    value, target = rollout["value"], rollout["value_target"]
    return metrics | {
        "value/explained_variance": explained_variance(value=value, value_target=target, mask=mask),
        "value/mean": masked_mean(value, mask=mask).item(),
    }


def group_metrics(rollout: TensorDict) -> dict[str, float]:
    """How many rows are silent: they have steps, but their group's episodes all earned the same."""
    names, place = rollout["group"][:, 0].unique(return_inverse=True)
    # One row alone may have earned just what it was compared with, so the whole group is asked.
    heard = rollout["advantage"].any(dim=1).int()
    heard_in_group = heard.new_zeros(len(names)).index_add_(0, place, heard)[place] > 0
    return {"rollout/silent_rows": int((rollout["mask"].any(dim=1) & ~heard_in_group).sum())}


def explained_variance(*, value: Tensor, value_target: Tensor, mask: Tensor) -> float:
    """1 - var(target - value) / var(target) over the True entries; 0 where the target does not vary."""
    target, error = value_target[mask], (value_target - value)[mask]
    variance = target.var(correction=0)
    return (1 - error.var(correction=0) / variance).item() if variance > 1e-12 else 0.0


def reference_metrics(rollout: TensorDict, *, coefficient: float) -> dict[str, float]:
    """KL to the reference in nats a finished episode (text: a response) and a step, and the coefficient."""
    total = torch.where(rollout["mask"], rollout["kl"], 0).sum().item()
    episodes = int((rollout["terminated"] | rollout["truncated"]).sum())
    return {
        "reference/kl": total / max(episodes, 1),
        "reference/kl_per_step": total / max(int(rollout["mask"].sum()), 1),
        "reference/coefficient": coefficient,
    }
