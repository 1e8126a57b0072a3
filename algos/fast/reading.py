"""Fast equivalent of `algos.policies.policy.read_array`: NumPy's calls have less overhead than torch's."""

from collections.abc import Callable
from typing import Protocol, cast

import numpy as np
from torch import Tensor, nn

from algos.fast.towers import has_hooks_or_own_forward
from textenv.acceleration import Originals, find

STANDS_FOR = {
    "algos.policies.policy:ControlPolicy.read": "67f8cc18e60f",
    "algos.policies.policy:ControlPolicy._flat": "19589401ee7f",
    "algos.policies.normalizers:ObservationNormalizer.forward": "f8fc7185dd03",
    "algos.policies.normalizers:ObservationNormalizer._normalize": "186aa8e75275",
}
"""Methods that `read_array` replaces, with the digest of each when both were last compared."""
ORIGINALS = Originals(STANDS_FOR)
POLICY_METHODS = {"read", "_flat"}
"""Methods of a policy that are not replaced if they were set on the object."""
LARGEST_BATCH = 2048
"""Largest array, in elements, for which NumPy is used."""


class Normalizer(Protocol):
    """The members of an `ObservationNormalizer` that this file reads."""

    columns: Tensor | None
    mean: Tensor
    variance: Tensor


class Reader(Protocol):
    """The members of a `ControlPolicy` that this file reads."""

    normalizer: Normalizer | None
    read: Callable[[Tensor], Tensor]
    _flat: Callable[[Tensor], Tensor]


def read_array(
    plain: Callable[[Reader, np.ndarray], np.ndarray], policy: Reader, observation: np.ndarray
) -> np.ndarray:
    """Equivalent of `algos.policies.policy.read_array`.

    Large batches go to ``plain``, and so do observations that are no vectors of floats, and policies and normalizers
    that are not exactly ours or normalize only some columns.
    """
    is_vector = observation.ndim == 2 and observation.dtype.kind == "f" and observation.size <= LARGEST_BATCH
    if not is_vector or not _reads_as_ours(policy):
        return plain(policy, observation)
    normalizer = policy.normalizer
    with np.errstate(all="ignore"):  # torch does not warn either
        vectors = observation.astype(np.float32, copy=False)
        if normalizer is None:
            return vectors
        scale = 1 / np.sqrt(normalizer.variance.numpy() + find("algos.policies.normalizers:EPSILON"))
        normalized = vectors - normalizer.mean.numpy().astype(np.float32)
        normalized *= scale.astype(np.float32)

    # Faster than `clip`, which checks its arguments
    clip = find("algos.policies.normalizers:CLIP")
    np.minimum(normalized, clip, out=normalized)
    return np.maximum(normalized, -clip, out=normalized)


def _reads_as_ours(policy: Reader) -> bool:
    """Whether nobody has changed how the policy and its normalizer read, in a class or in an object."""
    if ORIGINALS.changed() is not None:
        return False
    control_policy = find("algos.policies.policy:ControlPolicy")
    policy_type = type(policy)
    if policy_type.read is not control_policy.read or policy_type._flat is not control_policy._flat:
        return False
    if not POLICY_METHODS.isdisjoint(vars(policy)):
        return False

    # Its normalizer
    normalizer = policy.normalizer
    if normalizer is None:
        return True
    if type(normalizer) is not find("algos.policies.normalizers:ObservationNormalizer"):
        return False
    if has_hooks_or_own_forward(cast(nn.Module, normalizer)) or "_normalize" in vars(normalizer):
        return False
    return normalizer.columns is None and normalizer.mean.is_cpu
