"""`Learner`: interface of an agent for the learning loop, checkpoints and the optimizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict

from algos.collection import Collector
from algos.policies.normalizers import RewardNormalizer
from algos.policies.policy import Policy
from algos.ranks.sharding import Shards
from algos.training.metrics import Metrics
from textenv.kl.penalty import KLPenalty


class Learner(Protocol):
    """An agent under training; `algos.agent.Agent` implements it."""

    env: VectorEnv
    policy: Policy
    penalty: KLPenalty | None
    reward_normalizer: RewardNormalizer | None
    value_fit: dict[str, torch.Tensor]
    collector: Collector
    generator: torch.Generator
    """Generator for minibatch order."""
    shards: Shards | None
    progress: float
    """Training progress from 0 to 1."""
    steps: int
    """Steps of the training so far."""

    @property
    def config(self) -> Any:
        """Hyper-parameters of the algorithm, an `algos.config.Config`."""

    @property
    def optimizer(self) -> Any:
        """The optimizer, an `algos.optimizer.Optimizer`."""

    def collect(self) -> TensorDict:
        """Return the next rollout."""

    def update(self, rollout: TensorDict) -> Metrics:
        """Improve the policy on a rollout; return metrics."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes during training, except the environment."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def save(self, folder: str | Path) -> Path:
        """Write policy and config."""
