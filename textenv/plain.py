"""Plain Python numbers instead of NumPy's, which users hand in as settings that they have computed."""

from typing import Any

MAX_SETTING_ENTRIES = 100
"""Maximum number of entries of a list or dict of settings; longer ones are data, and stay as they are."""


def plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number, bool or text, also inside lists, tuples and dicts.

    Everything else is returned as it is: arrays with dimensions, lists with more than `MAX_SETTING_ENTRIES` entries,
    and lists without NumPy scalars (the same object).

    Example:
        >>> import numpy as np
        >>> plain(np.int64(3)), plain((np.float64(0.5), None)), plain({"hidden": [np.int32(64)]})
        (3, (0.5, None), {'hidden': [64]})
    """
    # By name, because the command line answers before NumPy is imported
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    if type(value) in (list, tuple) and len(value) <= MAX_SETTING_ENTRIES:
        items = [plain(item) for item in value]
        is_unchanged = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_unchanged else type(value)(items)
    if type(value) is dict and len(value) <= MAX_SETTING_ENTRIES:
        items_by_name = {name: plain(item) for name, item in value.items()}
        is_unchanged = all(items_by_name[name] is value[name] for name in value)
        return value if is_unchanged else items_by_name
    return value
