"""Read rows of unequal length without their padding: packed into one row, or in groups of about one length.

In a pack, the tokens of all rows stand one after another, and attention keeps the rows apart. Packs are for models
whose every layer has causal attention by the interface of `transformers`. For each model it is checked once that the
rows of a pack do not see each other.

If asked to, a pack has tokens with which several rows begin only once: of "You are in row 1" and "You are in row 2",
those before the number. The keys and values of a shared token are those of each of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from textenv.lm.frozen_layers import FrozenLayers
from textenv.lm.memory import POSITIONS_AT_ONCE, Trunk
from textenv.rollout import rounding_tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PASS_COST = 24
"""Fixed cost of a forward pass, as a number of positions that cost as much: on a CPU 20 to 26 for small GPT-2s."""
PADDED_POSITIONS_AT_ONCE = 8 * POSITIONS_AT_ONCE
"""Number of positions of the padded rows in one pack without gradients, where most tokens are shared."""
PACKED = "textenv_packed"
"""Name of the attention of packs, for `transformers`."""
_packable: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
"""By model: True if its rows may be packed (`_packs_well`)."""


def without_padding(
    run: Trunk,
    tokens: Tensor,
    length: Tensor,
    model: PreTrainedModel | None = None,
    *,
    share_beginnings: bool = False,
    frozen_layers: FrozenLayers | None = None,
) -> Tensor:
    """Return a trunk's output ``[B, L, size]`` for rows of these lengths (int64 ``[B]``); on padding it is not valid.

    In one process on a CPU, padding is not read. Elsewhere it is read, too.

    Args:
        run: the trunk; causal, so that a row does not depend on what follows.
        tokens: int64 ``[B, L]``.
        length: number of tokens to read of each row, at least 1.
        model: the trunk's model, if its rows may be packed: not with gradient checkpointing, which reads them again
            later.
        share_beginnings: read tokens with which several rows begin once, if the rows may be packed.
        frozen_layers: with ``share_beginnings``: the memory of what the model's frozen layers give for a row, so that
            they read each row once.
    """
    # Ranks that share weights (FSDP) take part in each other's passes, and need equal numbers of them.
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if tokens.is_cuda or is_distributed:  # without a look at the lengths, which would wait for the device
        return _plain(run, tokens)
    has_padding = bool(length.min() < tokens.shape[1])
    if not (has_padding or share_beginnings):
        return _plain(run, tokens)
    if model is not None and _can_pack(model, run):
        if share_beginnings:
            if frozen_layers is not None and not frozen_layers.can_skip(model, run):
                frozen_layers = None
            return _in_packs_with_shared_beginnings(model, run, tokens, length, frozen_layers)
        return _in_packs(model, run, tokens, length)
    return _in_groups(run, tokens, length)


def _in_packs(model: PreTrainedModel, run: Trunk, tokens: Tensor, length: Tensor) -> Tensor:
    """Read the rows in packs: with gradients in one, else in packs of about `POSITIONS_AT_ONCE` tokens."""
    hidden = []
    for rows in _pack_slices(len(tokens), int(length.sum()), tokens.shape[1]):
        hidden.append(_packed(model, run, tokens[rows], _rows(length[rows], tokens.shape[1])))
    return torch.cat(hidden)


def _in_packs_with_shared_beginnings(
    model: PreTrainedModel, run: Trunk, tokens: Tensor, length: Tensor, frozen_layers: FrozenLayers | None
) -> Tensor:
    """Like `_in_packs`, but what rows of a pack have in common up to a position is read once."""
    # In the order of their tokens, rows with the same beginning stand one after another
    width = tokens.shape[1]
    is_padding = torch.arange(width, device=tokens.device) >= length[:, None]
    ordered, row_of = tokens.masked_fill(is_padding, -1).unique(dim=0, return_inverse=True)
    tokens = ordered.clamp(min=0)

    num_tokens = int(_is_own(ordered).sum())
    hidden = []
    for part in _pack_slices(len(tokens), num_tokens, width):
        rows = _rows_with_shared_beginnings(ordered[part])
        skip_frozen_layers: AbstractContextManager[None] = nullcontext()
        if frozen_layers is not None:
            outputs = frozen_layers.outputs(run, tokens[part], (ordered[part] >= 0).sum(1))
            skip_frozen_layers = frozen_layers.skipped(rows.collect(outputs)[None])
        with skip_frozen_layers:
            hidden.append(_packed(model, run, tokens[part], rows))
    return torch.cat(hidden)[row_of]


def _pack_slices(num_rows: int, num_tokens: int, width: int) -> list[slice]:
    """Divide rows, which have this many tokens together and are padded to this width, into packs; see `_in_packs`."""
    rows_at_once = num_rows
    if not torch.is_grad_enabled():
        rows_of_limit = num_rows * POSITIONS_AT_ONCE // num_tokens
        # Attention has queries and keys for each position of the padded rows, shared or not
        rows_for_attention = PADDED_POSITIONS_AT_ONCE // width
        rows_at_once = max(1, min(rows_of_limit, rows_for_attention))
    return [slice(start, start + rows_at_once) for start in range(0, num_rows, rows_at_once)]


def _in_groups(run: Trunk, tokens: Tensor, length: Tensor) -> Tensor:
    """Read the rows in groups, each padded to the longest row of the group."""
    order = length.argsort(stable=True)
    lengths = length[order].tolist()
    groups = []
    end = 0
    for rows in order.split(_group_sizes(lengths)):
        end += len(rows)
        longest = lengths[end - 1]
        hidden = _plain(run, tokens[rows, :longest])
        groups.append(pad(hidden, (0, 0, 0, tokens.shape[1] - hidden.shape[1])))
    return torch.cat(groups)[order.argsort()]


def _plain(run: Trunk, tokens: Tensor) -> Tensor:
    """Read the rows with their padding."""
    return run(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)


def _group_sizes(lengths: list[int]) -> list[int]:
    """Divide rows into consecutive groups with the least cost (dynamic programming); return the sizes of the groups.

    A group costs its number of positions, padding included, and `PASS_COST`.

    Args:
        lengths: number of tokens of each row, increasing.
    """
    # A group may end only where the next row is longer, in units of 1/32 of the longest: so few ends are compared
    step = max(1, lengths[-1] // 32)
    rounded = [math.ceil(length / step) for length in lengths]
    ends = [end for end in range(1, len(lengths)) if rounded[end - 1] != rounded[end]]
    ends.append(len(lengths))

    # By end of a group: the least cost of all rows up to there, and the start of that group
    best = {0: (0, 0)}
    for end in ends:
        width = lengths[end - 1]
        candidates = []
        for start, (earlier_cost, _) in best.items():
            cost = earlier_cost + PASS_COST + (end - start) * width
            candidates.append((cost, start))
        best[end] = min(candidates)

    # Backwards from the last group
    sizes = []
    end = len(lengths)
    while end:
        _, start = best[end]
        sizes.append(end - start)
        end = start
    sizes.reverse()
    return sizes


def _packed(model: PreTrainedModel, run: Trunk, tokens: Tensor, rows: _Rows) -> Tensor:
    """Read the rows in one pack."""
    column = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)

    # Switch to the attention of packs. Hide the padding token, because GPT-2 with one would ask for a mask
    config = model.config
    attention = config._attn_implementation
    pad_token_id = config.pad_token_id
    config._attn_implementation = PACKED
    config.pad_token_id = None
    try:
        hidden = run(
            input_ids=rows.collect(tokens)[None],
            position_ids=rows.collect(column)[None],
            attention_mask=None,
            use_cache=False,
            packed_rows=rows,
        )
    finally:
        config._attn_implementation = attention
        config.pad_token_id = pad_token_id
    return rows.spread(hidden[0])


@dataclass(frozen=True)
class _Rows:
    """Where the tokens of a pack are in the padded rows."""

    indices: Tensor
    """Index of each token of the pack in the flattened padded rows, int64 ``[N]``; of a shared one in its first row."""
    shape: torch.Size
    """Shape of the padded rows, ``[B, L]``."""
    sources: Tensor | None = None
    """Index of the token of the pack that stands at each position of the flattened padded rows, int64 ``[B * L]``; any
    on padding. None if no token is shared."""

    def collect(self, padded: Tensor) -> Tensor:
        """``[B, L, ...]`` to ``[N, ...]``."""
        return padded.flatten(0, 1).index_select(0, self.indices)

    def spread(self, packed: Tensor) -> Tensor:
        """``[N, ...]`` to ``[B, L, ...]``, with zeros for padding, or any numbers if tokens are shared."""
        if self.sources is not None:
            return packed.index_select(0, self.sources).unflatten(0, self.shape)
        zeros = packed.new_zeros(self.shape.numel(), *packed.shape[1:])
        padded = zeros.index_copy(0, self.indices, packed)
        return padded.unflatten(0, self.shape)


def _rows(length: Tensor, width: int) -> _Rows:
    """Rows of these lengths, padded to this width."""
    mask = torch.arange(width, device=length.device) < length[:, None]
    return _Rows(mask.flatten().nonzero().squeeze(1), mask.shape)


def _rows_with_shared_beginnings(ordered: Tensor) -> _Rows:
    """Rows in the order of their tokens, int64 ``[B, L]`` with -1 on padding."""
    is_own = _is_own(ordered)
    # A shared token stands in the last row above that has one of its own in that column
    row = torch.arange(len(ordered), device=ordered.device).unsqueeze(1)
    own_row = torch.where(is_own, row, 0).cummax(0).values
    number = is_own.flatten().cumsum(0).sub(1).clamp(min=0).view_as(ordered)
    sources = number.gather(0, own_row)
    return _Rows(is_own.flatten().nonzero().squeeze(1), ordered.shape, sources.flatten())


def _is_own(ordered: Tensor) -> Tensor:
    """Return where ordered rows have a token that the row above does not share, bool ``[B, L]``."""
    is_token = ordered >= 0
    is_equal = ordered[1:] == ordered[:-1]
    is_shared = is_equal.cumprod(1).bool()
    is_own = is_token.clone()
    is_own[1:] &= ~is_shared
    return is_own


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    packed_rows: _Rows,
    **options: object,
) -> tuple[Tensor, None]:
    """Causal attention inside the rows of a pack: ``[1, heads, N, size]`` to ``[1, N, heads, size]``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # [1, heads, N, size] to [B, heads, L, size]
    query = packed_rows.spread(query[0].transpose(0, 1)).transpose(1, 2)
    key = packed_rows.spread(key[0].transpose(0, 1)).transpose(1, 2)
    value = packed_rows.spread(value[0].transpose(0, 1)).transpose(1, 2)
    attend: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward  # its options come from the layer
    output, _ = attend(module, query, key, value, attention_mask, **options)

    # [B, L, heads, size] to [1, N, heads, size]
    return packed_rows.collect(output)[None], None


def _can_pack(model: PreTrainedModel, run: Trunk) -> bool:
    """Return True if the model's rows may be packed; checked once."""
    if model not in _packable:
        _packable[model] = _packs_well(model, run)
    return _packable[model]


@torch.no_grad()
def _packs_well(model: PreTrainedModel, run: Trunk) -> bool:
    """Return True if rows of a pack come out as they do alone, and do not depend on one another."""
    from transformers import AttentionInterface

    # Only models in which every layer attends to all earlier tokens
    config = model.config
    if config._attn_implementation != "sdpa":
        return False
    if getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
        return False
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    if set(layer_types) != {"full_attention"}:
        return False

    # Three rows; then the same with other tokens in the first two
    AttentionInterface.register(PACKED, _attend)
    length = torch.tensor([3, 7, 5], device=model.device)
    tokens = torch.arange(3 * 7, device=model.device).view(3, 7) % config.vocab_size
    changed_tokens = tokens.clone()
    changed_tokens[:2] = (tokens[:2] + 1) % config.vocab_size
    # And three rows of which two begin alike
    ordered = torch.tensor([[1, 2, 3], [1, 2, 4], [2, 2, 3]], device=model.device) % config.vocab_size
    try:
        plain = _plain(run, tokens)
        shared = _packed(model, run, ordered, _rows_with_shared_beginnings(ordered))
        shared_plain = _plain(run, ordered)
        packed = _packed(model, run, tokens, _rows(length, 7))
        changed = _packed(model, run, changed_tokens, _rows(length, 7))
    except Exception:  # a model may raise anything for inputs that it does not know
        return False

    if not torch.equal(packed[2], changed[2]):
        return False
    mask = torch.arange(7, device=model.device) < length[:, None]
    difference = (packed - plain)[mask].abs()
    tolerance = rounding_tolerance(plain.dtype) * max(1.0, plain.abs().max().item())
    shared_difference = (shared - shared_plain).abs()
    return bool((difference <= tolerance).all() and (shared_difference <= tolerance).all())
