"""Sampling of tokens from logits."""

import math

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
        count = min(top_k, logits.shape[-1])
        smallest_kept = logits.topk(count).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, lowest)
    if top_p is not None:
        probability, order = logits.softmax(-1).sort(descending=True)
        preceding_probability = probability.cumsum(-1) - probability  # total of all more probable actions
        is_dropped = torch.zeros_like(logits, dtype=torch.bool)
        is_dropped.scatter_(-1, order, preceding_probability >= top_p)
        logits = logits.masked_fill(is_dropped, lowest)
    return logits


def sample(
    logits: Tensor, *, generator: torch.Generator | None = None, uniform: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one action per row by inverting the cumulative distribution at one uniform number per row.

    For a large vocabulary the inversion has two levels: first over sums of blocks of actions, then inside the selected
    block. So it costs little more than the exponentials.

    Args:
        logits: ``[m, n]``, computed with in float32.
        generator: source of the uniform numbers, on any device.
        uniform: uniform numbers to use instead, float32 ``[m]``, at least 0 and below 1.

    Returns:
        Action int64 ``[m]`` and its log-probability float32 ``[m]``.
    """
    logits = logits.float()  # float16 cannot hold the sum of a vocabulary
    last = logits.shape[-1] - 1
    greatest = logits.amax(-1, keepdim=True)

    # Uniform numbers, [m, 1]
    if uniform is not None:
        uniform = uniform.unsqueeze(-1)
    else:
        device = logits.device if generator is None else generator.device
        uniform = torch.rand(len(logits), 1, generator=generator, device=device).to(logits.device)

    if last < 4 * BLOCK:
        cumulative = (logits - greatest).exp_().cumsum(-1)
        total = cumulative[:, -1:]
        action = _invert(cumulative, uniform * total, total)
    else:
        # The block
        cumulative = _block_sums(logits, greatest).cumsum(-1)
        total = cumulative[:, -1:]
        level = uniform * total
        block = _invert(cumulative, level, total)

        # The action inside the block, [m, BLOCK]; the last block may be shorter
        actions = block * BLOCK + torch.arange(BLOCK, device=logits.device)
        weights = (logits.gather(-1, actions.clamp(max=last)) - greatest).exp_()
        weights.masked_fill_(actions > last, 0.0)
        block_cumulative = weights.cumsum(-1)
        block_total = block_cumulative[:, -1:]
        # Inside the block the level is less by the total of the blocks before it
        block_level = level - cumulative.gather(-1, block) + block_total
        action = block * BLOCK + _invert(block_cumulative, block_level.clamp_(min=0.0), block_total)

    log_prob = logits.gather(-1, action) - greatest - total.log()
    return action.squeeze(-1), log_prob.squeeze(-1)


def _invert(cumulative: Tensor, level: Tensor, total: Tensor) -> Tensor:
    """Index of the first cumulative weight ``[m, k]`` above a level ``[m, 1]``; the weight at that index is not 0.

    A level that rounding puts above the total ``[m, 1]`` is lowered to just below it.
    """
    return torch.searchsorted(cumulative, torch.minimum(level, total * BELOW_ONE), right=True)


def _block_sums(logits: Tensor, greatest: Tensor) -> Tensor:
    """Sums of exp(logits - greatest) over blocks of actions, ``[m, blocks]``; on the CPU a few rows at a time."""
    num_rows, num_actions = logits.shape
    num_blocks = math.ceil(num_actions / BLOCK)
    rows_at_once = num_rows
    if not logits.is_cuda:
        rows_at_once = max(1, CACHED_ELEMENTS // num_actions)

    # Memory of the weights, used again for each group of rows; the end of the last block stays 0
    weights = logits.new_zeros(min(rows_at_once, num_rows), num_blocks * BLOCK)
    sums = logits.new_empty(num_rows, num_blocks)
    for start in range(0, num_rows, rows_at_once):
        rows = slice(start, start + rows_at_once)
        group_logits = logits[rows]
        group_weights = weights[: len(group_logits)]
        torch.sub(group_logits, greatest[rows], out=group_weights[:, :num_actions]).exp_()
        torch.sum(group_weights.unflatten(-1, (num_blocks, BLOCK)), -1, out=sums[rows])
    return sums


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable action per row, int64 ``[m]``, and its log-probability, float32 ``[m]``."""
    log_prob, action = logits.log_softmax(-1).max(-1)
    return action, log_prob
