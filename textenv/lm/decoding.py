"""Cached decoding in slots: each row of the cache has its own position, so a slot can be refilled at any time.

A new prompt can enter a slot while other slots are in the middle of a text (`textenv.lm.caches`). Two kinds of models
use the padded path, which reads each prefix again at every step: models with another kind of cache, and models whose
outputs with a cache differ from those of a plain pass.

After some calls, three kinds of step are recorded and then replayed (`textenv.lm.recording`): one token in every slot,
one token in some slots, and several tokens. On CUDA the first kind is captured as a graph (`textenv.lm.cuda_graphs`).
Steps of models with recurrent states are not recorded, because they cannot be repeated.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from textenv.lm.caches import SlotCache
from textenv.lm.cuda_graphs import GraphedStep, rounded_up
from textenv.lm.memory import POSITIONS_AT_ONCE
from textenv.lm.recording import RecordedStep, state_of
from textenv.lm.scoring import rounding
from textenv.rollout import ratio_gap

if TYPE_CHECKING:
    from textenv.lm.model import LanguageModel

logger = logging.getLogger(__name__)
FRACTION_TO_READ_ALL = 7 / 8
"""If this fraction of slots has one new token, all slots are read: copying some from the cache would cost more."""
FRACTION_TO_READ_ALL_BY_GRAPH = 1 / 8
"""The same where a graph reads all slots: a step of some slots is not captured, because their number changes."""


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
        self.num_read = np.zeros(num_slots, dtype=np.int64)
        """Number of tokens of each slot in the cache."""
        self._seen = np.zeros(self.shape, dtype=np.int64)
        """Prefixes of the last call of `logits`."""
        self._slots = np.arange(num_slots)
        self.device = lm.device
        """Device of the model at construction; stored, because `transformers` searches the weights for it each time."""
        self.cache = SlotCache(lm, num_slots, max_length)

        # Steps, which are recorded after some calls
        self.graphed = self.device.type == "cuda" and not self.cache.restarts
        """True if one token in every slot is read by graphs, whose numbers of keys are rounded up."""
        self.step_all_slots: RecordedStep | GraphedStep = RecordedStep(self._read_all_slots, model=lm.model)
        self.fraction_to_read_all = FRACTION_TO_READ_ALL
        if self.graphed:
            self.step_all_slots = GraphedStep(self._read_all_slots, model=lm.model)
            self.fraction_to_read_all = FRACTION_TO_READ_ALL_BY_GRAPH
        self.step_some_slots_one_token = RecordedStep(self._read_some_slots, model=lm.model)
        self.step_some_slots_many_tokens = RecordedStep(self._read_some_slots, model=lm.model)
        self.recordings = [self.step_all_slots, self.step_some_slots_one_token, self.step_some_slots_many_tokens]
        for step in self.recordings:
            # A recording is verified by running a step twice, which would change a recurrent state twice
            step.recordable &= not self.cache.recurrent

        # With or without the cache; decided once for a model and length
        self.cached = bool(self.cache.layers) and max_length > 3  # a text of 3 tokens needs no cache
        """False if the model uses the padded path."""
        if max_length > 3 and max_length not in lm.cached:
            self._choose_path()
            lm.cached[max_length] = self.cached
        self.cached = lm.cached.get(max_length, self.cached)

    @torch.no_grad()
    def _choose_path(self) -> None:
        """Use the cache if it agrees with a plain pass over the longest text, else the padded path, or raise."""
        model_name = type(self.lm.model).__name__
        cause: Exception | None = None
        if self.cached:
            reason, cause = self._disagreement()
            if reason:
                logger.warning("%s decodes without a cache: %s", model_name, reason)
                self.cached = False
        if not self.cached:
            reason, error = self._disagreement()
            if reason:
                raise ValueError(
                    f"{model_name} cannot sample texts of up to {self.shape[1]} tokens ({reason}), because sampling "
                    "and scoring must use the same probabilities: switch dropout off (model.eval()), lower "
                    "max_prompt_tokens, max_new_tokens or max_length, or use another model. (After an edit of "
                    "textenv/lm/decoding.py, compare it with LanguageModel.logits.)"
                ) from (error or cause)

        # Forget the texts of this check
        self.reset()
        for step in self.recordings:
            step.forget()

    def _disagreement(self) -> tuple[str, Exception | None]:
        """Compare the chosen path with a plain pass.

        Returns:
            Why the path cannot be used, empty if it can; and the error that the model raised, if any.
        """
        try:
            gap, tolerance = self._gap()
        except Exception as error:  # a model may raise anything for such a cache or text
            return f"{type(error).__name__}: {error}", error
        if gap > tolerance:
            return f"log-probabilities after a prefix differ by up to {gap:.3g} from those in the whole text", None
        return "", None

    def _gap(self) -> tuple[float, float]:
        """Measure how far slots and one plain pass over the longest text differ.

        The first slot reads the text in pieces, and its last token alone; a second slot has a shorter prefix. For a
        model of experts the difference is the median over the prefixes of their largest differences; see
        `textenv.lm.choices`.

        Returns:
            Largest difference of log-probabilities, and its tolerance; nats.
        """
        longest = self.shape[1]
        tokens = np.random.default_rng(0).integers(0, self.lm.num_tokens, (1, longest)).repeat(2, axis=0)
        hidden = self.lm.hidden(torch.from_numpy(tokens[:1]).to(self.device))[0]

        # Prefix lengths of the first slot
        if not self.cached:
            first_lengths = {3, longest // 2, longest - 1}
        elif self.cache.restarts:  # long pieces are read from the beginning, the last two tokens one by one
            first_lengths = {3, longest - 2, longest - 1, longest}
        else:  # pieces of the length that a pass may have at most, and the last token alone
            first_lengths = {3, *range(POSITIONS_AT_ONCE, longest, POSITIONS_AT_ONCE), longest - 1, longest}

        # In the calls of these lengths a second slot reads a shorter prefix, to test unequal rows
        second_lengths = {3: 2, longest: 3}

        # Read the prefixes
        lengths = []
        logits = []
        for first_length in sorted(first_lengths):
            prefix_lengths = [first_length]
            if first_length in second_lengths:
                prefix_lengths.append(second_lengths[first_length])
            length = np.array(prefix_lengths[: self.num_slots])
            logits.append(self._extend(np.arange(len(length)), tokens[: len(length)], length))
            lengths.append(length)

        # The same positions of the plain pass
        positions = torch.from_numpy(np.concatenate(lengths) - 1).to(self.device)
        plain_logits = self.lm.logits(hidden[positions])
        difference = torch.cat(logits).log_softmax(-1) - plain_logits.float().log_softmax(-1)
        largest = difference.abs().amax(-1)
        all_prefixes = torch.ones_like(largest, dtype=torch.bool)
        gap = ratio_gap(largest, mask=all_prefixes, choices=self.lm.hard_choices)
        return gap, rounding(plain_logits)

    def reset(self, rows: np.ndarray | None = None) -> None:
        """Clear these slots (bool ``[num_slots]``); None clears all, and drops recordings of replaced weights."""
        if rows is not None:
            self.num_read[rows] = 0
            return
        state = state_of(self.lm.model)
        for step in self.recordings:
            step.forget_replaced(state)
        self.num_read[:] = 0

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
        num_new = length - self.num_read

        # Slots with one new token are read apart from those with a whole prompt, without padding to equal length.
        # Where the cache restarts, a prompt of one token is a whole prompt, too
        has_one_new = num_new == 1
        if self.cache.restarts:
            has_one_new &= self.num_read > 0
        if self.cached and has_one_new.all():
            return self._read_next(tokens)
        slots_with_one = np.flatnonzero(has_one_new)
        slots_with_several = np.flatnonzero((num_new > 0) & ~has_one_new)
        begins = self.num_read == 0
        logits = torch.zeros(self.num_slots, self.lm.num_tokens, device=self.device)

        # One new token. If nearly all slots have one, all read their next token: those with several the first of them,
        # idle ones padding
        nearly_all = len(slots_with_one) >= self.fraction_to_read_all * self.num_slots
        if self.cached and not self.cache.recurrent and nearly_all:
            rows = torch.from_numpy(slots_with_one).to(self.device)
            logits[rows] = self._read_next(tokens)[rows]
        elif len(slots_with_one):
            rows = torch.from_numpy(slots_with_one).to(self.device)
            logits[rows] = self._extend(slots_with_one, tokens[slots_with_one], length[slots_with_one])

        # Several new tokens: equal prompts, such as those of a group, are read once and copied
        originals, copies = self._distinct(slots_with_several, tokens, length, begins=begins)
        if len(originals):
            rows = torch.from_numpy(originals).to(self.device)
            logits[rows] = self._extend(originals, tokens[originals], length[originals])
        if copies:
            self._copy(copies, length, logits)
        return logits

    @staticmethod
    def _distinct(
        rows: np.ndarray, tokens: np.ndarray, length: np.ndarray, *, begins: np.ndarray
    ) -> tuple[np.ndarray, dict[int, int]]:
        """Keep one slot per distinct text, among those that read a text from its beginning.

        Args:
            rows: slots with several new tokens.
            tokens, length: as in `logits`.
            begins: bool ``[num_slots]``, slots whose text is new.

        Returns:
            The slots to read; and for each other slot the slot to copy from.
        """
        first_rows: dict[bytes, int] = {}
        originals = []
        copies = {}
        for row in rows.tolist():
            if not begins[row]:  # it goes on with a text of its own
                originals.append(row)
                continue
            text = tokens[row, : length[row]].tobytes()
            original = first_rows.setdefault(text, row)
            if original == row:
                originals.append(row)
            else:
                copies[row] = original
        return np.array(originals, dtype=np.int64), copies

    def _copy(self, copies: dict[int, int], length: np.ndarray, logits: Tensor) -> None:
        """Give the slots that are keys of ``copies`` the logits and cache of the slots that are the values."""
        rows = list(copies)
        target = torch.tensor(rows, device=self.device)
        source = torch.tensor(list(copies.values()), device=self.device)
        self.num_read[rows] = length[rows]
        logits[target] = logits[source]
        if self.cached:
            self.cache.copy(source, target, int(length[rows].max()))

    def _forget_other_texts(self, tokens: np.ndarray, length: np.ndarray) -> None:
        """Clear slots whose prefix does not extend the text read so far (the same prefix again, or another text)."""
        is_other = length <= self.num_read

        # Write the next token of each slot. If nothing else is new, as in most calls, both arrays are now equal
        columns = np.minimum(self.num_read, self.shape[1] - 1)
        self._seen[self._slots, columns] = tokens[self._slots, columns]
        width = int(length.max())
        if not np.array_equal(self._seen[:, :width], tokens[:, :width]):
            was_read = np.arange(width) < self.num_read[:, None]
            differs = self._seen[:, :width] != tokens[:, :width]
            is_other |= (differs & was_read).any(1)
            self._seen[:] = tokens

        if is_other.any():
            self.num_read[is_other] = 0

    def _read_next(self, tokens: np.ndarray) -> Tensor:
        """Read one more token in every slot and return the logits after it."""
        columns = np.minimum(self.num_read, self.shape[1] - 1)  # an idle slot may be full
        self.num_read = self.num_read + 1
        new_tokens = torch.from_numpy(tokens[self._slots, columns][:, None]).to(self.device)
        positions = torch.from_numpy(columns[:, None]).to(self.device)
        width = int(columns.max()) + 1
        if self.graphed:
            width = min(rounded_up(width), self.shape[1])
        mask = self.cache.mask(positions, width)
        return self.step_all_slots(new_tokens, positions, mask, sizes=(width, self.shape[1]))

    def _extend(self, rows: np.ndarray, tokens: np.ndarray, length: np.ndarray) -> Tensor:
        """Read the new tokens of these slots and return the logits after them."""
        # Which tokens are new. Normally those after the cached ones. All tokens if there is no cache, or if the cache
        # cannot go on by several tokens
        start = self.num_read[rows]
        goes_on_by_one = (length == start + 1) & (start > 0)
        if not self.cached or (self.cache.restarts and not goes_on_by_one.all()):
            start = np.zeros_like(start)
        num_new = length - start

        # States that allow no padding: rows with different numbers of new tokens are read one by one
        if self.cached and self.cache.recurrent and not self.cache.pads and (num_new != num_new[0]).any():
            parts = [self._extend(rows[[i]], tokens[[i]], length[[i]]) for i in range(len(rows))]
            return torch.cat(parts)

        # Read them, without a cache
        columns, last_index = self._new_columns(start, num_new)
        new_tokens = torch.from_numpy(np.take_along_axis(tokens, columns, axis=1)).to(self.device)
        last = torch.from_numpy(last_index).to(self.device)
        self.num_read[rows] = length
        if not self.cached:
            return self._at_last(self.lm.hidden(new_tokens), last)

        # With a cache
        width = columns.shape[1]
        num_keys = int(columns.max()) + 1
        if width > 1:
            num_keys += 1  # because a recording needs a width that differs from the number of new tokens
        num_keys = min(num_keys, self.shape[1])
        positions = torch.from_numpy(columns).to(self.device)
        mask = self.cache.mask(positions, num_keys)
        slots = torch.from_numpy(rows).to(self.device)
        inputs = (slots, new_tokens, positions, mask, last)
        if width == 1:
            return self.step_some_slots_one_token(*inputs, sizes=(len(rows), num_keys, self.shape[1]))
        return self.step_some_slots_many_tokens(*inputs, sizes=(len(rows), width, num_keys, self.shape[1]))

    def _new_columns(self, start: np.ndarray, num_new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns of the new tokens, padded on the right, or on the left for states that allow it.

        Args:
            start: column of each row's first new token, int64 ``[n]``.
            num_new: number of new tokens of each row, int64 ``[n]``.

        Returns:
            Columns, int64 ``[n, q]``; and the index in them of each row's last new token, int64 ``[n]``.
        """
        width = int(num_new.max())
        columns = np.minimum(start[:, None] + np.arange(width), self.shape[1] - 1)
        if not (self.cached and self.cache.pads and width > 1):
            return columns, num_new - 1

        # Padding on the left points at the column after the row's text, which the mask hides
        columns = columns - (width - num_new)[:, None]
        columns = np.where(columns < 0, num_new[:, None], columns)
        return columns, np.full_like(num_new, width - 1)

    def _at_last(self, hidden: Tensor, last: Tensor) -> Tensor:
        """Logits at the last new token of each row, which has the index ``last`` (int64 ``[n]``)."""
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return self.lm.logits(hidden[rows, last]).float()

    def _read_all_slots(self, new_tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Read one new token in every slot and return the logits after it."""
        hidden = self.cache.read(None, new_tokens, positions, mask)
        return self.lm.logits(hidden[:, -1]).float()

    def _read_some_slots(
        self, rows: Tensor, new_tokens: Tensor, positions: Tensor, mask: Tensor, last: Tensor
    ) -> Tensor:
        """Read the new tokens of some slots and return the logits after them; ``last`` as in `_at_last`."""
        hidden = self.cache.read(rows, new_tokens, positions, mask)
        return self._at_last(hidden, last)
