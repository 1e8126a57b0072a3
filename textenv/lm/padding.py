"""Rows of unequal length are read without their padding: packed into one row, or else in groups of about one length.

In a pack, tokens stand one after another and attention takes them apart. It is for models whose every layer has the
causal attention of `transformers`' interface; that rows of a pack do not see each other is checked once for each model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from textenv.lm.memory import POSITIONS_AT_ONCE
from textenv.rollout import rounding_tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POSITIONS_A_PASS = 24
"""What a pass costs besides its positions, in positions: measured on a CPU for GPT-2s of 2 and 6 layers (20 to 26)."""
PACKED = "textenv_packed"
"""Name of the attention of packs, for `transformers`."""
Trunk = Callable[..., Tensor]
"""From ``input_ids`` ``[B, L]``, ``attention_mask`` and so on to the last hidden state ``[B, L, size]``."""
_packable: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def without_padding(run: Trunk, tokens: Tensor, length: Tensor, model: PreTrainedModel | None = None) -> Tensor:
    """Output of a trunk ``[B, L, size]`` for rows of these lengths (int64 ``[B]``); 0 or meaningless after them.

    In one process on a CPU it is not computed after them. Elsewhere rows are read whole.

    Args:
        run: the trunk; causal, so that a row does not depend on what follows.
        tokens: int64 ``[B, L]``.
        length: number of tokens to read of each row, at least 1.
        model: the trunk's model, if its rows may be packed: not with gradient checkpointing, which reads them again
            later.
    """
    # Ranks that share weights (FSDP) take part in each other's passes, and need equal numbers of them.
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    if tokens.is_cuda or not alone or length.min() == tokens.shape[1]:
        return _plain(run, tokens)
    if model is not None and _can_pack(model, run):
        rows = len(tokens)
        if not torch.is_grad_enabled():
            rows = max(1, rows * POSITIONS_AT_ONCE // int(length.sum()))
        packs = zip(tokens.split(rows), length.split(rows), strict=True)
        return torch.cat([_packed(model, run, *pack) for pack in packs])
    order = length.argsort(stable=True)
    lengths = length[order].tolist()
    parts, end = [], 0
    for rows in order.split(_group_sizes(lengths)):
        end += len(rows)
        part = _plain(run, tokens[rows, : lengths[end - 1]])
        parts.append(pad(part, (0, 0, 0, tokens.shape[1] - part.shape[1])))
    return torch.cat(parts)[order.argsort()]


def _plain(run: Trunk, tokens: Tensor) -> Tensor:
    return run(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)


def _group_sizes(lengths: list[int]) -> list[int]:
    """Sizes of groups of rows of increasing lengths that have the fewest positions, each `POSITIONS_A_PASS` more."""
    step = max(1, lengths[-1] // 32)
    ends = [i for i, x in enumerate(lengths, 1) if i == len(lengths) or -(-x // step) != -(-lengths[i] // step)]
    best = {0: (0, 0)}  # by end of a group: positions up to there, beginning of the group
    for end in ends:
        width = lengths[end - 1]
        best[end] = min(
            (before + POSITIONS_A_PASS + (end - start) * width, start) for start, (before, _) in best.items()
        )
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return [end - start for start, end in zip(cuts[:0:-1], cuts[-2::-1], strict=True)]


def _packed(model: PreTrainedModel, run: Trunk, tokens: Tensor, length: Tensor) -> Tensor:
    column = torch.arange(tokens.shape[1], device=tokens.device)
    mask = column < length[:, None]
    rows = _Rows(mask.flatten().nonzero().squeeze(1), tokens.shape)
    config = model.config
    usual = config._attn_implementation, config.pad_token_id
    config._attn_implementation, config.pad_token_id = PACKED, None  # with a padding token, GPT-2 would ask for a mask
    try:
        inputs = {"input_ids": tokens[mask][None], "position_ids": column.expand_as(tokens)[mask][None]}
        hidden = run(**inputs, attention_mask=None, use_cache=False, packed_rows=rows)
    finally:
        config._attn_implementation, config.pad_token_id = usual
    return rows.spread(hidden[0])


@dataclass(frozen=True)
class _Rows:
    """Rows packed into one: the places of its tokens in the padded rows laid end to end, int64 ``[N]``; their shape."""

    places: Tensor
    shape: torch.Size

    def spread(self, packed: Tensor) -> Tensor:
        """``[N, ...]`` to ``[B, L, ...]``, with zeros for padding."""
        padded = packed.new_zeros(self.shape.numel(), *packed.shape[1:]).index_copy(0, self.places, packed)
        return padded.unflatten(0, self.shape)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_rows: _Rows, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention inside the rows of a pack: ``[1, heads, N, size]`` to ``[1, N, heads, size]``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query, key, value = (packed_rows.spread(x[0].transpose(0, 1)).transpose(1, 2) for x in (query, key, value))
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out.flatten(0, 1).index_select(0, packed_rows.places)[None], None


def _can_pack(model: PreTrainedModel, run: Trunk) -> bool:
    if model not in _packable:
        _packable[model] = _packs_well(model, run)
    return _packable[model]


@torch.no_grad()
def _packs_well(model: PreTrainedModel, run: Trunk) -> bool:
    """True if rows of a pack come out as they do alone, and do not depend on one another."""
    from transformers import AttentionInterface

    config: Any = model.config
    windows = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config._attn_implementation != "sdpa" or any(windows) or layers != {"full_attention"}:
        return False
    AttentionInterface.register(PACKED, _attend)
    length = torch.tensor([3, 7, 5], device=model.device)
    tokens = torch.arange(3 * 7, device=model.device).view(3, 7) % config.vocab_size
    other = tokens.clone()
    other[:2] = (other[:2] + 1) % config.vocab_size
    try:
        plain, packed, changed = _plain(run, tokens), *(_packed(model, run, x, length) for x in (tokens, other))
    except Exception:  # a model may raise anything for inputs that it does not know
        return False
    mask = torch.arange(7, device=model.device) < length[:, None]
    tolerance = rounding_tolerance(plain.dtype) * max(1.0, plain.abs().max().item())
    return torch.equal(packed[2], changed[2]) and bool(((packed - plain)[mask].abs() <= tolerance).all())
