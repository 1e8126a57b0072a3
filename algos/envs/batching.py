"""One observation or several, of arrays, tensors or numbers, as a batch of NumPy arrays: the input of `predict`."""

from typing import Any

import numpy as np
from gymnasium import spaces

from algos.envs.flatten import flat_shape, is_packed, packed_size


def as_batch(space: spaces.Space, observation: object) -> tuple[Any, bool]:
    """Make a batch of what an environment, or a vector environment, shows.

    Args:
        space: space of one observation.
        observation: one observation or a batch of them: numbers, lists, arrays or torch tensors; a dictionary of these
            for a Dict, a tuple or list for a Tuple. Flattened observations (`algos.envs.flatten`) are taken too.

    Returns:
        The batch: an array ``[N, *]`` of the space's dtype (flattened: float32), or a dictionary or tuple of arrays;
        and whether ``observation`` is a single one, so that N is 1.

    Raises:
        ValueError: if it does not fit the space: another shape, other parts, or values that are not in it; or if there
            is NaN in it.

    Example:
        >>> as_batch(spaces.Discrete(3), 2), as_batch(spaces.Discrete(3), [2, 0])
        ((array([2]), True), (array([2, 0]), False))
    """
    reset = isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict)
    if reset and not isinstance(space, spaces.Tuple):
        raise ValueError(
            "observation is a tuple with a dictionary, as env.reset() returns it, expected the observation alone: "
            "observation, info = env.reset()"
        )
    if _is_flat_form(space, observation):
        return as_batch(spaces.Box(-np.inf, np.inf, flat_shape(space)), observation)
    if is_packed(space, observation):
        return as_batch(spaces.Box(0, 255, (packed_size(space),), np.uint8), observation)
    sizes: dict[str, int | None] = {}
    batch = _batch(space, observation, "observation", sizes)
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name}: {'one' if size is None else size}" for name, size in sizes.items())
        raise ValueError(f"the parts of the observation are of different numbers of observations: {counts}")
    is_single = None in sizes.values()
    return batch, is_single


def _is_flat_form(space: spaces.Space, observation: object) -> bool:
    """Whether observations of a space other than Box are flattened: one array of floats of its flat size."""
    if isinstance(space, spaces.Box) or isinstance(observation, (dict, tuple)):
        return False
    if isinstance(space, spaces.Tuple) and isinstance(observation, list) and len(observation) == len(space):
        return False  # a list of parts, which are no array
    array = _array(observation)
    return array.dtype.kind == "f" and array.shape[-1:] == flat_shape(space)


def _batch(space: spaces.Space, observation: object, name: str, sizes: dict[str, int | None]) -> object:
    """Batch of one part of the observations; notes their number in ``sizes``, None for a single one."""
    # Several parts
    if isinstance(space, spaces.Dict):
        if not isinstance(observation, dict) or set(observation) != set(space):
            parts = ", ".join(map(str, space))
            raise ValueError(f"{name} is {observation!r:.200}, expected a dictionary with the parts {parts}")
        return {key: _batch(part, observation[key], f"{name}[{key!r}]", sizes) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(observation, (tuple, list)) or len(observation) != len(space):
            raise ValueError(f"{name} is {observation!r:.200}, expected a tuple of {len(space)} parts")
        return tuple(_batch(part, observation[i], f"{name}[{i}]", sizes) for i, part in enumerate(space))

    # One part: its shape says whether it is a single observation
    array = _array(observation)
    shape = space.shape or ()
    if array.shape == shape:
        sizes[name] = None
        array = array[None]
    elif array.shape[1:] == shape and array.ndim:
        sizes[name] = len(array)
    else:
        batched = ("N", *shape)
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}, or {batched} for a batch, of {space}")
    return _checked(space, array, name)


def _array(observation: object) -> np.ndarray:
    """Array of an observation: of a tensor on any device, a list, or a number."""
    if hasattr(observation, "detach"):  # a torch tensor
        observation = observation.detach().cpu()
    return np.asarray(observation)


def _checked(space: spaces.Space, array: np.ndarray, name: str) -> np.ndarray:
    """Array ``[N, *]`` in the dtype of its space; a ValueError on NaN, a changed integer, or a choice not in it."""
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} is an array of {array.dtype}, expected numbers of {space}")
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise ValueError(f"{name} has NaN, expected numbers of {space}: a policy cannot act on it")
    assert space.dtype is not None
    converted = array.astype(space.dtype, order="C")  # torch reads no arrays that run backwards
    if space.dtype.kind != "f" and not np.array_equal(converted, array):
        raise ValueError(
            f"{name} has values that {space.dtype} cannot hold, the dtype of {space}: pass what the environment returns"
        )
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        counts = space.n if isinstance(space, spaces.Discrete) else space.nvec
        last = np.asarray(space.start) + (np.asarray(counts) - 1)  # in this order, which overflows in no dtype
        outside = (converted < space.start) | (converted > last)
        if outside.any():
            raise ValueError(f"{name} has the value {converted[outside][0]}, which is not in {space}")
    return converted
