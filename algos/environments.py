"""Environments and policies by name, for the command line."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from algos.policy import Policy
from textenv.rollout import is_episode_env


def make_vector_environment(env_id: str, num_envs: int, **arguments: Any) -> VectorEnv:
    """The native vector environment where there is one, else one process stepping them in turn.

    Raises:
        ValueError: if Gymnasium knows no such environment, or it takes no such argument.
    """
    try:
        spec = gymnasium.spec(env_id)
        options: dict[str, Any] = {}
        if not spec.vector_entry_point:  # SAME_STEP wastes no step on a reset
            options = {"vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}}
        return gymnasium.make_vec(env_id, num_envs=num_envs, **options, **arguments)
    except gymnasium.error.Error as error:
        known = ", ".join(sorted(name for name in gymnasium.registry if name.startswith("textenv/")))
        raise ValueError(
            f"cannot make environment {env_id!r}: {error} Text environments are {known}; "
            "gymnasium.pprint_registry() lists the others."
        ) from error


def is_text(env_id: str) -> bool:
    """Whether this is one of the registered text environments."""
    return env_id.startswith("textenv/")


def make_policy(env: VectorEnv, *, model: str = "embedded", seed: int = 1) -> Policy:
    """A language model for a text environment, two perceptrons for the others."""
    if is_episode_env(env):
        from algos.lm import LMPolicy

        return LMPolicy.load(model, seed=seed)
    from algos.mlp import MLPPolicy

    return MLPPolicy(env.single_observation_space, env.single_action_space, seed=seed)


def remake_environment(description: dict[str, Any], *, num_envs: int) -> VectorEnv:
    """The environment of a saved agent, with the test split's prompts and the KL measured where it is text.

    Raises:
        ValueError: if the agent was trained on an environment that has no name.
    """
    saved = description["environment"]
    if saved is None:
        raise ValueError("this agent's environment was made by hand and has no name: use algos.evaluate(env, policy)")
    arguments = dict(saved["kwargs"])
    if is_text(saved["id"]):
        arguments["split"] = "test"
        arguments["kl_coefficient"] = arguments.get("kl_coefficient") or 0.0
    return make_vector_environment(saved["id"], num_envs, **arguments)
