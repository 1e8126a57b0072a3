"""Fast sampling of few actions: NumPy's calls have less overhead than torch's."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)
LARGEST_SAMPLE = 2048
"""Maximum number of logits, or of numbers of actions, for NumPy."""
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
"""Types of tensors that hold numbers, unlike those of a function that is traced."""


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


def gaussian_score(
    plain: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], mean: Tensor, log_std: Tensor, action: Tensor
) -> tuple[Tensor, Tensor]:
    """Equivalent of `algos.policies.distributions.gaussian_score`; many numbers, or a gradient, go to ``plain``."""
    tensors = (mean, log_std, action)
    is_small = mean.numel() <= LARGEST_SAMPLE and not torch.is_grad_enabled()
    if not is_small or not all(type(x) in PLAIN_TYPES and x.dtype is torch.float32 and x.is_cpu for x in tensors):
        return plain(mean, log_std, action)
    mean_array, log_std_array, action_array = (x.detach().numpy() for x in tensors)
    with np.errstate(all="ignore"):  # as with torch, later checks report numbers that are not finite
        standard = (action_array - mean_array) * np.exp(-log_std_array)
        density = np.square(standard, out=standard)
        density *= -0.5
        density -= log_std_array + np.float32(0.5 * LOG_2PI)
        log_prob = np.add.reduce(density, axis=-1)  # without the checks of `sum`
        entropy = np.empty_like(log_prob)
        entropy[...] = np.add.reduce(log_std_array + np.float32(0.5 * (LOG_2PI + 1)), axis=-1)
    return torch.from_numpy(log_prob), torch.from_numpy(entropy)
