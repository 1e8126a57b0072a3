"""What control policies have in common: saving, and what is read off single steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from algos.distributions import ActionDistribution
from algos.policy import check_same_kind

WEIGHTS = "policy.safetensors"
"""File of a control policy's weights."""
BOX_DTYPES = ("float32", "float64", "float16", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32")
"""Dtypes that a saved Box may have."""
AnyPolicy = TypeVar("AnyPolicy", bound=nn.Module)


class StepPolicy(Protocol):
    """A policy whose action distribution at a step is made from that step's observation alone."""

    @property
    def distribution(self) -> ActionDistribution:
        """What its output becomes."""
        ...

    def output(self, rollout: TensorDict) -> Tensor:
        """What the action distributions of a rollout are made from, ``[*, size]``."""
        ...


def count_actions(space: spaces.Space) -> int | None:
    """Actions to choose from; None where they cannot be counted off."""
    return int(space.n) if isinstance(space, spaces.Discrete) else None


def save_policy(policy: Any, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Write the weights; returns what `restore_policy` needs, for JSON: the spaces, and the further arguments."""
    from safetensors.torch import save_model

    save_model(policy, str(folder / WEIGHTS))
    observation, action = (describe_space(space) for space in (policy.observation_space, policy.action_space))
    return {"observation": observation, "action": action} | arguments


def restore_policy(make: Callable[..., AnyPolicy], folder: Path, saved: dict[str, Any]) -> AnyPolicy:
    """Rebuild what `save_policy` wrote, by the policy's class."""
    from safetensors.torch import load_model

    arguments = {name: x for name, x in saved.items() if name not in ("observation", "action")}
    policy = make(restore_space(saved["observation"]), restore_space(saved["action"]), **arguments)
    load_model(policy, str(folder / WEIGHTS))
    return policy


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


def step_divergence(policy: StepPolicy, other: StepPolicy, rollout: TensorDict) -> Tensor:
    """Exact KL(policy‖other) at each step, nats, of any batch shape; see `Policy.divergence`."""
    check_same_kind(policy, other)
    with torch.no_grad():
        theirs = other.output(rollout)
    return policy.distribution.divergence(
        policy.output(rollout), theirs, other=other.distribution, action_mask=rollout.get("action_mask", None)
    )


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
