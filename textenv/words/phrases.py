"""Phrases that descriptions are made of: numbers, a number with its side, a way in steps."""

import math

import numpy as np


def number_in_words(value: float) -> str:
    """Write a number with three significant digits, without an exponent if it has at most seven digits.

    Example:
        >>> number_in_words(-0.12345), number_in_words(99999.0), number_in_words(1.5e-9), number_in_words(math.nan)
        ('-0.123', '100000', '1.5e-9', 'nan')
    """
    if not math.isfinite(value):
        return str(float(value))
    rounded = float(f"{value:.3g}")
    if rounded == 0:
        return "0"
    if 1e-4 <= abs(rounded) < 1e7:
        return np.format_float_positional(rounded, trim="-")
    mantissa, _, exponent = f"{rounded:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def sided(value: float, negative: str = "left", positive: str = "right") -> str:
    """Write a number as an integer with a side instead of its sign.

    Example:
        >>> sided(-12.3), sided(4), sided(-0.2)
        ('12 left', '4 right', '0')
    """
    size = f"{abs(value):.0f}"
    if size == "0":
        return size
    side = negative if value < 0 else positive
    return f"{size} {side}"


def way(*steps: str) -> str:
    """Write a way by its steps in two directions, each made by `sided`.

    Example:
        >>> way(sided(2, "up", "down"), sided(-1)), way("0", "0")
        ('2 down, 1 left', 'here')
    """
    return ", ".join(step for step in steps if step != "0") or "here"
