"""Policies by name, and the default policy for an environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from gymnasium.vector import VectorEnv

from textenv.device import find_device

if TYPE_CHECKING:
    import torch

    from algos.policies.policy import Policy

CONTROL_POLICIES = {
    "mlp": "algos.policies.mlp:MLPPolicy", "cnn": "algos.policies.cnn:CNNPolicy",
    "lstm": "algos.policies.lstm:LSTMPolicy", "gsde": "algos.policies.gsde:GSDEPolicy",
    "q": "algos.policies.q_network:QPolicy",
}  # fmt: skip
"""Module and class, by name, of all policies that are saved as one weights file and JSON arguments."""
if TYPE_CHECKING:
    PolicyName = str
else:
    PolicyName = Literal[("auto", *CONTROL_POLICIES)]
    """Values of ``--policy``."""


def find_policy(name: str) -> Any:
    """Class of a control policy, by key in `CONTROL_POLICIES` or class name; ValueError if unknown."""
    for short, home in CONTROL_POLICIES.items():
        if name in (short, home.partition(":")[2]):
            return resolve_name(home)
    raise ValueError(f"policy is {name!r}, expected one of auto, {', '.join(CONTROL_POLICIES)}")


def make_policy(
    env: VectorEnv,
    *,
    policy: PolicyName = "auto",
    model: str = "embedded",
    seed: int = 1,
    device: str | torch.device | None = None,
    **options: Any,
) -> Policy:
    """Make a policy for an environment.

    Args:
        env: environment whose spaces the policy takes.
        policy: name of the policy; ``auto`` means a language model for text, a CNN for images, else an MLP.
        model: for text only: the model, as in `LMPolicy.load`.
        seed: seed of the initial weights and of action sampling.
        device: where to move the policy (`textenv.device.find_device`); None leaves it on the CPU.
        options: further constructor arguments of the policy.

    Raises:
        ValueError: if the choices do not fit the environment, or there is no such device.
    """
    place = find_device(device)
    from textenv.rollout import is_episode_env

    if is_episode_env(env):
        if policy != "auto":
            raise ValueError(f"policy is {policy!r}, but a text environment needs a language model: leave it out")
        from algos.policies.lm import LMPolicy

        return _construct(LMPolicy.load, model, seed=seed, **_dtypes(options)).to(place)
    if model != "embedded":
        raise ValueError(
            f"model is {model!r}, a language model, but {type(env).__name__} is no text environment: leave it out"
        )
    observation_space, action_space = env.single_observation_space, env.single_action_space
    if policy == "auto":
        from algos.policies.cnn import is_image

        policy = "cnn" if is_image(observation_space) else "mlp"
    return _construct(find_policy(policy), observation_space, action_space, seed=seed, **options).to(place)


def _dtypes(options: dict[str, Any]) -> dict[str, Any]:
    """Replace dtype names, as on a command line, by torch dtypes in a language model's options."""
    import torch

    known = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    named = {name: options[name] for name in ("dtype", "autocast") if isinstance(options.get(name), str)}
    for name, value in named.items():
        if value not in known:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    return options | {name: known[value] for name, value in named.items()}


def _construct(make: Callable[..., Policy], *given: Any, **options: Any) -> Policy:
    """Call a policy's constructor; raises a ValueError if the options do not match its signature."""
    try:
        inspect.signature(make).bind(*given, **options)
    except TypeError as error:
        known = ", ".join(inspect.signature(make).parameters)
        raise ValueError(f"{make.__qualname__}: {error}; its arguments are {known}") from error
    return make(*given, **options)
