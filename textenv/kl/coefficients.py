"""The coefficient β of a KL penalty: fixed, adapted to a target, or linear in the steps taken."""

from __future__ import annotations

import math
from typing import Protocol, SupportsFloat

LARGEST_ERROR = 0.2
"""Most that `AdaptiveCoefficient` counts of a relative distance to its target (Ziegler et al. 2019)."""


class Coefficient(Protocol):
    """Reward per nat, changed between rollouts."""

    @property
    def value(self) -> float:
        """β in force, at least 0."""
        ...

    def update(self, *, kl: float | None, steps: int) -> None:
        """Take in a rollout.

        Args:
            kl: nats an episode; None where no episode ended.
            steps: True entries.
        """
        ...

    def state_dict(self) -> dict[str, float]:
        """What changes, for JSON."""
        ...

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave; ValueError if it is another kind's."""
        ...


class FixedCoefficient:
    """Always the same.

    Raises:
        ValueError: if it is negative or not finite.

    Example:
        >>> FixedCoefficient(0.1).value
        0.1
    """

    def __init__(self, value: float) -> None:
        if not 0 <= value < math.inf:
            raise ValueError(f"coefficient is {value}, expected a number of at least 0 (reward per nat)")
        self.value = value

    def update(self, *, kl: float | None, steps: int) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, float]:
        """See `Coefficient.state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """See `Coefficient.load_state_dict`."""
        _check_keys(self, state)


class AdaptiveCoefficient:
    """Rises while the KL is above a target and falls while it is below (Ziegler et al. 2019, section 2.2).

    ``e = clip(kl / target - 1, -.2, .2)`` and ``β ← β·(1 + gain·e)``, the KL in nats an episode.

    Args:
        initial: β at the start, > 0: 0 would stay 0.
        target: KL in nats an episode (text: a response), > 0; not a step.
        gain: K_β, > 0 and small enough that β stays positive, below 5.

    Raises:
        ValueError: on a number out of range.

    Example:
        >>> coefficient = AdaptiveCoefficient(0.1, target=6.0)
        >>> coefficient.update(kl=12.0, steps=100)
        >>> round(coefficient.value, 6)
        0.102
    """

    def __init__(self, initial: float, target: float, gain: float = 0.1) -> None:
        for name, x, most in (("initial", initial, math.inf), ("target", target, math.inf), ("gain", gain, 5.0)):
            if not 0 < x < most:
                raise ValueError(f"{name} is {x}, expected a number above 0 and below {most}")
        self.value, self.target, self.gain = initial, target, gain

    def update(self, *, kl: float | None, steps: int) -> None:
        """See `Coefficient.update`; nothing changes where no episode ended."""
        if kl is not None:
            error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
            self.value *= 1 + self.gain * error

    def state_dict(self) -> dict[str, float]:
        """See `Coefficient.state_dict`."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """See `Coefficient.load_state_dict`."""
        _check_keys(self, state)
        self.value = state["value"]


class ScheduledCoefficient:
    """Linear in the steps (True entries) seen so far, constant after them.

    Args:
        start: β at the start, at least 0.
        end: β after ``steps``, at least 0.
        steps: at least 1.

    Raises:
        ValueError: on a number out of range.

    Example:
        >>> coefficient = ScheduledCoefficient(0.2, 0.0, steps=1000)
        >>> coefficient.update(kl=None, steps=250)
        >>> round(coefficient.value, 6)
        0.15
    """

    def __init__(self, start: float, end: float, steps: int) -> None:
        for name, x in (("start", start), ("end", end)):
            if not 0 <= x < math.inf:
                raise ValueError(f"{name} is {x}, expected a number of at least 0 (reward per nat)")
        if steps < 1:
            raise ValueError(f"steps is {steps}, expected at least 1")
        self.start, self.end, self.steps, self.seen = start, end, steps, 0

    @property
    def value(self) -> float:
        """See `Coefficient.value`."""
        return self.start + min(self.seen / self.steps, 1.0) * (self.end - self.start)

    def update(self, *, kl: float | None, steps: int) -> None:
        """See `Coefficient.update`."""
        self.seen += steps

    def state_dict(self) -> dict[str, float]:
        """See `Coefficient.state_dict`."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """See `Coefficient.load_state_dict`."""
        _check_keys(self, state)
        self.seen = int(state["seen"])


def as_coefficient(coefficient: float | Coefficient) -> Coefficient:
    """A number is a fixed coefficient."""
    return FixedCoefficient(float(coefficient)) if isinstance(coefficient, SupportsFloat) else coefficient


def _check_keys(coefficient: Coefficient, state: dict[str, float]) -> None:
    expected = coefficient.state_dict().keys()
    if state.keys() != expected:
        raise ValueError(
            f"the saved state has {sorted(state)}, {type(coefficient).__name__} has {sorted(expected)}: it was saved "
            "by another kind of coefficient"
        )
