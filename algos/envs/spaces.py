"""Spaces of an environment: their description in JSON, and whether a policy's fit an environment's."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import spaces

from algos.envs.images import BRIGHTEST_BYTE, brightest_pixel, has_images, is_image
from textenv.json_files import Json

INTEGER_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
"""Dtypes of a Discrete or MultiDiscrete, in the processor's byte order, that policies read and that are saved."""
BOX_DTYPES = ("bool", "float16", "float32", "float64", *INTEGER_DTYPES)
"""The same of a Box."""


def check_readable(space: spaces.Space, reader: str = "a policy") -> None:
    """Check that a policy can read observations of this space, and that the space can be saved.

    Args:
        space: space of one observation.
        reader: name of the policy, for the error message.

    Raises:
        ValueError: if a part has no fixed size (Text, Sequence, Graph, OneOf), or is a Box of a dtype that torch lacks;
            if the name of a part is neither text nor an integer; or if there is nothing to observe.
    """
    parts = [space]
    for part in parts:  # grows by the parts of a Dict or Tuple
        if isinstance(part, spaces.Dict):
            # JSON keeps text and integers
            for name in part:
                if not isinstance(name, (str, int)):
                    raise ValueError(
                        f"observation_space is {space}, in which {name!r} is the name of a part, expected text, which "
                        "can be saved: rename it by a wrapper"
                    )
            parts += part.values()
        elif isinstance(part, spaces.Tuple):
            parts += part
        # Kinds without a fixed size, then dtypes
        elif not isinstance(part, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise ValueError(
                f"observation_space is {space}, but {reader} cannot read {part}, expected Box, Discrete, "
                "MultiDiscrete, MultiBinary, and Dict or Tuple of these: wrap it, on the command line by --wrapper "
                "module:function, such as minigrid.wrappers:ImgObsWrapper (in Python "
                "gymnasium.make_vec(id, num_envs=8, wrappers=[...]))"
            )
        else:
            dtypes = BOX_DTYPES if isinstance(part, spaces.Box) else INTEGER_DTYPES
            if str(part.dtype) not in dtypes:
                raise ValueError(
                    f"observation_space is {space}, but {reader} cannot read the dtype {part.dtype} of {part}, "
                    f"expected {', '.join(dtypes)}: convert it by a wrapper, such as "
                    "gymnasium.wrappers.DtypeObservation"
                )
    if not any(map(has_numbers, parts)):
        raise ValueError(
            f"observation_space is {space}, in which there is nothing to observe, expected at least one number: let an "
            "environment without observations show a constant, such as 0 of Box(0, 1, (1,))"
        )


def has_numbers(part: spaces.Space) -> bool:
    """Return False for a space without any number, such as a Box of shape ``(0,)``, and for a Dict or Tuple itself."""
    return not isinstance(part, (spaces.Dict, spaces.Tuple)) and 0 not in (part.shape or ())


def describe_space(space: spaces.Space) -> dict[str, Json]:
    """Describe a space for JSON, as input of `restore_space`: kind, dtype, bounds, start, and the order of parts.

    The bounds of a Box are one number if all are equal, else a flat list; ``"-inf"`` and ``"inf"`` are no bound.
    """
    # Several parts
    if isinstance(space, spaces.Dict):
        return {"dict": [[name, describe_space(part)] for name, part in space.items()]}
    if isinstance(space, spaces.Tuple):
        return {"tuple": [describe_space(part) for part in space]}

    # Choices
    if isinstance(space, spaces.Discrete):
        return {"n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"choices": space.nvec.tolist(), "start": space.start.tolist(), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiBinary):
        return {"binary": space.n if isinstance(space.n, int) else list(space.n)}

    # Numbers
    assert isinstance(space, spaces.Box), f"{space} has no description"
    return {
        "shape": list(space.shape),
        "dtype": str(space.dtype),
        "low": _describe_bound(space.low, space.bounded_below, "-inf"),
        "high": _describe_bound(space.high, space.bounded_above, "inf"),
    }


def restore_space(saved: dict[str, Any]) -> spaces.Space:
    """Rebuild a space from `describe_space`.

    Version 0.9.0 and earlier described a Box without bounds, a Discrete and MultiDiscrete without dtype, and
    ``MultiBinary(3)`` as ``MultiBinary([3])``: these become an unbounded Box, int64, and the latter.

    Raises:
        ValueError: if the dtype of a Box is not in `BOX_DTYPES`.
    """
    if "dict" in saved:
        # From pairs, because Gymnasium sorts the names of a dictionary
        return spaces.Dict([(name, restore_space(part)) for name, part in saved["dict"]])
    if "tuple" in saved:
        return spaces.Tuple([restore_space(part) for part in saved["tuple"]])
    if "n" in saved:
        return spaces.Discrete(saved["n"], start=saved.get("start", 0), dtype=_integer(saved))
    if "choices" in saved:
        dtype = _integer(saved)
        choices = np.array(saved["choices"], dtype=dtype)
        start = np.array(saved.get("start", np.zeros_like(choices)), dtype=dtype)
        return spaces.MultiDiscrete(choices, start=start, dtype=dtype)
    if "binary" in saved:
        return spaces.MultiBinary(saved["binary"])

    # A Box
    name = saved.get("dtype", "float32")
    if name not in BOX_DTYPES:
        raise ValueError(f"a Box of {name!r:.50} was saved, expected one of {', '.join(BOX_DTYPES)}")
    dtype = np.dtype(name).type
    shape = tuple(saved["shape"])
    lowest: str | int = "-inf"
    highest: str | int = "inf"
    if not np.issubdtype(dtype, np.floating):
        lowest, highest = _limits(dtype)
    low, bounded_below = _restore_bound(saved.get("low", lowest), shape, dtype, "-inf")
    high, bounded_above = _restore_bound(saved.get("high", highest), shape, dtype, "inf")
    box = spaces.Box(low, high, shape, dtype)
    box.bounded_below = bounded_below
    box.bounded_above = bounded_above
    return box


def reads_alike(policy_space: spaces.Space, env_space: spaces.Space) -> bool:
    """Whether a policy made for one space reads flattened observations of the other as they are meant.

    Parts must be the same in the same order. A wrapper may have flattened an environment, so a Box is compared with the
    flat form of other spaces. For numbers see `_on_one_scale`. A policy of unbounded floats reads any numbers: agents
    of format 2 (`algos.training.save`) have such a space, whatever their environment's was.
    """
    if isinstance(policy_space, spaces.Box) and policy_space.dtype.kind == "f" and _is_unbounded(policy_space):
        return policy_space.shape == _as_box(env_space).shape
    return _same_parts(policy_space, env_space)


def _same_parts(policy_space: spaces.Space, env_space: spaces.Space) -> bool:
    """`reads_alike` for two spaces, or for the same part of them, whatever its bounds."""
    if isinstance(policy_space, spaces.Dict) and isinstance(env_space, spaces.Dict):
        return list(policy_space) == list(env_space) and _all_same(policy_space.values(), env_space.values())
    if isinstance(policy_space, spaces.Tuple) and isinstance(env_space, spaces.Tuple):
        return len(policy_space) == len(env_space) and _all_same(policy_space, env_space)
    if isinstance(policy_space, spaces.Box) or isinstance(env_space, spaces.Box):
        return _on_one_scale(_as_box(policy_space), _as_box(env_space))
    return _same_values(policy_space, env_space)


def _all_same(policy_parts: Iterable[spaces.Space], env_parts: Iterable[spaces.Space]) -> bool:
    """Whether all parts of a Dict or Tuple are the same; images among them are packed (`algos.envs.flatten`)."""
    for policy_part, env_part in zip(policy_parts, env_parts, strict=True):
        if has_images(policy_part) != has_images(env_part) or not _same_parts(policy_part, env_part):
            return False
    return True


def _as_box(space: spaces.Space) -> spaces.Box:
    """Return a Box as it is, and for another space the Box of its flat form: choices are one-hot, integers 0 and 1."""
    flat_space = space
    if not isinstance(space, spaces.Box):
        flat_space = spaces.flatten_space(space)
    assert isinstance(flat_space, spaces.Box)
    return flat_space


def _is_unbounded(box: spaces.Box) -> bool:
    """Whether no number of a Box has a bound."""
    return bool(np.isinf(box.low).all() and np.isinf(box.high).all())


def _on_one_scale(policy_box: spaces.Box, env_box: spaces.Box) -> bool:
    """Whether a policy reads numbers of the environment on the scale of its own.

    Networks read all numbers as float32, and divide images by the largest pixel of the policy's space. So bounds and
    sizes of dtypes do not matter among floats, nor among integers that are no images. Where one has integers or an
    image and the other has not, such as bytes and fractions of 1, equal bounds show that the scale is the same.
    """
    if policy_box.shape != env_box.shape:
        return False

    # Images; agents saved by version 0.9.0 and earlier have the bound 255, whatever their environment's was
    policy_reads_image = is_image(policy_box)
    env_shows_image = is_image(env_box)
    if policy_reads_image and env_shows_image:
        return brightest_pixel(policy_box) in (brightest_pixel(env_box), BRIGHTEST_BYTE)

    # Numbers
    policy_reads_floats = policy_box.dtype.kind == "f"
    env_shows_floats = env_box.dtype.kind == "f"
    if policy_reads_image == env_shows_image and policy_reads_floats == env_shows_floats:
        return True
    return np.array_equal(policy_box.low, env_box.low) and np.array_equal(policy_box.high, env_box.high)


def acts_alike(one: spaces.Space, other: spaces.Space) -> bool:
    """Whether an action means the same in both spaces; bounds and dtypes may differ (`fit_actions`)."""
    return _same_values(one, other)


def fit_actions(space: spaces.Space, actions: np.ndarray) -> np.ndarray:
    """Actions ``[N, *]`` as an environment expects them: of its dtype, and within the bounds of a Box.

    Args:
        space: the environment's action space, of one environment; actions of a Dict, Tuple or Text stay as they are.
        actions: a policy's, int64 or float32.
    """
    if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return actions
    if isinstance(space, spaces.Box):
        actions = np.clip(actions, space.low, space.high)
    return actions.astype(space.dtype, copy=False)


def _same_values(one: spaces.Space, other: spaces.Space) -> bool:
    """Whether spaces of one part have the same kind, shape, numbers of choices and starts."""
    if isinstance(one, spaces.Discrete) and isinstance(other, spaces.Discrete):
        return int(one.n) == int(other.n) and int(one.start) == int(other.start)
    if isinstance(one, spaces.MultiDiscrete) and isinstance(other, spaces.MultiDiscrete):
        return np.array_equal(one.nvec, other.nvec) and np.array_equal(one.start, other.start)
    for kind in (spaces.Box, spaces.MultiBinary):
        if isinstance(one, kind) and isinstance(other, kind):
            return one.shape == other.shape
    return one == other


def _integer(saved: dict[str, Any]) -> type[np.integer]:
    """Dtype of a saved Discrete or MultiDiscrete; int64 if it has none."""
    name = saved.get("dtype", "int64")
    if name not in INTEGER_DTYPES:
        raise ValueError(f"a Discrete of {name!r:.50} was saved, expected one of {', '.join(INTEGER_DTYPES)}")
    return np.dtype(name).type


def _limits(dtype: type[np.generic]) -> tuple[int, int]:
    """Smallest and largest number of an integer dtype, or of bool."""
    if dtype is np.bool_:
        return 0, 1
    limits = np.iinfo(np.dtype(dtype).name)
    return int(limits.min), int(limits.max)


def _describe_bound(values: np.ndarray, bounded: np.ndarray, infinite: str) -> Json:
    """Bounds of a Box for JSON; ``infinite`` stands for those that its maker left out."""
    numbers: list[float] = values.ravel().tolist()
    if values.dtype.kind == "b":
        numbers = [int(number) for number in numbers]
    has_bound = np.broadcast_to(bounded, values.shape).ravel()

    # An upper bound of -inf, a lower one of inf, and integers that other readers would round are texts
    bounds: list[Json] = []
    for number, is_bounded in zip(numbers, has_bound, strict=True):
        bound: Json = number
        if not is_bounded:
            bound = infinite
        elif math.isinf(number) or (isinstance(number, int) and number >= 2**63):
            bound = str(number)
        bounds.append(bound)
    if bounds and bounds.count(bounds[0]) == len(bounds):
        return bounds[0]
    return bounds


def _restore_bound(
    saved: Any, shape: tuple[int, ...], dtype: type[np.generic], infinite: str
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of a Box, and where it has one, bool, both of the Box's shape; see `_describe_bound`."""
    numbers = saved if isinstance(saved, list) else [saved]
    bounded = np.array([number != infinite for number in numbers], dtype=bool)
    if np.issubdtype(dtype, np.floating):
        numbers = [float(number) for number in numbers]
    else:
        lowest, highest = _limits(dtype)
        limit = lowest if infinite == "-inf" else highest
        numbers = [limit if number == infinite else int(number) for number in numbers]
        if not all(lowest <= number <= highest for number in numbers):
            raise ValueError(f"a bound of {dtype.__name__} was saved that is not from {lowest} to {highest}")
    values = np.array(numbers, dtype=dtype)
    if not isinstance(saved, list):
        return np.full(shape, values[0]), np.full(shape, bounded[0])
    return values.reshape(shape), bounded.reshape(shape)
