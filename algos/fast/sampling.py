"""Fast sampling of small categorical distributions: NumPy's calls have less overhead than torch's."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

LARGEST_SAMPLE = 2048
"""Maximum number of logits that are sampled with NumPy."""


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
