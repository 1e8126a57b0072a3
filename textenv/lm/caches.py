"""Caches whose rows are slots: keys and values at positions of their own, and the states of recurrent layers.

The caches of `transformers` advance all rows together. Here each row writes keys at its own positions, and its states
advance with its own tokens. Layers with a sliding window or with chunks keep all keys, and masks choose among them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from textenv.lm.loading import setting, trunk_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from textenv.lm.model import LanguageModel


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one attention layer, by slot.

    Args:
        num_slots: number of slots.
        max_length: maximum number of tokens in a slot.
        layer: the layer of `transformers` that this one replaces.
    """

    def __init__(self, num_slots: int, max_length: int, layer: object) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.max_length = max_length
        self.rows: Tensor | None = None
        """Slots in this forward pass, int64 ``[n]``; None means all."""
        self.positions = torch.empty(0, device="cpu")
        """Where the new keys go, int64 ``[n, q]``."""
        self.width: int | torch.SymInt = 0
        """Number of keys that queries may attend to."""
        self.past: int | torch.SymInt = 0
        """Position of the first query, for models that are not given positions."""

    def begin(self, rows: Tensor | None, positions: Tensor, width: int | torch.SymInt) -> None:
        """Prepare a forward pass over new tokens at these positions."""
        self.rows = rows
        self.positions = positions
        self.width = width

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # [slots, max_length, heads, head size]
        slots = self.num_slots
        length = self.max_length
        self.keys = key_states.new_zeros(slots, length, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_zeros(slots, length, value_states.shape[1], value_states.shape[3])
        self.all_rows = torch.arange(slots, device=key_states.device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values at their positions and return those of the active rows."""
        if not self.is_initialized:
            # That of this class, because `_BothLayer` inherits another one first
            _SlotLayer.lazy_initialization(self, key_states, value_states)
        assert self.keys is not None and self.values is not None

        # Write: [n, heads, q, head size] to [n, q, heads, head size]
        rows = self.all_rows if self.rows is None else self.rows
        self.keys[rows[:, None], self.positions] = key_states.transpose(1, 2)
        self.values[rows[:, None], self.positions] = value_states.transpose(1, 2)

        # Read
        keys = self.keys[:, : self.width]
        values = self.values[:, : self.width]
        if self.rows is not None:
            keys = keys.index_select(0, rows)  # faster than []
            values = values.index_select(0, rows)
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

    Args:
        num_slots: number of slots.
        max_length: maximum number of tokens in a slot.
        layer: the layer of `transformers` that this one replaces.
    """

    def __init__(self, num_slots: int, max_length: int, layer: object) -> None:
        assert isinstance(layer, LinearAttentionLayer)
        super().__init__(layer.number_of_states)
        self.num_slots = num_slots
        self.stored: dict[tuple[str, int], Tensor] = {}
        """States of all slots, by their attribute in `transformers` and their index in it."""
        self.active_rows: Tensor | None = None
        """Slots in this forward pass, int64 ``[n]``; None means all."""

    def begin(self, rows: Tensor | None, positions: Tensor, width: int | torch.SymInt) -> None:
        """Give the model the states of these slots, or none at the beginning of texts."""
        self.active_rows = rows
        is_beginning = positions.shape[1] > 1 or width == 1
        if is_beginning:
            LinearAttentionLayer.__init__(self, self.number_of_states)
            return
        for (attribute, index), states in self.stored.items():
            active_states = states if rows is None else states.index_select(0, rows)
            getattr(self, attribute)[index] = active_states

    def end(self) -> None:
        """Store the new states of these slots; if all slots were read, the model has written into the stored ones."""
        if self.active_rows is None:
            return
        for attribute in ("conv_states", "recurrent_states"):
            for index, states in getattr(self, attribute).items():
                if states is None:
                    continue
                if (attribute, index) not in self.stored:
                    self.stored[attribute, index] = states.new_zeros(self.num_slots, *states.shape[1:])
                self.stored[attribute, index][self.active_rows] = states


class _BothLayer(_StateLayer, _SlotLayer):  # type: ignore[override]
    """Attention and recurrence in one layer."""

    def __init__(self, num_slots: int, max_length: int, layer: object) -> None:
        _SlotLayer.__init__(self, num_slots, max_length, layer)
        _StateLayer.__init__(self, num_slots, max_length, layer)

    def begin(self, rows: Tensor | None, positions: Tensor, width: int | torch.SymInt) -> None:
        _SlotLayer.begin(self, rows, positions, width)
        _StateLayer.begin(self, rows, positions, width)


class _RwkvStates(_StateLayer):
    """The five states of RWKV, ``[slots, hidden size, layers]`` each."""

    def __init__(self, num_slots: int, max_length: int, trunk: PreTrainedModel) -> None:
        super().__init__(num_slots, max_length, LinearAttentionLayer(number_of_states=5))
        self.state_shape = (trunk.config.hidden_size, trunk.config.num_hidden_layers)
        self.input_dtype = trunk.dtype

    def begin(self, rows: Tensor | None, positions: Tensor, width: int | torch.SymInt) -> None:
        """Give the model the states of these slots, or those at the beginning of texts."""
        super().begin(rows, positions, width)
        if self.conv_states[0] is None:
            first = torch.zeros(5, len(positions), *self.state_shape, device=positions.device)
            first[4] -= 1e30  # logarithm of 0
            states = list(first)
            for index in (0, 1):  # the last inputs; the others are float32
                states[index] = states[index].to(self.input_dtype)
            self.conv_states = dict(enumerate(states))

        states = [state for state in self.conv_states.values() if state is not None]
        self.model_states: list[Tensor | _LastInputs] = [*states]
        """The states as the model takes them."""
        if positions.shape[1] == 1:
            for index in (0, 1):
                self.model_states[index] = _LastInputs(states[index])


class _LastInputs:
    """RWKV's inputs at the last token, with a dimension of tokens: without it, the model would mix the batch's rows."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def __getitem__(self, layer: tuple[slice | int, ...]) -> Tensor:
        return self.inputs[layer].unsqueeze(1)

    def __setitem__(self, layer: tuple[slice | int, ...], inputs: Tensor) -> None:
        self.inputs[layer] = inputs


LAYERS: dict[str, type[_SlotLayer | _StateLayer]] = {
    "DynamicLayer": _SlotLayer,
    "DynamicSlidingWindowLayer": _SlotLayer,
    "DummyLayer": _SlotLayer,  # it remains empty
    "LinearAttentionLayer": _StateLayer,
    "LinearAttentionAndFullAttentionLayer": _BothLayer,
    "LinearAttentionAndSlidingWindowAttentionLayer": _BothLayer,
}
"""Layers with slots, by the name of the layer of `transformers` that they replace."""
NO_TIME_STEP_LIMIT = (0.0, math.inf)
"""``time_step_limit`` of a recurrent layer that does not limit its time steps."""


class SlotCache:
    """Cache of a model whose rows are slots, and the attention masks that go with it.

    Args:
        lm: the model.
        num_slots: number of rows.
        max_length: maximum number of tokens in a slot.
    """

    def __init__(self, lm: LanguageModel, num_slots: int, max_length: int) -> None:
        self.lm = lm
        trunk = trunk_of(lm.model)
        config = lm.model.config.get_text_config(decoder=True)
        model_layers = DynamicCache(config=config).layers

        # Layers with slots
        self.argument = _cache_argument(trunk)
        """Argument of the trunk's forward that takes the cache."""
        self.layers: list[_SlotLayer | _StateLayer] = []
        """Empty if the model has a layer without such a cache."""
        if self.argument == "state":
            self.layers = [_RwkvStates(num_slots, max_length, trunk)]
        elif not _limits_time_steps(trunk):
            self.layers = _slot_layers(model_layers, num_slots, max_length)
        self._state_layers = [layer for layer in self.layers if isinstance(layer, _StateLayer)]

        # How texts may be read
        self.recurrent = bool(self._state_layers)
        """True if slots have states, which each token must change once and padding must not change."""
        self.pads = self.recurrent and self.argument != "state"
        """True if texts of unequal length are read with padding on the left, which the model masks."""
        builds_alibi = hasattr(trunk, "build_alibi_tensor")
        self.alibi = bool(getattr(trunk, "use_alibi", builds_alibi))
        """True if the model itself computes biases by distance, from a mask of keys (BLOOM, Falcon)."""
        self.restarts = self.recurrent or self.alibi
        """True if several new tokens are read from the beginning of a text only."""

        # Masks
        attention_layers = [layer for layer in model_layers if isinstance(layer, DynamicLayer)]
        windows = [layer.sliding_window for layer in attention_layers if isinstance(layer, DynamicSlidingWindowLayer)]
        self.window = min([*windows, max_length])
        """Maximum number of keys that a query attends to in a layer with a window or with chunks."""
        self.chunked = setting(config, "sliding_window") is None
        """True if these layers have chunks instead of windows: a query attends to the keys of its own chunk."""
        self.mixed = len(windows) < len(attention_layers)
        """True if the model also has layers that attend to all keys."""
        self._columns = torch.arange(max_length, device=lm.device)
        dtype = lm.model.dtype
        mask_values = torch.tensor([torch.finfo(dtype).min, 0.0], dtype=dtype, device=lm.device)
        self._lowest = mask_values[0]
        self._zero = mask_values[1]

    def mask(self, positions: Tensor, width: int) -> Tensor:
        """Return the additive mask of keys for queries at positions ``[n, q]``, 0 up to the query.

        It is ``[n, 1, q, width]``. For ALiBi it is int64 ``[n, width]`` instead, 1 up to the last query's position.
        """
        keys = self._columns[:width]
        if self.alibi:
            return (keys <= positions[:, -1:]).long()
        queries = positions.unsqueeze(1).unsqueeze(3)
        return torch.where(keys > queries, self._lowest, self._zero)

    def read(self, rows: Tensor | None, new_tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run the trunk on new tokens ``[n, q]`` of these slots (None: of all), and return its output."""
        # Tell the layers which slots and positions are read
        width = mask.shape[-1]
        for layer in self.layers:
            layer.begin(rows, positions, width)
            if self.alibi and isinstance(layer, _SlotLayer):
                layer.past = 0 if positions.shape[1] > 1 else width - 1

        # Read, with the cache as the model takes it
        first_layer = self.layers[0]
        cache: object
        if isinstance(first_layer, _RwkvStates):
            cache = first_layer.model_states
        else:
            cache = Cache(layers=list(self.layers))
        hidden = self.lm.trunk(
            input_ids=new_tokens,
            position_ids=positions,
            attention_mask=self._mask_by_layer(positions, mask),
            use_cache=True,
            **{self.argument: cache},
        )
        for layer in self._state_layers:
            layer.end()
        return hidden

    def copy(self, source: Tensor, target: Tensor, width: int) -> None:
        """Give slots the states of other slots, and their first ``width`` keys and values; int64 ``[n]`` each."""
        for layer in self.layers:
            by_slot: list[Tensor] = []
            if isinstance(layer, _StateLayer):
                by_slot += layer.stored.values()
            if isinstance(layer, _SlotLayer) and layer.is_initialized:
                assert layer.keys is not None and layer.values is not None
                by_slot += [layer.keys[:, :width], layer.values[:, :width]]
            for tensor in by_slot:
                tensor[target] = tensor[source]

    def _mask_by_layer(self, positions: Tensor, mask: Tensor) -> Tensor | dict[str, Tensor | None] | None:
        """Return the mask as the model takes it: one for all layers, or one for each kind of layer."""
        if not self.recurrent and self.window == len(self._columns):
            return mask

        # Layers with states: 1 on real tokens; padding on the left has the position after the text
        is_real = None
        if self.pads and positions.shape[1] > 1:
            is_real = (positions <= positions[:, -1:]).long()
        if not any(isinstance(layer, _SlotLayer) for layer in self.layers):
            return is_real

        # Attention layers with windows or chunks
        keys = self._columns[: mask.shape[-1]]
        queries = positions.unsqueeze(1).unsqueeze(3)
        if self.chunked:
            is_near = keys // self.window == queries // self.window
        else:
            is_near = keys > queries - self.window
        window_mask = torch.where(is_near, mask, self._lowest)
        if not self.recurrent and not self.mixed:
            return window_mask

        return {
            "full_attention": mask,
            "hybrid": mask,
            "linear_attention": is_real,
            "conv": is_real,
            "sliding_attention": window_mask,
            "hybrid_sliding": window_mask,
            "chunked_attention": window_mask,
        }


def _cache_argument(trunk: PreTrainedModel) -> str:
    """Return the name of the argument of the trunk's forward that takes the cache."""
    parameters = inspect.signature(trunk.forward).parameters
    for name in ("state", "cache_params"):
        if name in parameters:
            return name
    return "past_key_values"


def _limits_time_steps(trunk: PreTrainedModel) -> bool:
    """Return True if a recurrent layer limits its time steps (Zamba 2).

    Such a model is not read by a cache, because the code of `transformers` for a single token ignores these limits.
    """
    for module in trunk.modules():
        limits = getattr(module, "time_step_limit", NO_TIME_STEP_LIMIT)
        if tuple(limits) != NO_TIME_STEP_LIMIT:
            return True
    return False


def _slot_layers(model_layers: Sequence[object], num_slots: int, max_length: int) -> list[_SlotLayer | _StateLayer]:
    """Return a layer with slots in place of each of the model's; none if one of them has no counterpart."""
    slot_layers = []
    for layer in model_layers:
        layer_class = LAYERS.get(type(layer).__name__)
        if layer_class is None:
            return []
        slot_layers.append(layer_class(num_slots, max_length, layer))
    return slot_layers
