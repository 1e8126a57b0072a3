"""Coefficient β of a KL penalty: fixed, adapted to a target KL, linear in the steps taken, or any function of them."""

import math
from collections.abc import Callable
from typing import Protocol, SupportsFloat, cast

LARGEST_ERROR = 0.2
"""Clip range for the relative error in `AdaptiveCoefficient` (Ziegler et al. 2019)."""


class Coefficient(Protocol):
    """Coefficient β in reward per nat, updated between rollouts."""

    @property
    def value(self) -> float:
        """Current β, at least 0."""

    def update(self, *, kl: float | None, steps: int) -> None:
        """Update β after a rollout with this KL in nats per episode (None if no episode ended) and number of steps."""

    def state_dict(self) -> dict[str, float]:
        """State that changes during training, for JSON."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state that `state_dict` returned; raise a ValueError if the state is of another kind."""


class _StatefulCoefficient:
    """State of a coefficient: numbers by name."""

    def __init__(self, **state: float) -> None:
        self._state = state

    def state_dict(self) -> dict[str, float]:
        """See `Coefficient.state_dict`."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """See `Coefficient.load_state_dict`."""
        if state.keys() != self._state.keys():
            raise ValueError(
                f"the state has {sorted(state)}, {type(self).__name__} expects {sorted(self._state)}: it was saved by "
                "another kind of coefficient"
            )
        self._state = dict(state)


class FixedCoefficient(_StatefulCoefficient):
    """Constant coefficient.

    Raises:
        ValueError: if it is negative or not finite.

    Example:
        >>> FixedCoefficient(0.1).value
        0.1
    """

    def __init__(self, value: float) -> None:
        if not 0 <= value < math.inf:
            raise ValueError(f"coefficient is {value}, expected a number of at least 0 (reward per nat)")
        super().__init__()
        self.value = value

    def update(self, *, kl: float | None, steps: int) -> None:
        """Do nothing."""


class AdaptiveCoefficient(_StatefulCoefficient):
    """Coefficient that rises while KL > target and falls while KL < target (Ziegler et al. 2019, section 2.2).

    ``e = clip(kl / target - 1, -.2, .2)`` and ``β ← β·(1 + gain·e)``, with the KL in nats per episode.

    Args:
        initial: β at the start, > 0 (0 would stay 0).
        target: target KL, in nats per episode (text: per completion), not per step; > 0.
        gain: K_β, above 0 and below 5, so that β stays positive.

    Raises:
        ValueError: on a number out of range.

    Example:
        >>> coefficient = AdaptiveCoefficient(0.1, target=6.0)
        >>> coefficient.update(kl=12.0, steps=100)
        >>> round(coefficient.value, 6)
        0.102
    """

    def __init__(self, initial: float, target: float, gain: float = 0.1) -> None:
        ranges = (("initial", initial, math.inf), ("target", target, math.inf), ("gain", gain, 5.0))
        for name, number, limit in ranges:
            if not 0 < number < limit:
                raise ValueError(f"{name} is {number}, expected a number above 0 and below {limit}")
        super().__init__(value=float(initial))
        self.target = float(target)
        self.gain = float(gain)

    @property
    def value(self) -> float:
        """See `Coefficient.value`."""
        return self._state["value"]

    def update(self, *, kl: float | None, steps: int) -> None:
        """See `Coefficient.update`; β does not change if no episode ended."""
        if kl is None:
            return
        relative_error = kl / self.target - 1
        error = min(max(relative_error, -LARGEST_ERROR), LARGEST_ERROR)
        self._state = {"value": self.value * (1 + self.gain * error)}


class ScheduledCoefficient(_StatefulCoefficient):
    """Coefficient that is linear in the number of steps (True mask entries) so far, and constant after ``steps``.

    Args:
        start: β at the start, at least 0.
        end: β after ``steps``, at least 0.
        steps: length of the schedule, at least 1.

    Raises:
        ValueError: on a number out of range.

    Example:
        >>> coefficient = ScheduledCoefficient(0.2, 0.0, steps=1000)
        >>> coefficient.update(kl=None, steps=250)
        >>> round(coefficient.value, 6)
        0.15
    """

    def __init__(self, start: float, end: float, steps: int) -> None:
        for name, number in (("start", start), ("end", end)):
            if not 0 <= number < math.inf:
                raise ValueError(f"{name} is {number}, expected a number of at least 0 (reward per nat)")
        if steps < 1:
            raise ValueError(f"steps is {steps}, expected at least 1")
        super().__init__(seen=0)
        self.start = start
        self.end = end
        self.steps = steps

    @property
    def value(self) -> float:
        """See `Coefficient.value`."""
        progress = min(self._state["seen"] / self.steps, 1.0)
        return self.start + progress * (self.end - self.start)

    def update(self, *, kl: float | None, steps: int) -> None:
        """See `Coefficient.update`."""
        self._state = {"seen": self._state["seen"] + steps}


class FunctionCoefficient(_StatefulCoefficient):
    """Coefficient given by a function of the number of steps (True mask entries) so far.

    Only the number of steps is saved: a resumed run needs the same function again.

    Args:
        function: β for a number of steps: a number of at least 0.

    Raises:
        TypeError, ValueError: if the function does not return such a number: checked for 0 steps at construction, and
            at each use.

    Example:
        >>> coefficient = FunctionCoefficient(lambda steps: 0.1 * 0.5 ** (steps / 1000))
        >>> coefficient.update(kl=None, steps=2000)
        >>> coefficient.value
        0.025
    """

    def __init__(self, function: Callable[[int], float]) -> None:
        super().__init__(seen=0)
        self.function = function
        self._checked_value()  # raises if the function is wrong

    @property
    def value(self) -> float:
        """See `Coefficient.value`."""
        return self._checked_value()

    def update(self, *, kl: float | None, steps: int) -> None:
        """See `Coefficient.update`."""
        self._state = {"seen": self._state["seen"] + steps}

    def _checked_value(self) -> float:
        """Return the function's value for the steps so far; raise an error that says what it returned."""
        steps = int(self._state["seen"])
        expected = "a function of the number of steps so far that returns a number of at least 0 (reward per nat)"
        try:
            value = self.function(steps)
        except TypeError as error:  # another number of arguments
            raise TypeError(f"the KL coefficient is {self.function!r:.200}, expected {expected}: {error}") from error
        is_number = isinstance(value, SupportsFloat) and not isinstance(value, bool)
        if not is_number or not 0 <= float(value) < math.inf:
            raise ValueError(
                f"the function of the KL coefficient returned {value!r:.200} for {steps} steps, expected {expected}"
            )
        return float(value)


CoefficientLike = float | Coefficient | Callable[[int], float]
"""What is accepted as a coefficient: a number, a changing coefficient, or a function of the number of steps so far."""


def as_coefficient(coefficient: CoefficientLike) -> Coefficient:
    """Return a coefficient object; a number becomes a `FixedCoefficient`, a function a `FunctionCoefficient`.

    Raises:
        TypeError: if it is none of these, or a function that takes other arguments.
        ValueError: if a number is negative or not finite.
    """
    if isinstance(coefficient, SupportsFloat) and not isinstance(coefficient, bool):
        return FixedCoefficient(float(coefficient))
    if not isinstance(coefficient, type):  # a class is callable, but no function of the number of steps
        if all(hasattr(coefficient, name) for name in ("value", "update", "state_dict", "load_state_dict")):
            return cast("Coefficient", coefficient)
        if callable(coefficient):
            return FunctionCoefficient(coefficient)
    raise TypeError(
        f"the KL coefficient is {coefficient!r:.200}, expected a number (reward per nat), a function of the number of "
        "steps so far, such as lambda steps: 0.1 * 0.5 ** (steps / 10_000), or one of textenv.kl.coefficients, such as "
        "AdaptiveCoefficient(0.1, target=6.0)"
    )
