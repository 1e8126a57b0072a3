"""Log-probability and entropy of chosen tokens, with no more than a few logits in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Logits = Callable[[Tensor, int], Tensor]
"""Of hidden states ``[k, hidden size]`` that begin at that row: tempered and restricted logits, float32 ``[k, n]``."""


class TokenScores(torch.autograd.Function):
    """log π(a) and the entropy of π under a linear output layer, whose logits are made again in the backward pass.

    With z the logits, l = z - logsumexp(z) and p = exp(l): ∂ log π(a) / ∂z = 1_a - p, ∂H / ∂z = -p (l + H). Where all
    fit into one chunk they are kept instead.

    Args (of `apply`):
        hidden: ``[m, hidden size]``.
        weight: of the output layer, ``[vocabulary, hidden size]``; it has no bias.
        action: int64 ``[m]``.
        logits: what makes logits of hidden states, over the first n tokens.
        temperature: what it divided them by.
        size: rows of a chunk.

    Returns:
        Two float32 ``[m]``, nats. They can be differentiated once.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, action: Tensor, logits: Logits, temperature: float, size: int
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        parts = []
        for start in range(0, max(len(action), 1), size):
            kept = _log_probs(logits, hidden, start, size)
            chosen = kept.gather(-1, action[start : start + size, None]).squeeze(-1)
            parts.append((chosen, -expected(kept)))
        log_prob, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.logits, ctx.temperature, ctx.size = logits, temperature, size
        ctx.kept = kept if len(parts) == 1 and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, action, entropy)
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_log_prob: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states and weight, chunk by chunk."""
        hidden, weight, action, entropy = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(action), ctx.size):
            rows = slice(start, start + ctx.size)
            log_probs = _log_probs(ctx.logits, hidden, start, ctx.size) if ctx.kept is None else ctx.kept
            slopes = (None if x is None else x[rows, None] for x in (to_log_prob, to_entropy))
            gradient = (
                _to_logits(log_probs, action[rows], entropy[rows], *slopes).div_(ctx.temperature).to(weight.dtype)
            )
            torch.mm(gradient, weight[: gradient.shape[-1]], out=to_hidden[rows])
            if to_weight is not None:
                to_weight[: gradient.shape[-1]].addmm_(gradient.T, hidden[rows])
        return to_hidden, to_weight, None, None, None, None


def _log_probs(logits: Logits, hidden: Tensor, start: int, size: int) -> Tensor:
    """Log-probabilities of a chunk, in the memory of its logits."""
    with torch.no_grad():
        z = logits(hidden[start : start + size], start)
        return z.sub_(z.logsumexp(-1, keepdim=True))


def expected(log_probs: Tensor) -> Tensor:
    """E[log p] of each row."""
    return torch.linalg.vecdot(log_probs.exp(), log_probs)


def _to_logits(
    log_probs: Tensor, action: Tensor, entropy: Tensor, to_log_prob: Tensor | None, to_entropy: Tensor | None
) -> Tensor:
    """The gradient at the logits of a chunk."""
    probability = log_probs.exp()
    if to_entropy is None:
        gradient = probability.neg_() if to_log_prob is None else probability.mul_(-to_log_prob)
    else:
        slope = (log_probs + entropy[:, None]).mul_(-to_entropy)
        gradient = probability.mul_(slope if to_log_prob is None else slope.sub_(to_log_prob))
    if to_log_prob is not None:
        gradient.scatter_add_(-1, action[:, None], to_log_prob)
    return gradient
