"""Flatten observations of any fixed size into one Box, the input of policies, and give the parts back.

`algos.collection` flattens what it collects, and policies flatten what they are asked to act on. The parts of a Dict or
Tuple come in the order and with the sizes of `gymnasium.spaces.flatten`; `unflatten` returns them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from algos.envs.spaces import check_readable

if TYPE_CHECKING:
    from torch import Tensor


NOT_IN_TORCH = frozenset([np.dtype("uint16"), np.dtype("uint32"), np.dtype("uint64")])
"""Dtypes in which torch can hold numbers but not write into a tensor."""


def flat_shape(space: spaces.Space, reader: str = "a policy") -> tuple[int, ...]:
    """Shape of an observation as policies read it: a Box's own, otherwise ``(gymnasium.spaces.flatdim(space),)``.

    Args:
        space: space of one observation.
        reader: name of the policy, for the error message.

    Raises:
        ValueError: if a policy cannot read it; see `algos.envs.spaces.check_readable`.

    Example:
        >>> flat_shape(spaces.Discrete(16)), flat_shape(spaces.Box(0, 1, (2, 3)))
        ((16,), (2, 3))
    """
    check_readable(space, reader)
    if isinstance(space, spaces.Box):
        return space.shape
    return (spaces.flatdim(space),)


def flatten(space: spaces.Space, observation: Any) -> np.ndarray:
    """Flatten a batch of observations; Box observations and already flattened ones keep their values.

    Args:
        space: space of one observation.
        observation: batch from a vector environment: an array ``[N, *]``, or several in a dictionary or tuple.

    Returns:
        For a Box the array itself (of the dtypes `NOT_IN_TORCH` as float32); otherwise float32 ``[N, size]``, each
        row equal to `gymnasium.spaces.flatten`: discrete parts one-hot, parts concatenated.

    Example:
        >>> flatten(spaces.Discrete(3, start=5), np.array([5, 7]))
        array([[1., 0., 0.],
               [0., 0., 1.]], dtype=float32)
    """
    if isinstance(space, spaces.Box):
        # At every step of an environment, so by the dtype: its name takes longer than an action
        return observation.astype(np.float32) if space.dtype in NOT_IN_TORCH else observation
    if is_flat(space, observation):
        return observation.astype(np.float32, copy=False)
    return np.concatenate(_flat_columns(space, observation), axis=1, dtype=np.float32)


def is_flat(space: spaces.Space, observation: object) -> bool:
    """Whether a batch of observations of a space other than Box has been flattened by `flatten` already."""
    if not isinstance(observation, np.ndarray) or observation.shape[1:] != flat_shape(space):
        return False
    # A MultiDiscrete whose parts have one choice each is as long as its one-hot form, which is float32.
    return observation.shape[1:] != space.shape or observation.dtype == np.float32


def flatten_one(space: spaces.Space, observation: object) -> np.ndarray:
    """Flatten a single observation; see `flatten`."""
    if isinstance(space, spaces.Box):
        return flatten(space, np.asarray(observation))
    # Not by `gymnasium.spaces.flatten`, which cannot flatten a MultiDiscrete of uint64
    empty = create_empty_array(space, 1)
    assert empty is not None  # it is, for a space that Gymnasium does not know
    return flatten(space, concatenate(space, [observation], empty))[0]


def unflatten(space: spaces.Space, flat: Tensor) -> Any:
    """Take flattened observations apart: the inverse of `flatten`, for networks that treat the parts differently.

    Args:
        space: space of one observation, such as a policy's ``observation_space``.
        flat: flattened observations ``[*, size]``, any leading dimensions: a rollout's ``observation``, or
            ``torch.from_numpy(flatten(space, observation))`` of what `Policy.act` gets.

    Returns:
        For a Dict a dictionary, for a Tuple a tuple of the parts, otherwise one tensor: of a Box or MultiBinary
        ``[*, *shape]`` of the dtype of ``flat``, of a Discrete int64 ``[*]``, of a MultiDiscrete int64 ``[*, *shape]``,
        with their values in the environment.

    Raises:
        ValueError: if the last dimension is not the space's flat size.

    Example:
        >>> space = spaces.Dict({"door": spaces.Discrete(3), "speed": spaces.Box(-1, 1, (2,))})
        >>> import torch
        >>> unflatten(space, torch.tensor([[0.0, 1.0, 0.0, 0.5, -0.5]]))
        {'door': tensor([1]), 'speed': tensor([[ 0.5000, -0.5000]])}
    """
    if isinstance(space, spaces.Box):
        return flat  # its observations are not flattened
    if flat.shape[-1:] != flat_shape(space):
        raise ValueError(
            f"the observations have shape {tuple(flat.shape)}, expected [*, {flat_shape(space)[0]}], as `flatten` "
            f"returns them for {space}"
        )
    return _parts(space, flat)


def _parts(space: spaces.Space, flat: Tensor) -> object:
    """Parts of flattened observations ``[*, size]``; see `unflatten`."""
    # Several parts, one beside the other
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = _spaces_of_parts(space)
        columns = flat.split([spaces.flatdim(part) for part in parts], dim=-1)
        values = [_parts(part, column) for part, column in zip(parts, columns, strict=True)]
        if isinstance(space, spaces.Dict):
            return dict(zip(space, values, strict=True))
        return tuple(values)

    # Choices, one-hot
    if isinstance(space, spaces.Discrete):
        return flat.argmax(-1) + int(space.start)
    leading = flat.shape[:-1]
    shape = space.shape or ()
    if isinstance(space, spaces.MultiDiscrete):
        import torch  # not above: environments are made without it

        choices = flat.split(space.nvec.ravel().tolist(), dim=-1)
        start = torch.tensor(space.start.ravel().tolist(), device=flat.device)
        chosen = torch.stack([choice.argmax(-1) for choice in choices], dim=-1)
        return (chosen + start).reshape(*leading, *shape)

    # Numbers
    return flat.reshape(*leading, *shape)


def _spaces_of_parts(space: spaces.Dict | spaces.Tuple) -> list[spaces.Space]:
    if isinstance(space, spaces.Dict):
        return list(space.values())
    return list(space)


def _flat_columns(space: spaces.Space, observation: Any) -> list[np.ndarray]:
    """Flattened parts of a batch, ``[N, size]`` each."""
    # Several parts
    columns: list[np.ndarray] = []
    if isinstance(space, spaces.Dict):
        for name, part in space.items():
            columns += _flat_columns(part, observation[name])
        return columns
    if isinstance(space, spaces.Tuple):
        for part, values in zip(space, observation, strict=True):
            columns += _flat_columns(part, values)
        return columns

    # One part. Python integers, because start + n overflows in a short dtype such as int8
    rows = np.asarray(observation)
    rows = rows.reshape(len(rows), -1)
    if isinstance(space, spaces.Discrete):
        return [_one_hot(rows, start=int(space.start), count=int(space.n))]
    if isinstance(space, spaces.MultiDiscrete):
        choices = zip(rows.T, space.nvec.ravel().tolist(), space.start.ravel().tolist(), strict=True)
        return [_one_hot(column[:, None], start=start, count=count) for column, count, start in choices]
    return [rows]


def _one_hot(values: np.ndarray, *, start: int, count: int) -> np.ndarray:
    """Bool ``[N, count]`` of integers ``[N, 1]`` from ``start`` on."""
    end = start + count
    dtype = np.int64 if end < 2**63 else np.uint64
    return values == np.arange(start, end, dtype=dtype)
