"""`Learner`: what the learning loop, checkpoints and the optimizer know about an agent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gymnasium.vector import VectorEnv
from tensordict import TensorDict

from algos.config import Config
from algos.policies.policy import Policy
from algos.training.metrics import Metrics
from textenv.kl.penalty import KLPenalty


class Learner(Protocol):
    """An agent under training; `algos.agent.Agent` implements it."""

    env: VectorEnv
    policy: Policy
    penalty: KLPenalty | None
    cursor: Any
    progress: float

    @property
    def config(self) -> Config:
        """Hyper-parameters."""
        ...

    def collect(self) -> TensorDict:
        """Return the next rollout."""
        ...

    def update(self, rollout: TensorDict) -> Metrics:
        """Improve the policy on a rollout; return metrics."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes during training, except the environment."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...

    def save(self, folder: str | Path) -> Path:
        """Write policy and config."""
        ...
