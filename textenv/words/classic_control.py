"""Descriptions of Gymnasium's classic control: CartPole, MountainCar, Acrobot, Pendulum. Integers, and sides for signs.

Units are chosen so that integers are exact enough to act by: centimetres, degrees, and both per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from textenv.words.describing import KnownDescription
from textenv.words.phrases import sided

FIVE_PUSHES = ("left", "half left", "wait", "half right", "right")
"""Words for five values of a force from the left to the right."""


@dataclass(frozen=True, kw_only=True)
class CartPole(KnownDescription):
    """CartPole: centimetres from the middle, centimetres per second, degrees, degrees per second.

    Example:
        >>> CartPole()(np.array([0.123, -0.35, -0.05, 0.72]))
        'Cart 12 right, moving 35 left. Pole 3 left, moving 41 right.'
    """

    AIM = "Keep the pole upright, at 0, and the cart near 0."
    WORDS = ("left", "right")

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether the space has the four numbers."""
        return _has_numbers(observation_space, 4)

    def __call__(self, observation: Any) -> str:
        """Describe position and speed of cart and pole."""
        position, speed, angle, angular_speed = map(float, observation)
        cart = f"Cart {sided(100 * position)}, moving {sided(100 * speed)}."
        pole = f"Pole {sided(math.degrees(angle))}, moving {sided(math.degrees(angular_speed))}."
        return f"{cart} {pole}"


@dataclass(frozen=True, kw_only=True)
class MountainCar(KnownDescription):
    """MountainCar: hundredths from the lowest point of the valley, and thousandths per step.

    Example:
        >>> MountainCar()(np.array([-0.6, 0.004]))
        'Car 8 left, moving 4 right.'
    """

    AIM = "Swing to and fro to reach 102 right."
    WORDS: ClassVar[tuple[str, ...]] = ("left", "wait", "right")
    BOTTOM: ClassVar[float] = -math.pi / 6
    """Position of the lowest point."""

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether the space has position and speed."""
        return _has_numbers(observation_space, 2)

    def __call__(self, observation: Any) -> str:
        """Describe position and speed of the car."""
        position, speed = map(float, observation)
        return f"Car {sided(100 * (position - self.BOTTOM))}, moving {sided(1000 * speed)}."


@dataclass(frozen=True, kw_only=True)
class MountainCarContinuous(MountainCar):
    """MountainCarContinuous: the texts of MountainCar, and words for five forces."""

    AIM = "Swing to and fro to reach 97 right."
    WORDS = FIVE_PUSHES


@dataclass(frozen=True, kw_only=True)
class Acrobot(KnownDescription):
    """Acrobot: degrees from hanging down of the upper link, of the lower link from the upper one; degrees per second.

    Example:
        >>> Acrobot()(np.array([1, 0, 0, -1, 0.5, -2]))
        'Upper 0, moving 29 right. Lower 90 left, moving 115 left.'
    """

    AIM = "Swing the lower link up high by turning it."
    WORDS = ("left", "wait", "right")

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether the space has the six numbers."""
        return _has_numbers(observation_space, 6)

    def __call__(self, observation: Any) -> str:
        """Describe angle and speed of both links."""
        cos_upper, sin_upper, cos_lower, sin_lower, upper_speed, lower_speed = map(float, observation)
        upper = f"Upper {_angle(sin_upper, cos_upper)}, moving {sided(math.degrees(upper_speed))}."
        lower = f"Lower {_angle(sin_lower, cos_lower)}, moving {sided(math.degrees(lower_speed))}."
        return f"{upper} {lower}"


@dataclass(frozen=True, kw_only=True)
class Pendulum(KnownDescription):
    """Pendulum: degrees from upright, and degrees per second. Right is clockwise, as a steering wheel turns.

    Example:
        >>> Pendulum()(np.array([0.0, 1.0, -1.0]))
        'Pole 90 left, moving 57 right.'
    """

    AIM = "Swing the pole up and keep it at 0."
    WORDS = FIVE_PUSHES[::-1]

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether the space has the three numbers."""
        return _has_numbers(observation_space, 3)

    def __call__(self, observation: Any) -> str:
        """Describe angle and speed of the pole."""
        cosine, sine, speed = map(float, observation)
        return f"Pole {_angle(-sine, cosine)}, moving {sided(-math.degrees(speed))}."


def _has_numbers(space: spaces.Space, count: int) -> bool:
    """Return whether a space is a vector of as many floats."""
    return isinstance(space, spaces.Box) and space.shape == (count,) and np.issubdtype(space.dtype, np.floating)


def _angle(sine: float, cosine: float) -> str:
    """Write an angle in degrees, at most 180 to a side."""
    return sided(math.degrees(math.atan2(sine, cosine)))
