"""Fast sampling and scoring of a few actions: NumPy's calls have less overhead than torch's."""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from textenv.acceleration import Originals, find

LOG_2PI = math.log(2 * math.pi)
LARGEST_SAMPLE = 2048
"""Largest number of elements, logits or numbers of actions, for which NumPy is used."""
STANDS_FOR = {
    "algos.policies.distributions:Gaussian.score": "9222ba48a3b5",
    "algos.policies.distributions:Gaussian.parametrize": "fbeb4d033fc3",
}
"""Methods that `draw_gaussian` replaces, with the digest of each when both were last compared."""
ORIGINALS = Originals(STANDS_FOR)
GAUSSIAN_METHODS = {"score", "parametrize"}
"""Methods of a distribution that are not replaced if they were set on the object."""


def draw(
    plain: Callable[[Tensor, torch.Generator, bool], tuple[Tensor, Tensor]],
    logits: Tensor,
    generator: torch.Generator,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Equivalent of `algos.policies.distributions.draw` with the same noise; many logits go to ``plain``."""
    is_small = logits.ndim == 2 and logits.numel() <= LARGEST_SAMPLE
    if not (is_small and logits.dtype is torch.float32 and logits.is_cpu):
        return plain(logits, generator, deterministic)
    logits_array = logits.detach().numpy()
    with np.errstate(all="ignore"):  # as with torch, later checks report numbers that are not finite
        # Log-softmax
        log_probs = logits_array - logits_array.max(-1, keepdims=True)
        log_probs -= np.log(np.exp(log_probs).sum(-1, keepdims=True))

        # Gumbel noise, which is -log of exponential noise
        perturbed = log_probs
        if not deterministic:
            noise = np.empty(logits_array.shape, dtype=np.float32)  # faster than torch.empty
            torch.from_numpy(noise).exponential_(generator=generator)
            perturbed = log_probs - np.log(noise, out=noise)
    action = perturbed.argmax(-1)
    log_prob = log_probs[np.arange(len(action)), action]
    return torch.from_numpy(action), torch.from_numpy(log_prob)


class Gaussian(Protocol):
    """The member of an `algos.policies.distributions.Gaussian` that this file reads."""

    log_std: Tensor


def draw_gaussian(
    plain: Callable[[Gaussian, Tensor, Tensor], tuple[Tensor, Tensor]],
    distribution: Gaussian,
    mean: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Equivalent of `algos.policies.distributions.draw_gaussian`.

    Large batches go to ``plain``, and so do distributions that are not exactly ours.
    """
    if not _is_ours(distribution) or mean.ndim != 2 or mean.numel() > LARGEST_SAMPLE:
        return plain(distribution, mean, noise)
    tensors = (mean, distribution.log_std, noise)
    if not all(x.dtype is torch.float32 and x.is_cpu for x in tensors):
        return plain(distribution, mean, noise)
    mean_array, log_std, noise_array = (x.detach().numpy() for x in tensors)
    with np.errstate(all="ignore"):  # as with torch, later checks report numbers that are not finite
        action = noise_array * np.exp(log_std)
        action += mean_array
        standard = (action - mean_array) * np.exp(-log_std)
        density = np.square(standard, out=standard)
        density *= -0.5
        density -= log_std + np.float32(0.5 * LOG_2PI)
        log_prob = np.add.reduce(density, axis=-1)  # faster than `sum`, which checks its arguments
    return torch.from_numpy(action), torch.from_numpy(log_prob)


def _is_ours(distribution: Gaussian) -> bool:
    """Whether the distribution is a `Gaussian` whose methods nobody has changed, in the class or in the object."""
    if type(distribution) is not find("algos.policies.distributions:Gaussian") or ORIGINALS.changed() is not None:
        return False
    return GAUSSIAN_METHODS.isdisjoint(vars(distribution))
