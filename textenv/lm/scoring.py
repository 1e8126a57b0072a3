"""Log-probability and entropy of tokens, with a bounded number of logits in memory at a time."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from textenv.lm.sampling import CACHED_ELEMENTS
from textenv.rollout import rounding_tolerance

Logits = Callable[[Tensor, int], Tensor]
"""Function from hidden states ``[k, hidden size]`` and first index to logits after `restrict`, float32 ``[k, n]``."""


class _Context(FunctionCtx):
    """What the backward pass of `TokenScores` needs."""

    logits: Logits
    temperature: float
    size: int
    kept_logits: Tensor | None
    """Logits of all rows; None if they are recomputed."""
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """Hidden states, weight, actions and entropies."""
    needs_input_grad: tuple[bool, ...]


class TokenScores(torch.autograd.Function):
    """log π(a) and the entropy of π under a linear output layer, whose logits are recomputed in the backward pass.

    With z the logits, l = z - logsumexp(z) and p = exp(l): ∂ log π(a) / ∂z = 1_a - p, ∂H / ∂z = -p (l + H). Operations
    after the output layer overwrite a chunk's logits, a few rows at a time. If all rows fit into one chunk, the logits
    are kept for the backward pass.

    Args (of `apply`):
        hidden: ``[m, hidden size]``.
        weight: weight of the output layer, ``[vocabulary, hidden size]``; it has no bias.
        action: int64 ``[m]``.
        logits: function that computes logits of hidden states, over the first n tokens.
        temperature: the temperature that ``logits`` divides by.
        size: number of rows per chunk.

    Returns:
        Two float32 ``[m]``, nats; differentiable once.
    """

    @staticmethod
    def forward(
        ctx: _Context, hidden: Tensor, weight: Tensor, action: Tensor, logits: Logits, temperature: float, size: int
    ) -> tuple[Tensor, Tensor]:
        """Score the actions in chunks; see the class."""
        dtype = logits(hidden[:0], 0).dtype
        log_prob, entropy = hidden.new_empty(2, len(action), dtype=dtype)
        chunk = None
        for start in range(0, len(action), size):
            chunk = None  # free it before the next one is made
            with torch.no_grad():
                chunk = logits(hidden[start : start + size], start)
            _score(chunk, start, action, log_prob, entropy)

        # For the backward pass
        ctx.logits = logits
        ctx.temperature = temperature
        ctx.size = size
        ctx.kept_logits = None
        if len(action) <= size and any(ctx.needs_input_grad):
            ctx.kept_logits = chunk
        ctx.save_for_backward(hidden, weight, action, entropy)
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, log_prob_gradient: Tensor | None, entropy_gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of hidden states and weight, chunk by chunk, from those of the two outputs."""
        hidden, weight, action, entropy = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.zeros_like(weight)

        for start in range(0, len(action), ctx.size):
            rows = slice(start, start + ctx.size)

            # Logits, overwritten by the gradient with respect to them
            if ctx.kept_logits is not None:
                logit_gradient = ctx.kept_logits.clone()
            else:
                with torch.no_grad():
                    logit_gradient = ctx.logits(hidden[rows], start)
            _replace_by_gradient(logit_gradient, start, action, entropy, log_prob_gradient, entropy_gradient)
            logit_gradient = logit_gradient.div_(ctx.temperature).to(weight.dtype)

            # Through the output layer; the vocabulary of the model may be larger
            num_tokens = logit_gradient.shape[-1]
            torch.mm(logit_gradient, weight[:num_tokens], out=hidden_gradient[rows])
            if weight_gradient is not None:
                weight_gradient[:num_tokens].addmm_(logit_gradient.T, hidden[rows])
            del logit_gradient  # free it before the next one is made
        return hidden_gradient, weight_gradient, None, None, None, None


def normalized(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and probabilities ``[m, n]``, differentiable and bit-identical to `TokenScores`."""
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    weights = shifted.exp()
    total = weights.sum(-1, keepdim=True)
    return shifted - total.log(), weights / total


def _pieces(logits: Tensor, start: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Apply `normalized` to a chunk ``[k, n]`` in place, a few rows at a time to stay in the CPU's cache.

    Yields:
        Slice of the rows (the chunk begins at row ``start``), their log-probabilities, and their probabilities.
    """
    rows_at_once = len(logits)
    if not logits.is_cuda:
        rows_at_once = max(1, CACHED_ELEMENTS // logits.shape[-1])
    for offset in range(0, len(logits), rows_at_once):
        part = logits[offset : offset + rows_at_once]
        part.sub_(part.amax(-1, keepdim=True))
        weights = part.exp()
        total = weights.sum(-1, keepdim=True)
        part.sub_(total.log())
        first_row = start + offset
        yield slice(first_row, first_row + len(part)), part, weights.div_(total)


def _score(logits: Tensor, start: int, action: Tensor, log_prob: Tensor, entropy: Tensor) -> None:
    """Write log-probability and entropy for a chunk's actions; its logits become log-probabilities."""
    for rows, log_probs, probability in _pieces(logits, start):
        log_prob[rows] = log_probs.gather(-1, action[rows, None]).squeeze(-1)
        entropy[rows] = -torch.linalg.vecdot(probability, log_probs)


def _replace_by_gradient(
    logits: Tensor,
    start: int,
    action: Tensor,
    entropy: Tensor,
    log_prob_gradient: Tensor | None,
    entropy_gradient: Tensor | None,
) -> None:
    """Replace a chunk of logits by their gradient, from those of log-probability and entropy; see the class."""
    for rows, log_probs, probability in _pieces(logits, start):
        if entropy_gradient is None:
            log_probs.zero_()
        else:
            # Multiply by the probability first: another factor could make the lowest finite logit (forbidden) infinite.
            log_probs.add_(entropy[rows, None]).mul_(probability).mul_(-entropy_gradient[rows, None])
        if log_prob_gradient is not None:
            log_probs.addcmul_(probability, log_prob_gradient[rows, None], value=-1)
            log_probs.scatter_add_(-1, action[rows, None], log_prob_gradient[rows, None])


def rounding(logits: Tensor) -> float:
    """Tolerance for differences of log-probabilities ``[m, n]`` caused by rounding in the dtype of these logits."""
    largest = logits.float().log_softmax(-1).abs().max().item()
    return rounding_tolerance(logits.dtype) * max(1.0, largest)
