"""Flatten observations of any fixed size into one Box, the input of policies.

`algos.collection` flattens what it collects, and policies flatten what they are asked to act on. The parts of a Dict or
Tuple come in the order and with the sizes of `gymnasium.spaces.flatten`.
"""

from typing import Any

import numpy as np
from gymnasium import spaces


def flat_shape(space: spaces.Space, reader: str = "a policy") -> tuple[int, ...]:
    """Shape of an observation as policies read it: a Box's own, otherwise ``(gymnasium.spaces.flatdim(space),)``.

    Args:
        space: space of one observation.
        reader: name of the policy, for the error message.

    Raises:
        ValueError: if a part of the space has no fixed size (Text, Sequence, Graph).

    Example:
        >>> flat_shape(spaces.Discrete(16)), flat_shape(spaces.Box(0, 1, (2, 3)))
        ((16,), (2, 3))
    """
    if isinstance(space, spaces.Box):
        return space.shape
    parts = [space]
    for part in parts:
        if isinstance(part, (spaces.Dict, spaces.Tuple)):
            parts += part.values() if isinstance(part, spaces.Dict) else part
        elif not isinstance(part, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise ValueError(
                f"observation_space is {space}, but {reader} cannot read {part}, expected Box, Discrete, "
                "MultiDiscrete, MultiBinary, and Dict or Tuple of these: wrap it, on the command line by --wrapper "
                "module:function, such as minigrid.wrappers:ImgObsWrapper (in Python "
                "gymnasium.make_vec(id, num_envs=8, wrappers=[...]))"
            )
    return (spaces.flatdim(space),)


def flatten(space: spaces.Space, observation: Any) -> Any:
    """Flatten a batch of observations; Box observations and already flattened ones keep their values.

    Args:
        space: space of one observation.
        observation: batch from a vector environment: an array ``[N, *]``, or several in a dictionary or tuple.

    Returns:
        For a Box the array itself; otherwise float32 ``[N, size]``, each row equal to `gymnasium.spaces.flatten`:
        discrete parts one-hot, parts concatenated.

    Example:
        >>> flatten(spaces.Discrete(3, start=5), np.array([5, 7]))
        array([[1., 0., 0.],
               [0., 0., 1.]], dtype=float32)
    """
    if isinstance(space, spaces.Box):
        return observation
    if isinstance(observation, np.ndarray) and observation.shape[1:] == flat_shape(space):
        return observation.astype(np.float32, copy=False)
    return np.concatenate(_flat_columns(space, observation), axis=1, dtype=np.float32)


def flatten_one(space: spaces.Space, observation: Any) -> Any:
    """Flatten a single observation; see `flatten`."""
    if isinstance(space, spaces.Box):
        return observation
    return np.asarray(spaces.flatten(space, observation), dtype=np.float32)


def _flat_columns(space: spaces.Space, observation: Any) -> list[np.ndarray]:
    """Flattened parts of a batch, ``[N, size]`` each."""
    if isinstance(space, spaces.Dict):
        return [column for name, part in space.items() for column in _flat_columns(part, observation[name])]
    if isinstance(space, spaces.Tuple):
        return [column for part, x in zip(space, observation, strict=True) for column in _flat_columns(part, x)]
    rows = np.asarray(observation)
    rows = rows.reshape(len(rows), -1)
    if isinstance(space, spaces.Discrete):
        return [rows == np.arange(space.start, space.start + space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        choices = zip(rows.T, space.nvec.ravel(), space.start.ravel(), strict=True)
        return [column[:, None] == np.arange(start, start + count) for column, count, start in choices]
    return [rows]
