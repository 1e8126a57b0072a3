"""What a policy is: the one interface between algorithms and networks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor, nn

from algos.envs.flatten import flat_shape
from algos.policies.distributions import ActionDistribution
from algos.policies.normalizers import ObservationNormalizer
from algos.policies.random_streams import refuse_seeds
from textenv.rollout import Evaluation, Reference, is_episode_env

Observation = np.ndarray | dict[str, np.ndarray]


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


def check_spaces(env: VectorEnv, policy: Any) -> None:
    """Refuse a policy that was made for other observations or actions than the environment has.

    Raises:
        TypeError: on a control policy for text.
        ValueError: on spaces of all slots, or of another environment.
    """
    read, chosen = getattr(policy, "observation_space", None), getattr(policy, "action_space", None)
    if read is None or chosen is None:
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
    if not _same_actions(chosen, env.single_action_space):
        raise ValueError(
            f"the {name} chooses from {chosen}, the environment takes {env.single_action_space}: make it from the same "
            "space"
        )


def _same_actions(one: spaces.Space, other: spaces.Space) -> bool:
    """Whether two spaces hold actions of one kind; limits of a Box are not saved with a policy."""
    both = isinstance(one, spaces.Box) and isinstance(other, spaces.Box)
    return one.shape == other.shape if both else one == other


WEIGHTS = "policy.safetensors"
"""File of a control policy's weights."""
BOX_DTYPES = ("float32", "float64", "float16", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32")
"""Dtypes that a saved Box may have."""


class ControlPolicy(nn.Module):
    """What all policies for control share; a subclass has ``distribution``, networks, `act`, `evaluate` and `output`.

    Args:
        observation_space: of one environment; other spaces than a Box are read as `algos.envs.flatten` says.
        action_space: of one environment; see `algos.policies.distributions`.
        normalize_observations: True scales them by their running mean and variance; see `update_normalizer`.
        seed: of the initial weights and of the sampled actions.

    Raises:
        ValueError: on an observation space without a fixed size.
    """

    sequential = False
    distribution: ActionDistribution
    critic: nn.Module

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Space, *, normalize_observations: bool, seed: int
    ) -> None:
        super().__init__()
        self._shape = flat_shape(observation_space, type(self).__name__)
        self.observation_space, self.action_space = observation_space, action_space
        self.generator = torch.Generator().manual_seed(seed)
        self.normalizer = ObservationNormalizer(math.prod(self._shape)) if normalize_observations else None

    @property
    def num_actions(self) -> int | None:
        """Actions to choose from; None where they cannot be counted off."""
        return int(self.action_space.n) if isinstance(self.action_space, spaces.Discrete) else None

    def reset(self, rows: np.ndarray | None = None, *, seeds: np.ndarray | None = None) -> None:
        """Nothing is remembered."""
        refuse_seeds(seeds, self)

    def output(self, rollout: TensorDict) -> Tensor:
        """What the action distributions of a rollout are made from, ``[*, size]``."""
        raise NotImplementedError

    def value(self, observation: Tensor) -> Tensor:
        """Value of observations ``[*batch, *]``, ``[*batch]``."""
        raise NotImplementedError

    def divergence(self, rollout: TensorDict, other: Any) -> Tensor:
        """See `Policy.divergence`; any batch shape."""
        check_same_kind(self, other)
        with torch.no_grad():
            theirs = other.output(rollout)
        return self.distribution.divergence(
            self.output(rollout), theirs, other=other.distribution, action_mask=rollout.get("action_mask", None)
        )

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`."""
        return step_values(self.value, rollout)

    def reference(self) -> Self:
        """See `Policy.reference`: a frozen copy, the normaliser's statistics included, as they are."""
        return frozen_copy(self)

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """See `Policy.value_parameters`."""
        return self.critic.parameters()

    def update_normalizer(self, rollout: TensorDict) -> None:
        """See `Policy.update_normalizer`."""
        if self.normalizer is not None:
            self.normalizer.add(self._flat(rollout["observation"][rollout["mask"]]))

    def arguments(self) -> dict[str, Any]:
        """What a policy is made with besides its spaces, for JSON."""
        raise NotImplementedError

    def save(self, folder: Path) -> dict[str, Any]:
        """See `Policy.save`."""
        from safetensors.torch import save_model

        save_model(self, str(folder / WEIGHTS))
        observation, action = (describe_space(space) for space in (self.observation_space, self.action_space))
        return {"observation": observation, "action": action} | self.arguments()

    @classmethod
    def load(cls, folder: Path, saved: dict[str, Any]) -> Self:
        """Rebuild what `save` wrote; it remembers nothing."""
        from safetensors.torch import load_model

        arguments = {name: x for name, x in saved.items() if name not in ("observation", "action")}
        policy = cls(restore_space(saved["observation"]), restore_space(saved["action"]), **arguments)
        load_model(policy, str(folder / WEIGHTS))
        return policy

    def _read(self, observation: Tensor) -> Tensor:
        """What the networks are given: flat, float32, normalised."""
        flat = self._flat(observation)
        return flat if self.normalizer is None else self.normalizer(flat)

    def _flat(self, observation: Tensor) -> Tensor:
        """Flatten the observation's own dimensions, whatever stands before them."""
        if len(self._shape) != 1:
            observation = observation.reshape(*observation.shape[: observation.ndim - len(self._shape)], -1)
        return observation if observation.dtype is torch.float32 else observation.to(torch.float32)


def describe_space(space: spaces.Space) -> dict[str, Any]:
    """What `restore_space` needs, for JSON."""
    if isinstance(space, spaces.Dict):
        return {"dict": [[name, describe_space(part)] for name, part in space.items()]}
    if isinstance(space, spaces.Tuple):
        return {"tuple": [describe_space(part) for part in space]}
    if isinstance(space, spaces.Discrete):
        return {"n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"choices": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"binary": list(space.shape)}
    return {"shape": list(space.shape or ()), "dtype": str(space.dtype)}


def restore_space(saved: dict[str, Any]) -> spaces.Space:
    """A space that is read and acted on alike; the bounds of a Box are forgotten.

    Raises:
        ValueError: on another dtype of a Box than environments have.
    """
    if "dict" in saved:
        return spaces.Dict({name: restore_space(part) for name, part in saved["dict"]})
    if "tuple" in saved:
        return spaces.Tuple([restore_space(part) for part in saved["tuple"]])
    if "n" in saved:
        return spaces.Discrete(saved["n"], start=saved.get("start", 0))
    if "choices" in saved:
        choices = np.array(saved["choices"])
        return spaces.MultiDiscrete(choices, start=np.array(saved.get("start", np.zeros_like(choices))))
    if "binary" in saved:
        return spaces.MultiBinary(saved["binary"])
    dtype = saved.get("dtype", "float32")
    if dtype not in BOX_DTYPES:
        raise ValueError(f"a Box of {dtype!r:.50} was saved, expected one of {', '.join(BOX_DTYPES)}")
    low, high = (-np.inf, np.inf) if dtype.startswith("float") else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, tuple(saved["shape"]), np.dtype(dtype).type)


def step_values(value_of: Callable[[Tensor], Tensor], rollout: TensorDict) -> tuple[Tensor, Tensor]:
    """Value of each observation and of the one after it, ``[B, T]`` each; see `Policy.values`.

    Args:
        value_of: from observations ``[*batch, *]`` to values ``[*batch]``.
        rollout: ``[B, T]``.
    """
    value = value_of(rollout["observation"])
    following = torch.cat([value[:, 1:], value[:, -1:]], dim=1)
    # The next row's observation is the successor, but where an episode was cut or the rollout ends.
    cut = rollout["truncated"] | rollout["terminated"]
    cut[:, -1] = True
    following[cut] = value_of(rollout["next_observation"][cut])
    return value, following
