"""Flatten observations of any fixed size into one Box, the input of policies, and give the parts back.

`algos.collection` flattens what it collects, and policies flatten what they are asked to act on. The parts of a Dict or
Tuple come in the order and with the sizes of `gymnasium.spaces.flatten`; `unflatten` returns them.

A Dict or Tuple with images in it is packed, so that a pixel takes one byte instead of four: its flat observations are
uint8 ``[N, bytes]``, first the bytes of all other numbers, which are float32, then the pixels. `unpack` returns the
float32 form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from algos.envs.images import BYTES, check_pixels, has_images, is_image, leaf_spaces
from algos.envs.spaces import check_readable

if TYPE_CHECKING:
    from torch import Tensor


NOT_IN_TORCH = frozenset([np.dtype("uint16"), np.dtype("uint32"), np.dtype("uint64")])
"""Dtypes in which torch can hold numbers but not write into a tensor."""
FLOAT32_BYTES = 4
"""Bytes of a number, beside pixels, in a packed observation."""


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
        For a Box the array itself (of the dtypes `NOT_IN_TORCH` as float32); with images among the parts, uint8
        ``[N, bytes]``, see `unpack`; otherwise float32 ``[N, size]``, each row equal to `gymnasium.spaces.flatten`:
        discrete parts one-hot, parts concatenated.

    Raises:
        ValueError: if a value is not in a Discrete or MultiDiscrete space, a part of a Dict is missing, or a part has
            another shape than its space, or floats where that has pixels.

    Example:
        >>> flatten(spaces.Discrete(3, start=5), np.array([5, 7]))
        array([[1., 0., 0.],
               [0., 0., 1.]], dtype=float32)
    """
    if isinstance(space, spaces.Box):
        # At every step of an environment, so by the dtype: its name takes longer than an action
        return observation.astype(np.float32) if space.dtype in NOT_IN_TORCH else observation
    if is_packed(space, observation):
        return observation
    if is_flat(space, observation):
        return observation.astype(np.float32, copy=False)
    if has_images(space):
        return _pack(space, observation)
    return np.concatenate(_flat_columns(space, observation), axis=1, dtype=np.float32)


def is_flat(space: spaces.Space, observation: object) -> bool:
    """Whether a batch of observations of a space other than Box has been flattened by `flatten` already."""
    if not isinstance(observation, np.ndarray) or observation.shape[1:] != flat_shape(space):
        return False
    # A MultiDiscrete whose parts have one choice each is as long as its one-hot form, which is float32.
    return observation.shape[1:] != space.shape or observation.dtype == np.float32


def packed_size(space: spaces.Space) -> int:
    """Length of a packed observation, bytes; 0 for a space whose observations are not packed.

    Example:
        >>> packed_size(spaces.Dict({"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "door": spaces.Discrete(3)}))
        204
    """
    if not isinstance(space, (spaces.Dict, spaces.Tuple)) or not has_images(space):
        return 0
    num_bytes = 0
    for leaf in leaf_spaces(space):
        bytes_of_number = 1 if is_image(leaf) else FLOAT32_BYTES
        num_bytes += bytes_of_number * spaces.flatdim(leaf)
    return num_bytes


def is_packed(space: spaces.Space, observation: object) -> bool:
    """Whether observations ``[*, bytes]``, an array or a tensor, are in the packed form of a space."""
    if isinstance(space, spaces.Box) or str(getattr(observation, "dtype", "")).rpartition(".")[2] != "uint8":
        return False
    num_bytes = packed_size(space)
    return num_bytes > 0 and tuple(getattr(observation, "shape", ()))[-1:] == (num_bytes,)


def unpack(space: spaces.Space, flat: Tensor) -> Tensor:
    """Convert packed observations ``[*, bytes]`` of a Dict or Tuple with images to float32 ``[*, size]``.

    The result is what `flatten` would return if pixels were not packed: each row equal to `gymnasium.spaces.flatten`.
    All other observations are returned as they are.

    Example:
        >>> import torch
        >>> space = spaces.Tuple([spaces.Box(0, 255, (5, 6), np.uint8), spaces.Discrete(2)])
        >>> packed = torch.from_numpy(flatten(space, (np.full((1, 5, 6), 7, dtype=np.uint8), np.array([1]))))
        >>> packed.dtype, packed.shape, unpack(space, packed)[0, -3:]
        (torch.uint8, torch.Size([1, 38]), tensor([7., 0., 1.]))
    """
    if not is_packed(space, flat):
        return flat
    import torch  # not above: environments are made without it

    # The numbers; a copy, because a slice of bytes need not begin where a float may
    leaves = leaf_spaces(space)
    sizes = [spaces.flatdim(leaf) for leaf in leaves]
    num_numbers = sum(size for leaf, size in zip(leaves, sizes, strict=True) if not is_image(leaf))
    num_bytes = FLOAT32_BYTES * num_numbers
    number_bytes = flat[..., :num_bytes].reshape(-1).clone()
    numbers = number_bytes.view(torch.float32).reshape(*flat.shape[:-1], num_numbers)
    pixels = flat[..., num_bytes:]

    # All parts in the order of the space
    columns = []
    for leaf, size in zip(leaves, sizes, strict=True):
        if is_image(leaf):
            columns.append(pixels[..., :size].to(torch.float32))
            pixels = pixels[..., size:]
        else:
            columns.append(numbers[..., :size])
            numbers = numbers[..., size:]
    return torch.cat(columns, dim=-1)


def pack(space: spaces.Space, flat: np.ndarray) -> np.ndarray:
    """Convert float32 observations ``[N, size]`` of a Dict or Tuple with images to uint8 ``[N, bytes]``, see `unpack`.

    All other observations are returned as they are; up to version 0.11, none was packed.
    """
    if packed_size(space) == 0 or is_packed(space, flat):
        return flat
    numbers = []
    pixels = []
    start = 0
    for leaf in leaf_spaces(space):
        end = start + spaces.flatdim(leaf)
        if is_image(leaf):
            pixels.append(flat[:, start:end].astype(np.uint8))
        else:
            numbers.append(flat[:, start:end])
        start = end
    if numbers:
        pixels.insert(0, np.concatenate(numbers, axis=1, dtype=np.float32).view(np.uint8))
    return np.concatenate(pixels, axis=1)


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
        flat: flattened observations ``[*, size]``, packed or not, any leading dimensions: a rollout's
            ``observation``, or ``torch.from_numpy(flatten(space, observation))`` of what `Policy.act` gets.

    Returns:
        For a Dict a dictionary, for a Tuple a tuple of the parts, otherwise one tensor: of a Box or MultiBinary
        ``[*, *shape]`` of the dtype of ``flat`` (packed: float32), of a Discrete int64 ``[*]``, of a MultiDiscrete
        int64 ``[*, *shape]``, with their values in the environment.

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
    flat = unpack(space, flat)
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


def _pack(space: spaces.Space, observation: Any) -> np.ndarray:
    """Pack a batch of a Dict or Tuple with images: uint8 ``[N, bytes]``, see `unpack`."""
    numbers: list[np.ndarray] = []
    pixels: list[np.ndarray] = []
    for leaf, values in _leaves(space, observation):
        if is_image(leaf):
            pixels += [column.astype(BYTES, copy=False) for column in _columns(leaf, values)]
        else:
            numbers += _columns(leaf, values)
    if numbers:
        floats = np.concatenate(numbers, axis=1, dtype=np.float32)
        pixels = [floats.view(np.uint8), *pixels]
    return np.concatenate(pixels, axis=1)


def _flat_columns(space: spaces.Space, observation: Any) -> list[np.ndarray]:
    """Flattened parts of a batch, ``[N, size]`` each."""
    columns: list[np.ndarray] = []
    for leaf, values in _leaves(space, observation):
        columns += _columns(leaf, values)
    return columns


def _leaves(space: spaces.Space, observation: Any) -> Iterator[tuple[spaces.Space, Any]]:
    """Parts without further parts, each with its values in a batch, in the order of the space."""
    if isinstance(space, spaces.Dict):
        for name, part in space.items():
            if name not in observation:
                raise ValueError(
                    f"the observations have the parts {', '.join(map(str, observation))}, but the space has {name!r}, "
                    "too: return each part of the space"
                )
            yield from _leaves(part, observation[name])
    elif isinstance(space, spaces.Tuple):
        for part, values in zip(space, observation, strict=True):
            yield from _leaves(part, values)
    else:
        yield space, observation


def _columns(space: spaces.Space, values: Any) -> list[np.ndarray]:
    """Flattened values of a part without further parts, ``[N, size]`` each. Raises as `flatten` does."""
    # Python integers, because start + n overflows in a short dtype such as int8
    array = np.asarray(values)
    rows = array.reshape(len(array), -1)
    if isinstance(space, spaces.Discrete):
        columns = [_one_hot(rows, start=int(space.start), count=int(space.n))]
    elif isinstance(space, spaces.MultiDiscrete):
        choices = zip(rows.T, space.nvec.ravel().tolist(), space.start.ravel().tolist(), strict=True)
        columns = [_one_hot(column[:, None], start=start, count=count) for column, count, start in choices]
    else:
        if array.shape[1:] != space.shape:
            raise ValueError(
                f"a part of the observations has shape {array.shape}, expected {(len(array), *(space.shape or ()))}, a "
                f"row for each slot, as its space is {space}"
            )
        check_pixels(space, array)
        return [rows]

    # Without a 1 in its one-hot form, a value is not in the space
    for column in columns:
        if np.count_nonzero(column) < len(rows):
            row = int((~column.any(axis=1)).argmax())
            raise ValueError(
                f"row {row} of the observations, a row for each slot, has the value {np.asarray(values)[row]}, which "
                f"is not in {space}: return one that is, or change the observation space"
            )
    return columns


def _one_hot(values: np.ndarray, *, start: int, count: int) -> np.ndarray:
    """Bool ``[N, count]`` of integers ``[N, 1]`` from ``start`` on."""
    end = start + count
    dtype = np.int64 if end < 2**63 else np.uint64
    return values == np.arange(start, end, dtype=dtype)
