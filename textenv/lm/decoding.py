"""Cached decoding in slots: each row of the cache has its own position, so a slot can be refilled at any time.

The caches of `transformers` advance all rows together. Here each row writes keys at its own positions, a new prompt
can enter a slot while other slots are in the middle of a text, and an additive mask selects the keys for each query.
Models with sliding-window, recurrent or other special caches, and those whose outputs with a cache differ from a plain
pass, use the padded path, which reads the whole prefix again at every step.

After some calls, three kinds of step are recorded and then replayed (`textenv.lm.recording`): one token in every slot,
one token in some slots, and several tokens.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from textenv.lm.memory import POSITIONS_AT_ONCE
from textenv.lm.recording import Replayed
from textenv.lm.scoring import rounding

if TYPE_CHECKING:
    from textenv.lm.model import LanguageModel

logger = logging.getLogger(__name__)
WHOLE = 7 / 8
"""If this fraction of slots has one new token, all slots are read: copying some from the cache would cost more."""


class _SlotLayer(CacheLayerMixin):
    """Keys and values ``[slots, max_length, heads, head size]`` of one attention layer."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__()
        self.num_slots, self.max_length = num_slots, max_length
        self.rows: Tensor | None = None  # slots in this forward pass; None means all
        self.positions = torch.empty(0, device="cpu")  # int64 [n, q], where the new keys go
        self.width: int | torch.SymInt = 0  # number of keys that queries may attend to

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots, size = self.num_slots, self.max_length
        self.keys = key_states.new_zeros(slots, size, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_zeros(slots, size, value_states.shape[1], value_states.shape[3])
        self.every = torch.arange(slots, device=key_states.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values at their positions and return those of the active rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        rows = self.every if self.rows is None else self.rows
        self.keys[rows[:, None], self.positions] = key_states.transpose(1, 2)
        self.values[rows[:, None], self.positions] = value_states.transpose(1, 2)
        keys, values = self.keys[:, : self.width], self.values[:, : self.width]
        if self.rows is not None:
            keys, values = keys.index_select(0, rows), values.index_select(0, rows)  # faster than []
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(self.width), 0

    def get_seq_length(self) -> int:
        return 0  # positions are given explicitly

    def get_max_length(self) -> int:
        return self.max_length


class Decoder:
    """Cached decoder: next-token logits for slots that grow token by token, independently of each other.

    Args:
        lm: the model.
        num_slots: number of rows decoded together.
        max_length: maximum prefix length of a slot, in tokens.

    Raises:
        ValueError: if the model has fewer positions than ``max_length``, or its logits after a prefix differ from
            those in one pass over the whole text.
    """

    def __init__(self, lm: LanguageModel, *, num_slots: int, max_length: int) -> None:
        lm.check_length(max_length)
        self.lm = lm
        self.num_slots = num_slots
        self.shape = (num_slots, max_length)
        self.read = np.zeros(num_slots, dtype=np.int64)
        """Number of tokens of each slot in the cache."""
        self._seen = np.zeros(self.shape, dtype=np.int64)
        """Prefixes of the last call of `logits`."""
        self._slots = np.arange(num_slots)
        self.device = lm.device
        """Device of the model at construction; stored, because `transformers` searches the weights for it each time."""
        self._steps = torch.arange(max_length, device=self.device)
        added = [torch.finfo(lm.model.dtype).min, 0.0]
        self._lowest, self._nothing = torch.tensor(added, dtype=lm.model.dtype, device=self.device)
        steps = (self._one_everywhere, self._some, self._some)
        self.everywhere, self.one, self.several = self.recordings = [Replayed(x, model=lm.model) for x in steps]
        layers = DynamicCache(config=lm.model.config).layers
        self.layers = [_SlotLayer(num_slots, max_length) for _ in layers]
        # The exact type, because subclasses are special caches. A text of 3 tokens needs no cache.
        self.cached = bool(layers) and max_length > 3 and all(type(layer) is DynamicLayer for layer in layers)
        """False if the model uses the padded path."""
        if max_length > 3 and max_length not in lm.cached:
            self._choose_path()
            lm.cached[max_length] = self.cached
        self.cached = lm.cached.get(max_length, self.cached)

    @torch.no_grad()
    def _choose_path(self) -> None:
        """Use the cache if it agrees with a plain pass over the longest text, else the padded path, or raise."""
        name, cause, paths = type(self.lm.model).__name__, None, (True, False) if self.cached else (False,)
        for self.cached in paths:
            try:
                gap, allowed = self._gap()
                reason = f"log-probabilities after a prefix differ by up to {gap:.3g} from those in the whole text"
                if not gap > allowed:
                    break
            except Exception as error:  # a model may raise anything for such a cache or text
                cause, reason = error, f"{type(error).__name__}: {error}"
            if self.cached:
                logger.warning("%s decodes without a cache: %s", name, reason)
        else:
            raise ValueError(
                f"{name} cannot sample texts of up to {self.shape[1]} tokens ({reason}), because sampling and scoring "
                "must use the same probabilities: switch dropout off (model.eval()), lower max_prompt_tokens, "
                "max_new_tokens or max_length, or use another model."
            ) from cause
        self.reset()
        for step in self.recordings:
            step.forget()

    def _gap(self) -> tuple[float, float]:
        """Largest log-probability difference of slots and one plain pass over the longest text, nats; its tolerance.

        One slot reads the text in pieces, with the last token alone; a second slot has a shorter prefix.
        """
        longest, behind = self.shape[1], {3: 2, self.shape[1]: 3}
        tokens = np.random.default_rng(0).integers(0, self.lm.num_tokens, (1, longest)).repeat(2, axis=0)
        hidden = self.lm.hidden(torch.from_numpy(tokens[:1]).to(self.device))[0]
        ends = {3, *range(POSITIONS_AT_ONCE, longest, POSITIONS_AT_ONCE), longest - 1, longest}
        lengths, found = [], []
        for end in sorted(ends if self.cached else {3, longest // 2, longest - 1}):
            length = np.array([end, behind[end]] if end in behind else [end])[: self.num_slots]
            found.append(self._extend(np.arange(len(length)), tokens[: len(length)], length))
            lengths.append(length)
        plain = self.lm.logits(hidden[torch.from_numpy(np.concatenate(lengths) - 1).to(self.device)])
        gap = torch.cat(found).log_softmax(-1) - plain.float().log_softmax(-1)
        return gap.abs().max().item(), rounding(plain)

    def reset(self, rows: np.ndarray | None = None) -> None:
        """Clear these slots (bool ``[num_slots]``); None clears all, and drops recordings of replaced weights."""
        if rows is None:
            for step in self.recordings:
                step.forget_replaced()
        self.read[slice(None) if rows is None else rows] = 0

    @torch.no_grad()
    def logits(self, tokens: np.ndarray, length: np.ndarray) -> Tensor:
        """Logits after each slot's prefix, float32; an empty slot (length 0) gets zeros.

        Args:
            tokens: int64 ``[num_slots, max_length]``, right-padded prefixes that extend those seen before.
            length: int64 ``[num_slots]``.

        Returns:
            ``[num_slots, num_tokens]``.
        """
        self._forget_other_texts(tokens, length)
        new = length - self.read
        # Rows with one new token and rows with a whole prompt are read separately, without padding to equal length.
        fresh = new == 1
        if self.cached and fresh.all():
            return self._read_next(tokens)
        one, several = np.flatnonzero(fresh), np.flatnonzero(new > 1)
        out = torch.zeros(self.num_slots, self.lm.num_tokens, device=self.device)
        if self.cached and len(one) >= WHOLE * self.num_slots:
            # All slots at once: the other slots also read their next token.
            here = torch.from_numpy(one).to(self.device)
            out[here] = self._read_next(tokens)[here]
            one = one[:0]
        for rows in (one, several):
            if len(rows):
                out[torch.from_numpy(rows).to(self.device)] = self._extend(rows, tokens[rows], length[rows])
        return out

    def _forget_other_texts(self, tokens: np.ndarray, length: np.ndarray) -> None:
        """Clear slots whose prefix does not extend the text read so far (the same prefix again, or another text)."""
        other = length <= self.read
        at = np.minimum(self.read, tokens.shape[1] - 1)
        self._seen[self._slots, at] = tokens[self._slots, at]  # equal now if only the next token is new
        width = int(length.max())
        if not np.array_equal(self._seen[:, :width], tokens[:, :width]):
            read = np.arange(width) < self.read[:, None]
            other |= ((self._seen[:, :width] != tokens[:, :width]) & read).any(1)
            self._seen[:] = tokens
        if other.any():
            self.read[other & (self.read > 0)] = 0

    def _read_next(self, tokens: np.ndarray) -> Tensor:
        """Read one more token in every slot and return the logits after it."""
        at = np.minimum(self.read, tokens.shape[1] - 1)  # an idle slot may be full
        self.read = self.read + 1
        fresh, where = (torch.from_numpy(x[:, None]).to(self.device) for x in (tokens[self._slots, at], at))
        width = int(at.max()) + 1
        return self.everywhere(fresh, where, self._mask(where, width), sizes=(width, tokens.shape[1]))

    def _extend(self, rows: np.ndarray, tokens: np.ndarray, length: np.ndarray) -> Tensor:
        """Read the new tokens of these slots and return the logits after them."""
        read = self.read[rows] if self.cached else np.zeros(len(rows), dtype=np.int64)
        new = length - read
        columns = np.minimum(read[:, None] + np.arange(new.max()), tokens.shape[1] - 1)
        fresh = torch.from_numpy(np.take_along_axis(tokens, columns, axis=1)).to(self.device)
        self.read[rows] = length
        last = torch.from_numpy(new - 1).to(self.device)
        if not self.cached:
            return self._at_last(self.lm.hidden(fresh), last)
        chosen, where = (torch.from_numpy(x).to(self.device) for x in (rows, columns))
        # One extra key, because a recording needs a width that differs from the number of new tokens.
        width = min(int(columns.max()) + 1 + (columns.shape[1] > 1), tokens.shape[1])
        inputs = (chosen, fresh, where, self._mask(where, width), last)
        if columns.shape[1] == 1:
            return self.one(*inputs, sizes=(len(rows), width, tokens.shape[1]))
        return self.several(*inputs, sizes=(*columns.shape, width, tokens.shape[1]))

    def _mask(self, where: Tensor, width: int) -> Tensor:
        """Additive mask for queries at positions ``[n, q]``: ``[n, 1, q, width]``, 0 up to each query's position."""
        return torch.where(self._steps[:width] > where.unsqueeze(1).unsqueeze(3), self._lowest, self._nothing)

    def _at_last(self, hidden: Tensor, last: Tensor) -> Tensor:
        """Logits at the last new token of each row, whose indices are ``last`` (int64 ``[n]``)."""
        return self.lm.logits(hidden[torch.arange(hidden.shape[0], device=hidden.device), last]).float()

    def _forward(self, rows: Tensor | None, fresh: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run the trunk on new tokens ``[n, q]`` of these slots; the additive mask is ``[n, 1, q, width]``."""
        for layer in self.layers:
            layer.rows, layer.positions, layer.width = rows, positions, mask.shape[-1]
        return self.lm.trunk(
            input_ids=fresh,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=Cache(layers=list(self.layers)),
            use_cache=True,
        )

    def _one_everywhere(self, fresh: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Logits after one new token in every slot."""
        return self.lm.logits(self._forward(None, fresh, positions, mask)[:, -1]).float()

    def _some(self, rows: Tensor, fresh: Tensor, positions: Tensor, mask: Tensor, last: Tensor) -> Tensor:
        """Logits after the new tokens of some slots."""
        return self._at_last(self._forward(rows, fresh, positions, mask), last)
