"""Caches whose rows are slots: keys and values at positions of their own, and the states of recurrent layers.

The caches of `transformers` advance all rows together. Here each row writes keys at its own positions, and its states
advance with its own tokens. Layers with a sliding window or with chunks keep all keys, and masks choose among them.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionLayer

from textenv.lm.loading import setting, trunk_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from textenv.lm.model import LanguageModel


class _SlotLayer(CacheLayerMixin):
    """Keys and values ``[slots, max_length, heads, head size]`` of one attention layer."""

    def __init__(self, num_slots: int, max_length: int, own: Any) -> None:
        super().__init__()
        self.num_slots, self.max_length = num_slots, max_length
        self.rows: Tensor | None = None  # slots in this forward pass; None means all
        self.positions = torch.empty(0, device="cpu")  # int64 [n, q], where the new keys go
        self.width: int | torch.SymInt = 0  # number of keys that queries may attend to
        self.past: int | torch.SymInt = 0  # position of the first query, for models that are not given positions

    def begin(self, rows: Tensor | None, positions: Tensor, width: int | torch.SymInt) -> None:
        """Prepare a forward pass over new tokens at these positions."""
        self.rows, self.positions, self.width = rows, positions, width

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots, size = self.num_slots, self.max_length
        self.keys = key_states.new_zeros(slots, size, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_zeros(slots, size, value_states.shape[1], value_states.shape[3])
        self.every = torch.arange(slots, device=key_states.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values at their positions and return those of the active rows."""
        if not self.is_initialized:
            _SlotLayer.lazy_initialization(self, key_states, value_states)
        assert self.keys is not None and self.values is not None
        rows = self.every if self.rows is None else self.rows
        self.keys[rows[:, None], self.positions] = key_states.transpose(1, 2)
        self.values[rows[:, None], self.positions] = value_states.transpose(1, 2)
        keys, values = self.keys[:, : self.width], self.values[:, : self.width]
        if self.rows is not None:
            keys, values = keys.index_select(0, rows), values.index_select(0, rows)  # faster than []
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0  # type: ignore[return-value]

    def get_seq_length(self) -> int:
        return self.past  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return self.max_length


class _StateLayer(LinearAttentionLayer):
    """States ``[slots, ...]`` of one recurrent or convolutional layer.

    A pass over one token continues from the states of its slots; a pass over several reads texts from their beginning.
    """

    def __init__(self, num_slots: int, max_length: int, own: Any) -> None:
        super().__init__(own.number_of_states)
        self.num_slots = num_slots
        self.stored: dict[tuple[str, int], Tensor] = {}
        self.chosen: Tensor | None = None  # slots in this forward pass; None means all

    def begin(self, rows: Tensor | None, positions: Tensor, width: int | torch.SymInt) -> None:
        """Give the model the states of these slots, or none at the beginning of texts."""
        self.chosen = rows
        if positions.shape[1] > 1 or width == 1:
            LinearAttentionLayer.__init__(self, self.number_of_states)
            return
        for (kind, i), states in self.stored.items():
            getattr(self, kind)[i] = states if rows is None else states.index_select(0, rows)

    def end(self) -> None:
        """Store the new states of these slots; if all slots were read, the model has written into the stored ones."""
        if self.chosen is None:
            return
        for kind in ("conv_states", "recurrent_states"):
            for i, states in getattr(self, kind).items():
                if states is not None:
                    if (kind, i) not in self.stored:
                        self.stored[kind, i] = states.new_zeros(self.num_slots, *states.shape[1:])
                    self.stored[kind, i][self.chosen] = states


class _BothLayer(_StateLayer, _SlotLayer):  # type: ignore[override]
    """Attention and recurrence in one layer."""

    def __init__(self, num_slots: int, max_length: int, own: Any) -> None:
        _SlotLayer.__init__(self, num_slots, max_length, own)
        _StateLayer.__init__(self, num_slots, max_length, own)

    def begin(self, rows: Tensor | None, positions: Tensor, width: int | torch.SymInt) -> None:
        _SlotLayer.begin(self, rows, positions, width)
        _StateLayer.begin(self, rows, positions, width)


class _RwkvStates(_StateLayer):
    """The five states of RWKV, ``[slots, hidden size, layers]`` each."""

    def __init__(self, num_slots: int, max_length: int, trunk: PreTrainedModel) -> None:
        super().__init__(num_slots, max_length, LinearAttentionLayer(number_of_states=5))
        self.size, self.kind = (trunk.config.hidden_size, trunk.config.num_hidden_layers), trunk.dtype

    def begin(self, rows: Tensor | None, positions: Tensor, width: int | torch.SymInt) -> None:
        """Give the model the states of these slots, or those at the beginning of texts."""
        super().begin(rows, positions, width)
        if self.conv_states[0] is None:
            first = torch.zeros(5, len(positions), *self.size, device=positions.device)
            first[4] -= 1e30  # logarithm of 0
            self.conv_states = {i: x.to(self.kind) if i < 2 else x for i, x in enumerate(first)}
        self.given: list[Any] = list(self.conv_states.values())
        if positions.shape[1] == 1:
            self.given[:2] = map(_LastInputs, self.given[:2])


class _LastInputs:
    """RWKV's inputs at the last token, with a dimension of tokens: without it, the model would mix the batch's rows."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def __getitem__(self, layer: Any) -> Tensor:
        return self.inputs[layer].unsqueeze(1)

    def __setitem__(self, layer: Any, inputs: Tensor) -> None:
        self.inputs[layer] = inputs


LAYERS: dict[str, type[_SlotLayer | _StateLayer]] = {
    **dict.fromkeys(("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"), _SlotLayer),  # a dummy remains empty
    "LinearAttentionLayer": _StateLayer,
    "LinearAttentionAndFullAttentionLayer": _BothLayer,
    "LinearAttentionAndSlidingWindowAttentionLayer": _BothLayer,
}
"""Layers with slots, by the name of the layer of `transformers` that they replace."""


class SlotCache:
    """Cache of a model whose rows are slots, and the attention masks that go with it.

    Args:
        lm: the model.
        num_slots: number of rows.
        max_length: maximum number of tokens in a slot.
    """

    def __init__(self, lm: LanguageModel, num_slots: int, max_length: int) -> None:
        self.lm, trunk, config = lm, trunk_of(lm.model), lm.model.config.get_text_config(decoder=True)
        taken = inspect.signature(trunk.forward).parameters
        own: list[Any] = DynamicCache(config=config).layers
        self.argument = next((name for name in ("state", "cache_params") if name in taken), "past_key_values")
        kinds = [LAYERS.get(type(layer).__name__) for layer in own]
        limits = {tuple(getattr(module, "time_step_limit", (0.0, math.inf))) for module in trunk.modules()}
        self.layers: list[Any] = []
        """Empty if the model has a layer without such a cache."""
        if self.argument == "state":
            self.layers = [_RwkvStates(num_slots, max_length, trunk)]
        elif None not in kinds and limits == {(0.0, math.inf)}:  # steps of one token ignore limits (Zamba 2)
            self.layers = [kind(num_slots, max_length, layer) for kind, layer in zip(kinds, own, strict=True) if kind]
        self._states = [layer for layer in self.layers if isinstance(layer, _StateLayer)]
        self.recurrent = bool(self._states)
        """True if slots have states, which each token must change once and padding must not change."""
        self.pads = self.recurrent and self.argument != "state"
        """True if texts of unequal length are read with padding on the left, which the model masks."""
        self.alibi = bool(getattr(trunk, "use_alibi", hasattr(trunk, "build_alibi_tensor")))
        """True if the model makes biases by distance itself, of a mask of keys (BLOOM, Falcon)."""
        self.restarts = self.recurrent or self.alibi
        """True if several new tokens are read from the beginning of a text only."""
        attention: list[Any] = [layer for layer in own if isinstance(layer, DynamicLayer)]
        windows = [layer.sliding_window for layer in attention if layer.is_sliding]
        self.window = min([*windows, max_length])
        self.chunked, self.mixed = setting(config, "sliding_window") is None, len(windows) < len(attention)
        self._steps = torch.arange(max_length, device=lm.device)
        added = [torch.finfo(lm.model.dtype).min, 0.0]
        self._lowest, self._nothing = torch.tensor(added, dtype=lm.model.dtype, device=lm.device)

    def mask(self, positions: Tensor, width: int) -> Tensor:
        """Additive mask of keys for queries at positions ``[n, q]``: ``[n, 1, q, width]``, 0 up to the query.

        For ALiBi int64 ``[n, width]`` instead, 1 up to the last query's position.
        """
        if self.alibi:
            return (self._steps[:width] <= positions[:, -1:]).long()
        return torch.where(self._steps[:width] > positions.unsqueeze(1).unsqueeze(3), self._lowest, self._nothing)

    def read(self, rows: Tensor | None, fresh: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run the trunk on new tokens ``[n, q]`` of these slots (None: of all), and return its output."""
        width = mask.shape[-1]
        for layer in self.layers:
            layer.begin(rows, positions, width)
            if self.alibi and isinstance(layer, _SlotLayer):
                layer.past = 0 if positions.shape[1] > 1 else width - 1
        cache = self.layers[0].given if self.argument == "state" else Cache(layers=list(self.layers))
        hidden = self.lm.trunk(
            input_ids=fresh,
            position_ids=positions,
            attention_mask=self._by_layer(positions, mask),
            use_cache=True,
            **{self.argument: cache},
        )
        for layer in self._states:
            layer.end()
        return hidden

    def copy(self, source: Tensor, target: Tensor, width: int) -> None:
        """Give slots the states of other slots, and their first ``width`` keys and values; int64 ``[n]`` each."""
        for layer in self.layers:
            kept = [*layer.stored.values()] if isinstance(layer, _StateLayer) else []
            if isinstance(layer, _SlotLayer) and layer.is_initialized:
                kept += [x[:, :width] for x in (layer.keys, layer.values) if x is not None]
            for x in kept:
                x[target] = x[source]

    def _by_layer(self, positions: Tensor, mask: Tensor) -> Tensor | dict[str, Tensor | None] | None:
        """Masks as the model takes them: one for all layers, or one for each kind of layer."""
        if not self.recurrent and self.window == len(self._steps):
            return mask
        # Padding on the left has the position after the text.
        real = (positions <= positions[:, -1:]).long() if self.pads and positions.shape[1] > 1 else None
        if not any(isinstance(layer, _SlotLayer) for layer in self.layers):
            return real
        keys, queries = self._steps[: mask.shape[-1]], positions.unsqueeze(1).unsqueeze(3)
        near = keys // self.window == queries // self.window if self.chunked else keys > queries - self.window
        windowed = torch.where(near, mask, self._lowest)
        if not self.recurrent and not self.mixed:
            return windowed
        masks: dict[str, Any] = dict.fromkeys(("full_attention", "hybrid"), mask)
        masks |= dict.fromkeys(("linear_attention", "conv"), real)
        return masks | dict.fromkeys(("sliding_attention", "hybrid_sliding", "chunked_attention"), windowed)
