"""`Learner`: what the training needs of an agent."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor

from algos.collection import Collector
from algos.config import Config
from algos.policies.fitted_value import FittedValue
from algos.policies.normalizers import RewardNormalizer
from algos.policies.policy import Policy
from algos.training.metrics import LeftOut, Metrics
from textenv.kl.penalty import KLPenalty

ConfigT_co = TypeVar("ConfigT_co", bound=Config, covariant=True)


class StateValues(NamedTuple):
    """Values of the states of a rollout, where a step may be several tokens (`algos.vine`)."""

    value: Tensor
    """Value of the state before the step that an entry belongs to: float32 ``[B, T]``, 0 outside the mask."""
    next_value: Tensor
    """The same within a step; at its last token the value of the state after it: float32 ``[B, T]``."""
    ends: Tensor
    """The last token of each step: bool ``[B, T]``."""
    metrics: Metrics
    """``update/steps``: tokens that were sampled for it."""


ValueEstimator = Callable[[Any, TensorDict], StateValues]
"""Function from an agent and its rollout to values of the states, such as an `algos.vine.Vine`."""


class Learner(Protocol[ConfigT_co]):
    """Type of an `algos.agent.Agent` in the files that `Agent` itself imports. `Agent` says what the members are."""

    env: VectorEnv
    policy: Policy
    collector: Collector
    penalty: KLPenalty | None
    reward_normalizer: RewardNormalizer | None
    fitted_value: FittedValue | None
    vine: ValueEstimator | None
    progress: float
    steps: int
    left_out: LeftOut

    @property
    def config(self) -> ConfigT_co:
        """See `Agent`."""

    def collect(self) -> TensorDict:
        """See `Agent.collect`."""

    def stop_exploring(self) -> None:
        """See `Agent.stop_exploring`."""

    def update(self, rollout: TensorDict) -> Metrics:
        """See `Agent.update`."""

    def state_dict(self) -> dict[str, object]:
        """See `Agent.state_dict`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Agent.load_state_dict`."""

    def save(self, folder: str | Path) -> Path:
        """See `Agent.save`."""
