"""Running statistics: of observations, inside a policy, and of discounted returns, beside an agent."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

EPSILON = 1e-8
"""Added to every variance, as in Gymnasium and Stable-Baselines3."""
CLIP = 10.0
"""Normalised observations beyond this many standard deviations are cut off, as in Stable-Baselines3."""


class RunningMoments(nn.Module):
    """Mean and variance of all that was ever seen, float64 ``[size]``; 0 and 1 before anything was.

    Args:
        size: of one sample.

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
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))

    @torch.no_grad()
    def add(self, samples: Tensor) -> None:
        """Take samples ``[n, size]`` in (Chan, Golub and LeVeque 1979, the parallel formula)."""
        if not len(samples):
            return
        variance, mean = torch.var_mean(samples.to(self.mean), dim=0, correction=0)
        count = self.count + len(samples)
        share = len(samples) / count
        delta = mean - self.mean
        self.variance = (1 - share) * self.variance + share * variance + share * (1 - share) * delta.square()
        self.mean = self.mean + share * delta
        self.count = count


class ObservationNormalizer(RunningMoments):
    """Observations to mean 0 and variance 1, cut off at 10."""

    def forward(self, observation: Tensor) -> Tensor:
        """Normalise ``[*, size]``; a gradient passes."""
        scale = (self.variance + EPSILON).rsqrt()
        shifted = (observation - self.mean.to(observation.dtype)) * scale.to(observation.dtype)
        return shifted.clamp(-CLIP, CLIP)


class RewardNormalizer:
    """Divides rewards by the running standard deviation of the discounted return (Engstrom et al. 2020, §2).

    The return runs along each slot, over the rollouts, from an episode's beginning to its end:
    ``R_t = r_t + γ R_{t-1}``. No mean is subtracted. All of a rollout is divided by one number, the deviation with
    this rollout taken in: that of Gymnasium's ``NormalizeReward`` and Stable-Baselines3's ``VecNormalize``, which
    divide each step by what they know so far.

    Args:
        gamma: discount a step.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self.moments = RunningMoments(1)
        self.running = torch.zeros(0, dtype=torch.float64)
        """``[B]``: the return so far of the episode under way in each slot."""

    def __call__(self, rollout: TensorDict) -> Tensor:
        """Take a rollout in; returns its scaled rewards, float32 ``[B, T]``. The rollout is left as it is."""
        reward, mask, is_init = (rollout[name] for name in ("reward", "mask", "is_init"))
        running = self.running.to(mask.device)
        if len(running) != len(mask):
            running = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
        returns = []
        for t in range(mask.shape[1]):
            running = torch.where(is_init[:, t], 0.0, running)
            running = torch.where(mask[:, t], self.gamma * running + reward[:, t], running)
            returns.append(running)
        self.running = running
        self.moments.to(mask.device).add(torch.stack(returns, dim=1)[mask].unsqueeze(1))
        return reward / (self.moments.variance + EPSILON).sqrt().to(reward.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Everything that was learnt, for JSON."""
        tensors = self.moments.state_dict() | {"running": self.running}
        return {name: x.tolist() for name, x in tensors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        tensors = {name: torch.tensor(x, dtype=torch.float64) for name, x in state.items()}
        self.running = tensors.pop("running")
        self.moments.load_state_dict(tensors)
