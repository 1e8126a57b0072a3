"""Plain Python numbers for those of NumPy, which code that computes its settings hands in."""

from typing import Any

LONGEST = 100
"""Entries up to which a list or dict is taken for settings; longer ones are data, which stays as it is."""


def plain(value: Any) -> Any:
    """Return a NumPy scalar as the Python number, truth value or text that it is, also inside lists, tuples and dicts.

    Everything else is returned as it is: arrays with dimensions, lists longer than `LONGEST`, and a list without NumPy
    scalars as the same list.

    Example:
        >>> import numpy as np
        >>> plain(np.int64(3)), plain((np.float64(0.5), None)), plain({"hidden": [np.int32(64)]})
        (3, (0.5, None), {'hidden': [64]})
    """
    # By name, because the command line answers before NumPy is imported
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    if type(value) in (list, tuple) and len(value) <= LONGEST:
        items = [plain(item) for item in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return type(value)(items) if changed else value
    if type(value) is dict and len(value) <= LONGEST:
        items_by_name = {name: plain(item) for name, item in value.items()}
        changed = any(items_by_name[name] is not value[name] for name in value)
        return items_by_name if changed else value
    return value
