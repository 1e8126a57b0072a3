"""Running statistics: of observations (part of a policy) and of discounted returns (for an agent's rewards)."""

from collections.abc import Mapping

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

EPSILON = 1e-8
"""Added to every variance, as in Gymnasium and Stable-Baselines3."""
CLIP = 10.0
"""Normalized observations are clipped to this many standard deviations, as in Stable-Baselines3."""


class RunningMoments(nn.Module):
    """Running mean and variance of all samples, float64 ``[size]``; 0 and 1 before the first sample.

    Args:
        size: length of one sample.

    Example:
        >>> moments = RunningMoments(1)
        >>> moments.add(torch.tensor([[1.0], [3.0]]))
        >>> moments.mean.item(), moments.variance.item()
        (2.0, 1.0)
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64, device="cpu"))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64, device="cpu"))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64, device="cpu"))

    @torch.no_grad()
    def add(self, samples: Tensor) -> None:
        """Add samples ``[n, size]`` by the parallel formula of Chan, Golub and LeVeque 1979."""
        if not len(samples):
            return
        variance, mean = torch.var_mean(samples.to(self.mean), dim=0, correction=0)
        count = self.count + len(samples)
        weight = len(samples) / count
        delta = mean - self.mean
        self.variance = (1 - weight) * self.variance + weight * variance + weight * (1 - weight) * delta.square()
        self.mean = self.mean + weight * delta
        self.count = count


class ObservationNormalizer(RunningMoments):
    """Normalize observations to mean 0 and variance 1, clipped to ±10.

    Args:
        size: length of one flat observation.
        columns: int64 ``[k]``, the columns to normalize; the others stay, such as pixels. None: all.
    """

    columns: Tensor | None

    def __init__(self, size: int, columns: Tensor | None = None) -> None:
        num_normalized = size
        if columns is not None:
            num_normalized = len(columns)
        super().__init__(num_normalized)
        # Not saved: they come from the observation space
        self.register_buffer("columns", columns, persistent=False)

    def selected(self, samples: Tensor) -> Tensor:
        """Columns that have statistics, ``[n, k]``, of flat observations ``[n, size]``."""
        return samples if self.columns is None else samples[:, self.columns]

    def forward(self, observation: Tensor) -> Tensor:
        """Normalize ``[*, size]``; differentiable."""
        if self.columns is None:
            return self._normalize(observation)
        normalized = observation.clone()
        normalized[..., self.columns] = self._normalize(observation[..., self.columns])
        return normalized

    def _normalize(self, observation: Tensor) -> Tensor:
        """Normalize the columns that have statistics, ``[*, k]``."""
        scale = (self.variance + EPSILON).rsqrt()
        shifted = (observation - self.mean.to(observation.dtype)) * scale.to(observation.dtype)
        return shifted.clamp(-CLIP, CLIP)


class RewardNormalizer:
    """Divide rewards by the running standard deviation of the discounted return (Engstrom et al. 2020, §2).

    The return of each slot accumulates from the start of an episode to the end, across rollouts:
    ``R_t = r_t + γ R_{t-1}``. No mean is subtracted. All rewards of a rollout are divided by one number, the standard
    deviation after this rollout. Gymnasium's ``NormalizeReward`` and Stable-Baselines3's ``VecNormalize`` use the same
    statistic, but divide each reward by the deviation at that step.

    Args:
        gamma: discount factor per step.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self.moments = RunningMoments(1)
        self.running = torch.zeros(0, dtype=torch.float64, device="cpu")
        """``[B]``: discounted return of each slot's current episode up to now."""

    def __call__(self, rollout: TensorDict) -> Tensor:
        """Add a rollout to the statistics; return its scaled rewards, float32 ``[B, T]``, in a new tensor."""
        # In NumPy, which is fastest in a loop over small arrays
        reward = rollout["reward"].cpu().numpy().astype(np.float64)
        mask = rollout["mask"].cpu().numpy()
        is_init = rollout["is_init"].cpu().numpy()

        # Discounted return at each step; a slot begins anew if the number of slots changed
        running = self.running.numpy()
        if len(running) != len(mask):
            running = np.zeros(len(mask))
        returns = np.empty(mask.shape)
        for t in range(mask.shape[1]):
            running = np.where(is_init[:, t], 0.0, running)
            with np.errstate(all="ignore"):  # rewards that are not finite are reported elsewhere
                running = np.where(mask[:, t], self.gamma * running + reward[:, t], running)
            returns[:, t] = running
        self.running = torch.from_numpy(running)

        # Scale
        self.moments.add(torch.from_numpy(returns[mask])[:, None])
        deviation = (self.moments.variance + EPSILON).sqrt()
        return rollout["reward"] / deviation.to(rollout["reward"])

    def state_dict(self) -> dict[str, object]:
        """Return statistics and running returns, for JSON."""
        tensors = self.moments.state_dict() | {"running": self.running}
        return {name: x.tolist() for name, x in tensors.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state from `state_dict`."""
        tensors = {name: torch.tensor(x, dtype=torch.float64, device="cpu") for name, x in state.items()}
        self.running = tensors.pop("running")
        self.moments.load_state_dict(tensors)
