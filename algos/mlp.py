"""`MLPPolicy`: actor and critic as two multilayer perceptrons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from algos.control import count_actions, restore_policy, save_policy, step_divergence, step_values
from algos.distributions import Gaussian, action_distribution
from algos.layers import tower
from algos.normalizers import ObservationNormalizer
from algos.policy import Observation, Step, box_shape, frozen_copy
from textenv.rollout import Evaluation


class MLPPolicy(nn.Module):
    """Two towers with tanh: what the action distribution is made from (logits or a mean), and a value.

    Initialisation is orthogonal with gain √2, .01 for the actor's output and 1 for the critic's (Engstrom et al.
    2020, "Implementation matters in deep policy gradients"; Huang et al. 2022, "The 37 implementation details").

    Args:
        observation_space: of one environment, a Box.
        action_space: of one environment; see `algos.distributions`.
        hidden: width of each hidden layer.
        normalize_observations: True scales them by their running mean and variance; see `update_normalizer`.
        seed: of the initial weights and of the sampled actions.

    Raises:
        ValueError: on another kind of space.

    Example:
        >>> policy = MLPPolicy(spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
        >>> policy.act(np.zeros((3, 4), dtype=np.float32)).action.shape
        torch.Size([3])
    """

    sequential = False

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        hidden: Sequence[int] = (64, 64),
        normalize_observations: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._shape = box_shape(observation_space, "MLPPolicy")
        self.distribution = action_distribution(action_space)
        self.observation_space, self.action_space, self.hidden = observation_space, action_space, tuple(hidden)
        size = math.prod(self._shape)
        self.generator = torch.Generator().manual_seed(seed)
        self.actor = tower(size, self.hidden, self.distribution.size, gain=0.01, generator=self.generator)
        self.critic = tower(size, self.hidden, 1, gain=1.0, generator=self.generator)
        self.normalizer = ObservationNormalizer(size) if normalize_observations else None

    @property
    def num_actions(self) -> int | None:
        """See `count_actions`."""
        return count_actions(self.action_space)

    @property
    def log_std(self) -> nn.Parameter:
        """Log standard deviation of each action dimension, float32 ``[size]``; AttributeError unless it is a Box."""
        if not isinstance(self.distribution, Gaussian):
            raise AttributeError(f"actions are {self.action_space}: only a Box has a standard deviation")
        return self.distribution.log_std

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        output = self.actor(self._read(torch.as_tensor(observation)))
        return Step(
            *self.distribution.sample(
                output, generator=self.generator, action_mask=action_mask, deterministic=deterministic
            )
        )

    def reset(self, rows: np.ndarray | None = None) -> None:
        """Nothing is remembered."""

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; any batch shape."""
        observation = self._read(rollout["observation"])
        value = self.critic(observation).squeeze(-1)
        action_mask = rollout.get("action_mask", None)
        log_prob, entropy = self.distribution.score(self.actor(observation), rollout["action"], action_mask)
        return Evaluation(log_prob, entropy, value)

    def divergence(self, rollout: TensorDict, other: MLPPolicy) -> Tensor:
        """See `Policy.divergence`; any batch shape."""
        return step_divergence(self, other, rollout)

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`."""
        return step_values(self._value, rollout)

    def output(self, rollout: TensorDict) -> Tensor:
        """What the action distributions of a rollout are made from, ``[*, size]``."""
        return self.actor(self._read(rollout["observation"]))

    def reference(self) -> MLPPolicy:
        """See `Policy.reference`: a frozen copy, normaliser included, with its statistics as they are."""
        return frozen_copy(self)

    def update_normalizer(self, rollout: TensorDict) -> None:
        """See `Policy.update_normalizer`."""
        if self.normalizer is not None:
            self.normalizer.add(self._flat(rollout["observation"][rollout["mask"]]))

    def save(self, folder: Path) -> dict[str, Any]:
        """See `Policy.save`."""
        return save_policy(self, folder, hidden=list(self.hidden), normalize_observations=self.normalizer is not None)

    @classmethod
    def load(cls, folder: Path, saved: dict[str, Any]) -> MLPPolicy:
        """Rebuild what `save` wrote."""
        box = spaces.Box(-np.inf, np.inf, tuple(saved["observation_shape"]), np.float32)
        return restore_policy(cls, box, folder, saved)

    def _value(self, observation: Tensor) -> Tensor:
        return self.critic(self._read(observation)).squeeze(-1)

    def _read(self, observation: Tensor) -> Tensor:
        """What the networks are given: flat, float32, normalised."""
        flat = self._flat(observation)
        return flat if self.normalizer is None else self.normalizer(flat)

    def _flat(self, observation: Tensor) -> Tensor:
        """Flatten the observation's own dimensions, whatever stands before them."""
        if len(self._shape) != 1:
            observation = observation.reshape(*observation.shape[: observation.ndim - len(self._shape)], -1)
        return observation.to(torch.float32)
