"""Forward passes with less memory or work: in parts, with gradient checkpointing or autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Trunk = Callable[..., Tensor]
"""From ``input_ids`` ``[B, L]``, ``attention_mask`` and so on to the last hidden state ``[B, L, size]``."""
POSITIONS_AT_ONCE = 512
"""Number of positions per forward pass on a CPU without gradients: more take memory and are no faster."""


def trunk_output(
    trunk: PreTrainedModel,
    *,
    gradient_checkpointing: bool,
    autocast: torch.dtype | None,
    input_ids: Tensor,
    **inputs: object,
) -> Tensor:
    """Return the last hidden state of a model without output layer for these inputs, ``[B, L, hidden size]``.

    Where gradients are off, checkpointing is ignored, so caches work.
    """
    checkpointing: AbstractContextManager[None] = nullcontext()
    if gradient_checkpointing and torch.is_grad_enabled():
        checkpointing = recomputed_layers(trunk)
    with precision(trunk, autocast), checkpointing:
        hidden = [trunk(**group).last_hidden_state for group in _row_groups(input_ids, inputs)]
    if len(hidden) == 1:
        return hidden[0]
    return torch.cat(hidden)


def _row_groups(tokens: Tensor, inputs: dict[str, object]) -> list[dict[str, object]]:
    """Split inputs into groups of rows if on a CPU, without key-value cache and gradients; else keep them together."""
    inputs = {"input_ids": tokens} | inputs
    rows_at_once = max(1, POSITIONS_AT_ONCE // max(1, tokens.shape[1]))
    if torch.is_grad_enabled() or tokens.is_cuda or inputs.get("use_cache") or len(tokens) <= rows_at_once:
        return [inputs]

    groups = []
    for start in range(0, len(tokens), rows_at_once):
        group = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and len(value) == len(tokens):
                group[name] = value[start : start + rows_at_once]
        groups.append(group)
    return groups


def precision(model: PreTrainedModel, autocast: torch.dtype | None) -> AbstractContextManager[object]:
    """Context in which matrix products use this dtype, while weights keep theirs; None changes nothing."""
    if autocast is None:
        return nullcontext()
    return torch.autocast(model.device.type, dtype=autocast)


@contextmanager
def recomputed_layers(trunk: nn.Module) -> Iterator[None]:
    """Context in which layers keep only their inputs for the backward pass (Chen et al. 2016).

    `transformers` checkpoints only layers in training mode, in which some of them (OPT) enable dropout. Here layers
    keep their mode; in training mode, recomputation draws the same dropout mask again.
    """
    layers = marked_layers(trunk)
    forwards = [
        partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=layer.training) for layer in layers
    ]
    with replaced_forwards(layers, forwards):
        yield


@contextmanager
def replaced_forwards(layers: Sequence[nn.Module], forwards: Sequence[Callable[..., Tensor]]) -> Iterator[None]:
    """Context in which each of these layers calls another function instead of its own forward pass."""
    former_forwards = [vars(layer).get("forward") for layer in layers]  # set by hooks of other libraries, if any
    try:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward
        yield
    finally:
        for layer, former_forward in zip(layers, former_forwards, strict=True):
            vars(layer).pop("forward", None)
            if former_forward is not None:
                layer.forward = former_forward


def check_memory_options(trunk: PreTrainedModel, *, gradient_checkpointing: bool, autocast: torch.dtype | None) -> None:
    """Raise a ValueError if the model has no layers marked for gradient checkpointing, or autocast is not bfloat16."""
    if gradient_checkpointing and not marked_layers(trunk):
        raise ValueError(
            f"gradient_checkpointing is True, but {type(trunk).__name__} has no GradientCheckpointingLayer: leave it "
            "out, and lower micro_batch_size if memory is short"
        )
    if autocast not in (None, torch.bfloat16):
        raise ValueError(
            f"autocast is {autocast}, expected torch.bfloat16 or None: the gradients of float16 vanish without a "
            "scaled loss, and None keeps the dtype of the weights"
        )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers in their order, without those inside another; empty for models in which none are marked."""
    layers = marked_layers(model)
    inner_modules = {module for layer in layers for module in layer.modules() if module is not layer}
    return [layer for layer in layers if layer not in inner_modules]


def marked_layers(trunk: nn.Module) -> list[nn.Module]:
    """Return the layers that `transformers` marks for gradient checkpointing, in their order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in trunk.modules() if isinstance(module, GradientCheckpointingLayer)]
