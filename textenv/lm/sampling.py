"""Sampling of tokens from logits."""

import torch
from torch import Tensor

BLOCK = 256
"""Number of actions per block in two-level sampling; see `sample`."""
CACHED_ELEMENTS = 2**18
"""Number of logits processed at a time on the CPU (1 MiB), so that they stay in its cache."""
BELOW_ONE = 1 - 2**-24
"""Largest float32 below 1."""


def restrict(logits: Tensor, *, temperature: float, allowed: Tensor | None) -> Tensor:
    """Divide logits ``[m, n]`` by the temperature, then mask forbidden actions; float32 ``[m, n]``.

    Forbidden logits become the lowest finite number rather than -inf, so that ``p * log p`` is 0 there and no
    gradient is NaN. ``allowed`` is bool, broadcast to ``[m, n]``; None allows everything.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if allowed is not None:
        logits = logits.masked_fill(~allowed.to(logits.device), torch.finfo(logits.dtype).min)
    return logits


def truncate(logits: Tensor, *, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Keep only the most probable actions of each row, float32 ``[m, n]``; the others get the lowest finite logit.

    Args:
        logits: float32 ``[m, n]``.
        top_k: number of actions to keep; None keeps all.
        top_p: after ``top_k``, keep the fewest actions whose total probability reaches this (Holtzman et al. 2020);
            None keeps all.
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
    """Draw one action per row by inverting the cumulative distribution at one uniform number per row.

    For a large vocabulary the inversion has two levels, first over sums of blocks of actions, then inside the selected
    block, so that it costs little more than the exponentials.

    Args:
        logits: ``[m, n]``, computed with in float32.
        generator: source of the uniform numbers, on any device.
        uniform: uniform numbers to use instead, float32 ``[m]``, at least 0 and below 1.

    Returns:
        Action int64 ``[m]`` and its log-probability float32 ``[m]``.
    """
    logits, last = logits.float(), logits.shape[-1] - 1  # float16 cannot hold the sum of a vocabulary
    greatest = logits.amax(-1, keepdim=True)
    if uniform is None:
        place = logits.device if generator is None else generator.device
        uniform = torch.rand(len(logits), 1, generator=generator, device=place).to(logits.device)
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
    """Index of the first cumulative weight ``[m, k]`` above a level ``[m, 1]``; the weight at that index is not 0.

    A level that rounding puts above the total ``[m, 1]`` is lowered to just below it.
    """
    return torch.searchsorted(cumulative, torch.minimum(level, total * BELOW_ONE), right=True)


def _block_sums(logits: Tensor, greatest: Tensor) -> Tensor:
    """Sums of exp(logits - greatest) over blocks of actions, ``[m, blocks]``; on the CPU a few rows at a time."""
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
    """Return the most probable action per row, int64 ``[m]``, and its log-probability, float32 ``[m]``."""
    log_prob, action = logits.log_softmax(-1).max(-1)
    return action, log_prob
