"""Fast sampling of small categorical distributions: NumPy's calls have less overhead than torch's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGEST_SAMPLE = 2048
"""Maximum number of logits that are sampled with NumPy."""


def draw(
    plain: Callable[..., Any], logits: Tensor, generator: torch.Generator, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Equivalent of `algos.policies.distributions.draw` with the same noise; many logits go to ``plain``."""
    if not (logits.ndim == 2 and logits.numel() <= LARGEST_SAMPLE and logits.dtype is torch.float32 and logits.is_cpu):
        return plain(logits, generator, deterministic)
    values = logits.detach().numpy()
    with np.errstate(all="ignore"):  # as with torch, later checks report numbers that are not finite
        log_probs = values - values.max(-1, keepdims=True)
        log_probs -= np.log(np.exp(log_probs).sum(-1, keepdims=True))
        chosen = log_probs
        if not deterministic:
            noise = np.empty(values.shape, dtype=np.float32)  # faster than torch.empty
            torch.from_numpy(noise).exponential_(generator=generator)
            chosen = log_probs - np.log(noise, out=noise)
    action = chosen.argmax(-1)
    return torch.from_numpy(action), torch.from_numpy(log_probs[np.arange(len(action)), action])
