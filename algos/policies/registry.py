"""Policies by name, and the default policy for an environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal

from gymnasium.vector import VectorEnv

from textenv.device import find_device
from textenv.embedded.folder import EMBEDDED

if TYPE_CHECKING:
    import torch

    from algos.policies.policy import ControlPolicy, Policy

CONTROL_POLICIES = {
    "mlp": "algos.policies.mlp:MLPPolicy", "cnn": "algos.policies.cnn:CNNPolicy",
    "multi_input": "algos.policies.multi_input:MultiInputPolicy",
    "lstm": "algos.policies.lstm:LSTMPolicy", "gsde": "algos.policies.gsde:GSDEPolicy",
    "q": "algos.policies.q_network:QPolicy", "sac": "algos.policies.twin_critics:SACPolicy",
    "sac_gsde": "algos.policies.gsde:SACGSDEPolicy",
    "td3": "algos.policies.twin_critics:TD3Policy", "words": "algos.policies.words:WordsPolicy",
}  # fmt: skip
"""Module and class of each policy for control, by name."""
if TYPE_CHECKING:
    PolicyName = str  # type checkers do not accept a `Literal` of names that are computed
else:
    PolicyName = Literal[("auto", *CONTROL_POLICIES)]
    """Values of ``--policy``."""


def find_policy(name: str) -> type[ControlPolicy]:
    """Import a control policy's class, by key in `CONTROL_POLICIES` or class name; raise a ValueError if unknown."""
    for short_name, path in CONTROL_POLICIES.items():
        _, _, class_name = path.partition(":")
        if name in (short_name, class_name):
            return resolve_name(path)
    raise ValueError(f"policy is {name!r}, expected one of auto, {', '.join(CONTROL_POLICIES)}")


def make_policy(
    env: VectorEnv,
    *,
    policy: PolicyName = "auto",
    model: str | None = None,
    seed: int = 1,
    device: str | torch.device | None = None,
    **options: object,
) -> Policy:
    """Make a policy for an environment.

    Args:
        env: the environment; the policy gets its spaces.
        policy: name of the policy; ``auto`` means a language model for text; for control ``words`` if a model is named,
            else a CNN for images, `MultiInputPolicy` for a Dict or Tuple with images in it, and an MLP for other
            observations.
        model: language model for text and for ``words``, as in `LMPolicy.load`. None: the embedded one.
        seed: seed of the initial weights and of action sampling.
        device: where to move the policy (`textenv.device.find_device`); None leaves it on the CPU.
        options: further constructor arguments of the policy.

    Raises:
        ValueError: if the choices do not fit the environment, or there is no such device.
    """
    from textenv.rollout import is_episode_env  # loads torch

    target_device = find_device(device)

    # Text
    if is_episode_env(env):
        if policy != "auto":
            raise ValueError(f"policy is {policy!r}, but a text environment needs a language model: leave it out")
        from algos.policies.lm import LMPolicy

        return _construct(LMPolicy.load, model or EMBEDDED, seed=seed, **_with_dtypes(options)).to(target_device)

    # Control
    observation_space = env.single_observation_space
    action_space = env.single_action_space
    if policy == "auto":
        from algos.envs.images import has_images, is_image

        if model is not None:
            policy = "words"
        elif is_image(observation_space):
            policy = "cnn"
        elif has_images(observation_space):
            policy = "multi_input"
        else:
            policy = "mlp"
    policy_class = find_policy(policy)
    if policy == "words":
        from algos.policies.words import WordsPolicy

        return _construct(WordsPolicy.of, env, model or EMBEDDED, seed=seed, **_with_dtypes(options)).to(target_device)
    if model is not None:
        raise ValueError(
            f"model is {model!r}, a language model, but policy is {policy!r}, which has none: leave model out, or give "
            "policy='words'"
        )
    return _construct(policy_class, observation_space, action_space, seed=seed, **options).to(target_device)


def _with_dtypes(options: Mapping[str, object]) -> dict[str, object]:
    """Replace dtype names, as on a command line, by torch dtypes in a copy of a language model's options."""
    import torch

    dtypes = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    with_dtypes = dict(options)
    for name in ("dtype", "autocast"):
        dtype_name = options.get(name)
        if isinstance(dtype_name, str):
            if dtype_name not in dtypes:
                raise ValueError(f"{name} is {dtype_name!r}, expected one of {', '.join(dtypes)}")
            with_dtypes[name] = dtypes[dtype_name]
    return with_dtypes


def _construct(make: Callable[..., Policy], *arguments: object, **options: object) -> Policy:
    """Call a policy's constructor; raise a ValueError if the arguments do not match its signature."""
    signature = inspect.signature(make)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        expected = ", ".join(signature.parameters)
        raise ValueError(f"{make.__qualname__}: {error}; its arguments are {expected}") from error
    return make(*arguments, **options)
