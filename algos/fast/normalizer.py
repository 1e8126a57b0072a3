"""Fast equivalent of `algos.policies.normalizers.normalized_array`: NumPy's calls have less overhead than torch's."""

import sys
from collections.abc import Callable
from typing import Protocol, cast

import numpy as np
from torch import Tensor, nn

from algos.fast.towers import is_changed

LARGEST_BATCH = 2048
"""Maximum number of numbers that NumPy normalizes."""


class Normalizer(Protocol):
    """The members of an `ObservationNormalizer` that this file reads; it cannot import the class, which imports it."""

    columns: Tensor | None
    mean: Tensor
    variance: Tensor


def normalized_array(
    plain: Callable[[np.ndarray, Normalizer], np.ndarray], observation: np.ndarray, normalizer: Normalizer
) -> np.ndarray:
    """Equivalent of `algos.policies.normalizers.normalized_array`.

    Large batches go to ``plain``, and so do normalizers of some columns, of the user's own classes or with hooks.
    """
    module = sys.modules["algos.policies.normalizers"]
    is_ours = type(normalizer) is module.ObservationNormalizer
    if not is_ours or is_changed(cast(nn.Module, normalizer)) or not normalizer.mean.is_cpu:
        return plain(observation, normalizer)
    if normalizer.columns is not None or observation.size > LARGEST_BATCH:
        return plain(observation, normalizer)
    with np.errstate(all="ignore"):  # torch does not warn either
        scale = 1 / np.sqrt(normalizer.variance.numpy() + module.EPSILON)
        normalized = observation.astype(np.float32, copy=False) - normalizer.mean.numpy().astype(np.float32)
        normalized *= scale.astype(np.float32)

    # Without the checks of `clip`
    np.minimum(normalized, module.CLIP, out=normalized)
    return np.maximum(normalized, -module.CLIP, out=normalized)
