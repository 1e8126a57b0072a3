"""What control policies have in common: saving, and what is read off single steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from algos.distributions import ActionDistribution, describe_action_space, restore_action_space
from algos.policy import check_same_kind

WEIGHTS = "policy.safetensors"
"""File of a control policy's weights."""
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
    shape, action = list(policy.observation_space.shape), describe_action_space(policy.action_space)
    return {"observation_shape": shape, "action": action} | arguments


def restore_policy(
    make: Callable[..., AnyPolicy], observation_space: spaces.Space, folder: Path, saved: dict[str, Any]
) -> AnyPolicy:
    """Rebuild what `save_policy` wrote, by the policy's class."""
    from safetensors.torch import load_model

    arguments = {name: x for name, x in saved.items() if name not in ("observation_shape", "action")}
    policy = make(observation_space, restore_action_space(saved["action"]), **arguments)
    load_model(policy, str(folder / WEIGHTS))
    return policy


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
