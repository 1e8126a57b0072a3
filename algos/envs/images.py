"""Images in observation spaces: which parts are images, and where their channels are."""

import logging
from typing import TypeGuard

import numpy as np
from gymnasium import spaces

logger = logging.getLogger(__name__)

BYTES = np.dtype(np.uint8)
"""Dtype of pixels."""
BRIGHTEST_BYTE = 255
"""Largest value of a pixel."""
MIN_SIDE_PIXELS = 5
"""Minimum height and width of an image, pixels."""


def is_image(space: spaces.Space) -> TypeGuard[spaces.Box]:
    """True if convolutions can read this space, see `image_layout`; never for a Dict or Tuple."""
    # First without an error's message, as this is asked at every step of an environment
    if not isinstance(space, spaces.Box) or space.dtype != BYTES:
        return False
    try:
        image_layout(space)
    except ValueError:
        return False
    return True


def check_pixels(space: spaces.Space, pixels: np.ndarray) -> None:
    """Raise a ValueError if observations of an image space are floats, which may have been scaled to [0, 1] already."""
    if pixels.dtype is BYTES or pixels.dtype.kind != "f" or not is_image(space):
        return
    raise ValueError(
        f"the observations are {pixels.dtype}, but the space is {space}: return uint8, which networks divide by "
        f"{brightest_pixel(space)}, or make the space one of floats"
    )


def leaf_spaces(space: spaces.Space) -> list[spaces.Space]:
    """Parts of a Dict or Tuple that have no further parts, in the order of `algos.envs.flatten`; else the space itself.

    Example:
        >>> leaf_spaces(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.MultiBinary(3)])}))
        [Discrete(2), MultiBinary(3)]
    """
    parts: list[spaces.Space] = []
    if isinstance(space, spaces.Dict):
        parts = list(space.values())
    elif isinstance(space, spaces.Tuple):
        parts = list(space)
    else:
        return [space]
    leaves = []
    for part in parts:
        leaves += leaf_spaces(part)
    return leaves


def has_images(space: spaces.Space) -> bool:
    """True if the space is an image, or a Dict or Tuple with an image in it."""
    return any(map(is_image, leaf_spaces(space)))


def brightest_pixel(space: spaces.Box) -> int:
    """Largest value of an image space, by which networks divide its pixels: 255, or less for a board of symbols."""
    return max(int(space.high.max()), 1)


def warn_of_flat_pixels(space: spaces.Space, reader: str) -> None:
    """Log a warning if there are images in a space whose observations a policy reads as one vector.

    Args:
        space: space of one observation.
        reader: name of the policy.
    """
    for part in leaf_spaces(space):
        if is_image(part):
            logger.warning(
                "%s flattens the image %s of its observations, so which pixels are neighbours is lost: CNNPolicy, "
                "MultiInputPolicy (for images among other parts) and LSTMPolicy have convolutions (for PPO, A2C and "
                "TRPO)",
                reader,
                part,
            )


def warn_of_raw_pixels(space: spaces.Space, reader: str) -> None:
    """Log a warning for each part of a space with the dtype and bounds of pixels that convolutions cannot read.

    A policy reads such a part as numbers from 0 to 255, which saturate its network unless they are normalized.

    Args:
        space: space of one observation.
        reader: name of the policy.
    """
    for part in leaf_spaces(space):
        if not isinstance(part, spaces.Box) or part.dtype != BYTES or len(part.shape) < 2:
            continue
        if not (part.high == BRIGHTEST_BYTE).any():
            continue
        try:
            image_layout(part)
        except ValueError as error:
            logger.warning("%s reads pixels as numbers from 0 to 255, without convolutions: %s", reader, error)


def image_layout(space: spaces.Space) -> tuple[tuple[int, ...], bool]:
    """Shape of an image space, and True if its channels come first.

    Raises:
        ValueError: if the space is not an image, its channel dimension is ambiguous, or the image is too small.
    """
    shape = tuple(space.shape or ())

    # Pixels
    if not isinstance(space, spaces.Box) or space.dtype != BYTES or len(shape) not in (2, 3):
        raise ValueError(
            f"observation_space is {space}, expected a uint8 Box of 2 or 3 dimensions (3 with channels): do not "
            "rescale pixels, join stacked colour frames along the channels, or use MLPPolicy with "
            "normalize_observations=True (MultiInputPolicy for a Dict or Tuple with images in it)"
        )

    # Channels
    if len(shape) == 3 and shape[0] == shape[2]:
        raise ValueError(
            f"observations have shape {shape}, so the channels are ambiguous (the shorter one of first and last): "
            "reshape them with gymnasium.wrappers.vector.ReshapeObservation, or crop them"
        )
    channels_first = len(shape) == 3 and shape[0] < shape[2]

    # Height and width
    sides = shape[:2]
    if channels_first:
        sides = shape[1:]
    if min(sides) < MIN_SIDE_PIXELS:
        raise ValueError(
            f"images of {sides[0]} x {sides[1]} pixels in observations of shape {shape} are too small for "
            f"convolutions, expected at least {MIN_SIDE_PIXELS}: use MLPPolicy with normalize_observations=True"
        )
    return shape, channels_first
