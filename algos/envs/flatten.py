"""Observations of any fixed size as one Box, which is what policies read."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


def flat_shape(space: spaces.Space, reader: str = "a policy") -> tuple[int, ...]:
    """Shape of an observation as it is read: a Box's own, else the numbers of `gymnasium.spaces.flatten`.

    Args:
        space: of one observation.
        reader: who reads it, for the error.

    Raises:
        ValueError: if a part of it has no fixed size (Text, Sequence, Graph).

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
                f"observation_space is {space}, of which {reader} cannot read {part}, expected Box, Discrete, "
                "MultiDiscrete, MultiBinary, and Dict or Tuple of these: encode it by "
                "gymnasium.wrappers.TransformObservation"
            )
    return (spaces.flatdim(space),)


def flatten(space: spaces.Space, observation: Any) -> Any:
    """A batch of observations as they are read; those of a Box, and what was flattened already, come back as they are.

    Args:
        space: of one observation.
        observation: as a vector environment gives it: an array ``[N, *]``, or a dictionary or tuple of them.

    Returns:
        For a Box the array itself; else float32 ``[N, numbers]``, row by row what `gymnasium.spaces.flatten` gives:
        one-hot where it is discrete, parts side by side.

    Example:
        >>> flatten(spaces.Discrete(3, start=5), np.array([5, 7]))
        array([[1., 0., 0.],
               [0., 0., 1.]], dtype=float32)
    """
    if isinstance(space, spaces.Box):
        return observation
    if isinstance(observation, np.ndarray) and observation.shape[1:] == flat_shape(space):
        return observation.astype(np.float32, copy=False)
    return np.concatenate(_columns(space, observation), axis=1, dtype=np.float32)


def flatten_one(space: spaces.Space, observation: Any) -> Any:
    """As `flatten`, of a single observation."""
    if isinstance(space, spaces.Box):
        return observation
    return np.asarray(spaces.flatten(space, observation), dtype=np.float32)


def _columns(space: spaces.Space, observation: Any) -> list[np.ndarray]:
    """The parts of a batch, ``[N, numbers]`` each."""
    if isinstance(space, spaces.Dict):
        return [column for name, part in space.items() for column in _columns(part, observation[name])]
    if isinstance(space, spaces.Tuple):
        return [column for part, x in zip(space, observation, strict=True) for column in _columns(part, x)]
    rows = np.asarray(observation)
    rows = rows.reshape(len(rows), -1)
    if isinstance(space, spaces.Discrete):
        return [rows == np.arange(space.start, space.start + space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        choices = zip(rows.T, space.nvec.ravel(), space.start.ravel(), strict=True)
        return [column[:, None] == np.arange(start, start + count) for column, count, start in choices]
    return [rows]
