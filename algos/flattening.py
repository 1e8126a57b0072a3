"""Observations of any fixed size as one Box, which is what policies read."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, iterate

from textenv.rollout import is_episode_env


class FlattenedObservations(VectorWrapper):
    """Each slot's observation by `gymnasium.spaces.flatten`: one-hot where it is Discrete, parts side by side.

    Gymnasium's own ``wrappers.vector.FlattenObservation`` refuses environments in SAME_STEP mode; here the final
    observations in ``info["final_obs"]`` are flattened too, and all three modes work.

    Args:
        env: a vector environment whose observations have a fixed size.

    Raises:
        ValueError: if they have not.

    Example:
        >>> import gymnasium
        >>> env = FlattenedObservations(gymnasium.make_vec("FrozenLake-v1", num_envs=3))
        >>> env.reset(seed=0)[0].shape
        (3, 16)
    """

    def __init__(self, env: VectorEnv) -> None:
        _check_flattenable(env.single_observation_space, env)
        super().__init__(env)
        self.single_observation_space = spaces.flatten_space(env.single_observation_space)
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Reset, with the observation flattened."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._flatten(observation), info

    def step(self, actions: Any) -> tuple[np.ndarray, Any, Any, Any, dict[str, Any]]:
        """Step, with the observation and the final observations flattened."""
        observation, reward, terminated, truncated, info = self.env.step(actions)
        if "final_obs" in info:
            final = np.full(self.num_envs, None, dtype=object)
            for slot in np.flatnonzero(info["_final_obs"]):
                final[slot] = spaces.flatten(self.env.single_observation_space, info["final_obs"][slot])
            info = info | {"final_obs": final}
        return self._flatten(observation), reward, terminated, truncated, info

    def _flatten(self, observation: Any) -> np.ndarray:
        space = self.env.single_observation_space
        slots = iterate(self.env.observation_space, observation)
        return np.stack([np.asarray(spaces.flatten(space, x)) for x in slots])


def flatten_observations(env: VectorEnv) -> VectorEnv:
    """The environment in `FlattenedObservations`, unless it is one of text or shows a Box already.

    Raises:
        ValueError: if its observations have no fixed size.
    """
    if isinstance(env.single_observation_space, spaces.Box) or is_episode_env(env.unwrapped):
        return env
    return FlattenedObservations(env)


def _check_flattenable(space: spaces.Space, env: VectorEnv) -> None:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for part in space.values() if isinstance(space, spaces.Dict) else space:
            _check_flattenable(part, env)
    elif not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise ValueError(
            f"{env} observes {env.single_observation_space}, of which {space} cannot be flattened into a Box, expected "
            "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these: encode it by "
            "gymnasium.wrappers.TransformObservation"
        )
