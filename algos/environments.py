"""Environments and policies by name, for the command line."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from algos.flattening import flatten_observations
from algos.policy import Policy
from textenv.rollout import is_episode_env

PolicyName = Literal["auto", "mlp", "cnn", "lstm"]
"""What `make_policy` makes; ``auto`` is a CNN for images and two perceptrons for other control."""


def make_vector_environment(env_id: str, num_envs: int, **arguments: Any) -> VectorEnv:
    """The native vector environment where there is one, else one process stepping them in turn.

    Observations that are no Box are flattened into one; see `algos.flattening`.

    Raises:
        ValueError: if Gymnasium knows no such environment, it takes no such argument, or gives observations that
            cannot be flattened.
    """
    try:
        spec = gymnasium.spec(env_id)
        options: dict[str, Any] = {}
        if not spec.vector_entry_point:  # SAME_STEP wastes no step on a reset
            options = {"vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}}
        env = gymnasium.make_vec(env_id, num_envs=num_envs, **options, **arguments)
    except gymnasium.error.Error as error:
        known = ", ".join(sorted(name for name in gymnasium.registry if name.startswith("textenv/")))
        raise ValueError(
            f"cannot make environment {env_id!r}: {error} Text environments are {known}; "
            "gymnasium.pprint_registry() lists the others."
        ) from error
    return flatten_observations(env)


def is_text(env_id: str) -> bool:
    """Whether this is one of the registered text environments."""
    return env_id.startswith("textenv/")


def make_policy(
    env: VectorEnv,
    *,
    policy: PolicyName = "auto",
    model: str = "embedded",
    normalize_observations: bool = False,
    sde_sample_freq: int | None = None,
    log_std_init: float = 0.0,
    seed: int = 1,
) -> Policy:
    """A policy for this environment.

    Args:
        env: whose spaces it is made for.
        policy: which one; ``auto`` is a language model for text, a CNN for images, else two perceptrons.
        model: text only, as `LMPolicy.load` takes it.
        normalize_observations: of the perceptrons and the LSTM.
        sde_sample_freq: of the perceptrons where actions are a Box; see `MLPPolicy`.
        log_std_init: the same.
        seed: of initial weights and sampled actions.

    Raises:
        ValueError: if the choices do not fit the environment.
    """
    noise = sde_sample_freq is not None or log_std_init != 0
    if is_episode_env(env):
        if policy != "auto" or normalize_observations or noise:
            raise ValueError(
                "a text environment is played by a language model: leave policy, normalisation and noise out"
            )
        from algos.lm import LMPolicy

        return LMPolicy.load(model, seed=seed)
    from algos.cnn import CNNPolicy, is_image
    from algos.lstm import LSTMPolicy
    from algos.mlp import MLPPolicy

    observation_space, action_space = env.single_observation_space, env.single_action_space
    if policy == "auto":
        policy = "cnn" if is_image(observation_space) else "mlp"
    if noise and policy != "mlp":
        raise ValueError(f"sde_sample_freq and log_std_init are for the policy mlp, not {policy}: leave them out")
    if policy == "cnn":
        if normalize_observations:
            raise ValueError("images are divided by 255 and not normalised otherwise: leave normalize_observations out")
        return CNNPolicy(observation_space, action_space, seed=seed)
    if policy == "lstm":
        return LSTMPolicy(observation_space, action_space, normalize_observations=normalize_observations, seed=seed)
    if policy != "mlp":
        raise ValueError(f"policy is {policy!r}, expected auto, mlp, cnn or lstm")
    return MLPPolicy(
        observation_space,
        action_space,
        normalize_observations=normalize_observations,
        sde_sample_freq=sde_sample_freq,
        log_std_init=log_std_init,
        seed=seed,
    )


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
