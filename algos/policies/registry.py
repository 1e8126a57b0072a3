"""Policies by name, and the one that fits an environment."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gymnasium.vector import VectorEnv

from algos.config import PolicyName

if TYPE_CHECKING:
    from algos.policies.policy import Policy

CONTROL_POLICIES = {
    "mlp": "algos.policies.mlp:MLPPolicy", "cnn": "algos.policies.cnn:CNNPolicy",
    "lstm": "algos.policies.lstm:LSTMPolicy",
    "q": "algos.policies.q_network:QPolicy",
}  # fmt: skip
"""Where the policies live that one file of weights and JSON arguments restore."""


def find_policy(name: str) -> Any:
    """The class of a control policy, by its name in `CONTROL_POLICIES` or its class's; raises a ValueError."""
    for short, home in CONTROL_POLICIES.items():
        module, _, own = home.partition(":")
        if name in (short, own):
            return getattr(importlib.import_module(module), own)
    raise ValueError(f"policy is {name!r}, expected auto, {', '.join(CONTROL_POLICIES)}")


def make_policy(
    env: VectorEnv, *, policy: PolicyName = "auto", model: str = "embedded", seed: int = 1, **options: Any
) -> Policy:
    """A policy for this environment.

    Args:
        env: whose spaces it is made for.
        policy: which one; ``auto`` is a language model for text, a CNN for images, else two perceptrons.
        model: text only, as `LMPolicy.load` takes it.
        seed: of initial weights and sampled actions.
        options: further arguments of that policy's class.

    Raises:
        ValueError: if the choices do not fit the environment.
    """
    from textenv.rollout import is_episode_env

    if is_episode_env(env):
        if policy != "auto":
            raise ValueError(
                f"policy is {policy!r}, but a text environment is played by a language model: leave it out"
            )
        from algos.policies.lm import LMPolicy

        return _construct(LMPolicy.load, model, seed=seed, **_dtypes(options))
    observation_space, action_space = env.single_observation_space, env.single_action_space
    if policy == "auto":
        from algos.policies.cnn import is_image

        policy = "cnn" if is_image(observation_space) else "mlp"
    return _construct(find_policy(policy), observation_space, action_space, seed=seed, **options)


def _dtypes(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a language model in which dtypes may stand by name, as on a command line."""
    import torch

    known = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    named = {name: options[name] for name in ("dtype", "autocast") if isinstance(options.get(name), str)}
    for name, value in named.items():
        if value not in known:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    return options | {name: known[value] for name, value in named.items()}


def _construct(make: Callable[..., Policy], *given: Any, **options: Any) -> Policy:
    """Call a policy's constructor; an option that it does not know is wrong input, not a bug."""
    try:
        inspect.signature(make).bind(*given, **options)
    except TypeError as error:
        known = ", ".join(inspect.signature(make).parameters)
        raise ValueError(f"{make.__qualname__}: {error}; its arguments are {known}") from error
    return make(*given, **options)
