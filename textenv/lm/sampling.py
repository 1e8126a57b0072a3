"""Choosing tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def restrict(logits: Tensor, *, temperature: float, allowed: Tensor | None) -> Tensor:
    """Temper the logits, then take forbidden actions out of the distribution.

    Forbidden logits become the lowest finite number rather than -inf, so that ``p * log p`` stays 0 there and
    no gradient is NaN.

    Args:
        logits: ``[m, n]``.
        temperature: divides the logits.
        allowed: bool, broadcast to ``[m, n]``; None allows everything.

    Returns:
        float32 ``[m, n]``.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if allowed is not None:
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    return logits


def truncate(logits: Tensor, *, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Keep the most probable actions of each row only; the others get the lowest finite logit.

    Args:
        logits: float32 ``[m, n]``.
        top_k: how many to keep; None keeps all.
        top_p: the fewest whose probabilities reach this, of those that ``top_k`` left (Holtzman et al. 2020); None
            keeps all.

    Returns:
        float32 ``[m, n]``.
    """
    lowest = torch.finfo(logits.dtype).min
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, lowest)
    if top_p is not None:
        probability, order = logits.softmax(-1).sort(descending=True)
        before = probability.cumsum(-1) - probability
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, before >= top_p)
        logits = logits.masked_fill(drop, lowest)
    return logits


def sample(logits: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Draw one action a row by inverting the distribution function at one uniform number a row.

    Args:
        logits: float32 ``[m, n]``.
        generator: source of the uniform numbers, on the logits' device.

    Returns:
        action int64 ``[m]`` and its log-probability float32 ``[m]``.
    """
    log_probs = logits.log_softmax(-1)
    cumulative = log_probs.exp().cumsum(-1)
    uniform = torch.rand(len(logits), 1, generator=generator, device=logits.device)
    action = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    # A uniform number that rounds up to the total falls off the end; the most probable action stands in.
    action = torch.where(action < logits.shape[-1], action, log_probs.argmax(-1, keepdim=True))
    return action.squeeze(-1), log_probs.gather(-1, action).squeeze(-1)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable action a row, int64 ``[m]``, and its log-probability, float32 ``[m]``."""
    log_prob, action = logits.log_softmax(-1).max(-1)
    return action, log_prob
