"""What a policy is: the one interface between algorithms and networks."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor, nn

from algos.envs.flatten import flat_shape
from textenv.rollout import Evaluation, Reference, is_episode_env

Observation = np.ndarray | dict[str, np.ndarray]
CONTROL_POLICIES = {
    "mlp": "algos.policies.mlp:MLPPolicy", "cnn": "algos.policies.cnn:CNNPolicy",
    "lstm": "algos.policies.lstm:LSTMPolicy",
    "q": "algos.policies.q_network:QPolicy",
}  # fmt: skip
"""Where the policies live that one file of weights and JSON arguments restore."""


class Step(NamedTuple):
    """One action a slot."""

    action: Tensor
    """int64 ``[N]`` (Discrete) or ``[N, *]`` (MultiDiscrete, MultiBinary), or float32 ``[N, *]`` (Box)."""
    log_prob: Tensor
    """Log-probability under the distribution that the action was drawn from, float32 ``[N]``, nats."""
    state: Tensor | None = None
    """What a recurrent policy remembered before this action, ``[N, *]``, without gradient; None from the others."""


class Policy(Protocol):
    """Acts in slots and scores rollouts. Algorithms know `sequential` and nothing else about its kind."""

    sequential: bool
    """Minibatch unit: True for whole rows, False for single steps."""
    generator: torch.Generator
    """Source of every sampled action."""

    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """Choose an action for each slot; keeps whatever state the next call needs."""
        ...

    def reset(self, rows: np.ndarray | None = None, *, seeds: np.ndarray | None = None) -> None:
        """Forget what is remembered of these slots (bool ``[N]``), or of all.

        Args:
            rows: which.
            seeds: int64 ``[N]``, given for texts: from now on these slots draw their actions from a stream of uniform
                numbers that belongs to the episode, so that it does not depend on what is played beside it. None
                goes back to ``generator``. A policy that cannot do so raises a ValueError.
        """
        ...

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """Log-probability, entropy and (never None here) value of the rollout's actions and states; differentiable."""
        ...

    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """Value of each state and of the one after it (`textenv.rollout`), ``[B, T]`` each; no gradient."""
        ...

    def reference(self) -> Reference:
        """The policy as it is now, which no optimiser touches: what a KL penalty refers to."""
        ...

    def divergence(self, rollout: TensorDict, other: Any) -> Tensor:
        """Exact KL(self‖other) at the rollout's True entries, nats, differentiable in self alone.

        The other is a reference of the same kind; masks and temperature count as in `evaluate`.
        """
        ...

    def update_normalizer(self, rollout: TensorDict) -> None:
        """Take a rollout's observations (True entries) into the running statistics, if there are any.

        Called once after every update: what `act` normalised by stays in force to the last epoch.
        """
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimiser trains."""
        ...

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """Those of them that only the value depends on: a critic or a value head."""
        ...

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the weights into a folder; returns the JSON-able rest that `algos.load` needs."""
        ...


AnyPolicy = TypeVar("AnyPolicy", bound=nn.Module)


def frozen_copy(policy: AnyPolicy) -> AnyPolicy:
    """A copy that shares neither weights nor random numbers, remembers nothing and does not train."""
    copied: Any = copy.deepcopy(policy).requires_grad_(False)
    copied.reset()
    return copied


def check_same_kind(policy: Any, other: Any) -> None:
    """Raise a TypeError unless another policy's distributions can be compared with this one's, action by action."""
    if type(other) is not type(policy):
        raise TypeError(
            f"the exact KL of a {type(policy).__name__} needs a reference of its kind, not {type(other).__name__}: "
            "pass policy.reference(), or take an estimator that only needs log-probabilities (k1, k2)"
        )


def numpy_action(action: Tensor) -> np.ndarray:
    """The action as an environment wants it."""
    return action.cpu().numpy()


def find_policy(name: str) -> Any:
    """The class of a control policy, by its name in `CONTROL_POLICIES` or its class's; raises a ValueError."""
    for short, home in CONTROL_POLICIES.items():
        module, _, own = home.partition(":")
        if name in (short, own):
            return getattr(importlib.import_module(module), own)
    raise ValueError(f"policy is {name!r}, expected auto, {', '.join(CONTROL_POLICIES)}")


def check_spaces(env: VectorEnv, policy: Any) -> None:
    """Refuse a policy that was made for other observations or actions than the environment has.

    Raises:
        TypeError: on a control policy for text.
        ValueError: on spaces of all slots, or of another environment.
    """
    read, chosen = getattr(policy, "observation_space", None), getattr(policy, "action_space", None)
    if read is None:
        return
    name, single = type(policy).__name__, env.single_observation_space
    if is_episode_env(env):
        raise TypeError(f"a {name} cannot read text in whole episodes: take an algos.LMPolicy")
    batched = (read, env.observation_space, single), (chosen, env.action_space, env.single_action_space)
    if any(own == of_all and own != of_one for own, of_all, of_one in batched):
        raise ValueError(
            f"the {name} was made from the spaces of all {env.num_envs} slots ({read}, {chosen}): make it from "
            "env.single_observation_space and env.single_action_space"
        )
    if flat_shape(read, name) != flat_shape(single, name):
        raise ValueError(f"the {name} reads {read}, the environment shows {single}: make it from the same space")
