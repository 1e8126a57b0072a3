"""Descriptions of Gymnasium's Box2D environments: LunarLander."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import gymnasium
import numpy as np
from gymnasium import spaces

from textenv.words.describing import KnownDescription
from textenv.words.phrases import sided


@dataclass(frozen=True, kw_only=True)
class LunarLander(KnownDescription):
    """LunarLander: the way to the pad and speeds in hundredths of the observation, degrees, and degrees per second.

    Args:
        is_continuous: whether an action has two numbers, the power of the main engine and that of the side engines.

    Example:
        >>> LunarLander()(np.array([0.1, 1.2, -0.05, -0.4, 0.1, -0.05, 0, 1]))
        'Pad 10 left, 120 down. Moving 5 left, 40 down. Tilt 6 left, moving 7 right. Left leg down.'
    """

    AIM = "Land slowly and upright on the pad."
    WORDS = ("wait", "left", "up", "right")
    POWERS: ClassVar[tuple[str, ...]] = ("1", "2", "3", "4", "5")
    """Words of the powers of an engine."""
    TURN_UNIT: ClassVar[float] = 0.4
    """The angular speed in the observation for one radian per second."""

    is_continuous: bool = False

    @classmethod
    def of(cls, env: gymnasium.Env) -> Self:
        """Read whether the actions are continuous."""
        return cls(is_continuous=isinstance(env.unwrapped.action_space, spaces.Box))

    @property
    def action_words(self) -> Sequence[str] | Sequence[Sequence[str]] | None:
        """Words of the actions; None if they have none."""
        if self.is_continuous and self.names_actions:
            return (self.POWERS, self.POWERS)
        return super().action_words

    @property
    def instructions(self) -> str:
        """The aim, and the words of the actions."""
        if self.is_continuous and self.names_actions:
            return f"{self.AIM} Words: main (4, 5: on), side (1: left, 5: right)."
        return super().instructions

    def reads(self, observation_space: spaces.Space) -> bool:
        """Return whether the space has the eight numbers."""
        is_box = isinstance(observation_space, spaces.Box) and observation_space.shape == (8,)
        return is_box and np.issubdtype(observation_space.dtype, np.floating)

    def __call__(self, observation: Any) -> str:
        """Describe where the lander is, how it moves, how it is tilted, and which legs stand."""
        x, y, x_speed, y_speed, angle, turn, right_leg, left_leg = map(float, observation)
        sentences = [
            f"Pad {sided(-100 * x)}, {sided(-100 * y, 'down', 'up')}.",
            f"Moving {sided(100 * x_speed)}, {sided(100 * y_speed, 'down', 'up')}.",
            f"Tilt {sided(-math.degrees(angle))}, moving {sided(-math.degrees(turn / self.TURN_UNIT))}.",
        ]
        if left_leg and right_leg:
            sentences.append("Both legs down.")
        elif left_leg:
            sentences.append("Left leg down.")
        elif right_leg:
            sentences.append("Right leg down.")
        return " ".join(sentences)
