"""Choosing tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Actions whose probabilities are summed first when one is drawn from many."""
CACHED_ELEMENTS = 2**18
"""Logits that are worked on at a time on the CPU: a MiB."""
BELOW_ONE = 1 - 2**-24
"""The greatest float32 below 1."""


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


def sample(
    logits: Tensor, *, generator: torch.Generator | None = None, uniform: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one action a row by inverting the distribution function at one uniform number a row.

    Of a large vocabulary it is inverted in two levels, first over the sums of blocks of actions, then inside the block
    that was hit, so that little more is computed than the exponentials.

    Args:
        logits: float32 ``[m, n]``.
        generator: source of the uniform numbers, on the logits' device.
        uniform: these numbers instead, float32 ``[m]``, at least 0 and below 1.

    Returns:
        action int64 ``[m]`` and its log-probability float32 ``[m]``.
    """
    last = logits.shape[-1] - 1
    greatest = logits.amax(-1, keepdim=True)
    if uniform is None:
        uniform = torch.rand(len(logits), 1, generator=generator, device=logits.device)
    else:
        uniform = uniform.unsqueeze(-1)
    if last < 4 * BLOCK:
        cumulative = (logits - greatest).exp_().cumsum(-1)
        total = cumulative[:, -1:]
        action = _invert(cumulative, uniform * total, total)
    else:
        cumulative = _block_sums(logits, greatest).cumsum(-1)
        total = cumulative[:, -1:]
        level = uniform * total
        block = _invert(cumulative, level, total)
        inside = block * BLOCK + torch.arange(BLOCK, device=logits.device)
        weights = (logits.gather(-1, inside.clamp(max=last)) - greatest).exp_().masked_fill_(inside > last, 0.0)
        within = weights.cumsum(-1)
        rest = level - cumulative.gather(-1, block) + within[:, -1:]
        action = block * BLOCK + _invert(within, rest.clamp_(min=0.0), within[:, -1:])
    log_prob = logits.gather(-1, action) - greatest - total.log()
    return action.squeeze(-1), log_prob.squeeze(-1)


def _invert(cumulative: Tensor, level: Tensor, total: Tensor) -> Tensor:
    """First place where cumulative weights ``[m, k]`` exceed a level ``[m, 1]``; its weight is not 0.

    A level that rounding has put above the total ``[m, 1]`` is taken for the greatest one below it.
    """
    return torch.searchsorted(cumulative, torch.minimum(level, total * BELOW_ONE), right=True)


def _block_sums(logits: Tensor, greatest: Tensor) -> Tensor:
    """exp(logits - greatest) summed over blocks of actions, ``[m, blocks]``; on the CPU a few rows at a time."""
    rows, columns = logits.shape
    blocks, at_once = -(-columns // BLOCK), rows if logits.is_cuda else max(1, CACHED_ELEMENTS // columns)
    weights, sums = logits.new_zeros(min(at_once, rows), blocks * BLOCK), logits.new_empty(rows, blocks)
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        here = weights[: len(logits[part])]
        torch.sub(logits[part], greatest[part], out=here[:, :columns]).exp_()
        torch.sum(here.unflatten(-1, (blocks, BLOCK)), -1, out=sums[part])
    return sums


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable action a row, int64 ``[m]``, and its log-probability, float32 ``[m]``."""
    log_prob, action = logits.log_softmax(-1).max(-1)
    return action, log_prob
