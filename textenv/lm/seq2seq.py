"""Encoder-decoder models (T5, BART): how they read the rows of a rollout, and cached decoding in slots."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from textenv.lm.loading import plain_model, setting, trunk_of
from textenv.lm.scoring import rounding

if TYPE_CHECKING:
    from transformers import EncoderDecoderCache, PreTrainedModel, PreTrainedTokenizerBase


class Seq2Seq(NamedTuple):
    """Division of rows into prompts, for the encoder, and answers (all tokens after the prompt), for the decoder.

    The encoder's text ends with EOS if the tokenizer ends texts with it; the decoder's begins with ``decoder_start``. A
    row's state at its prompt's last position is the decoder's at the end of ``decoder_start``; then both advance.
    """

    decoder_start: tuple[int, ...]
    """The model's ``decoder_start_token_id``, and its ``forced_bos_token_id`` if it has one."""
    prompt_end: int | None
    """EOS, for prompts that do not end with it already; None if the tokenizer adds none."""

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Self | None:
        """Return the division for a model; None if it is decoder-only."""
        if not model.config.is_encoder_decoder:
            return None
        generation: Any = plain_model(model).generation_config
        start = generation.decoder_start_token_id, generation.forced_bos_token_id
        if start[0] is None:
            raise ValueError("set model.generation_config.decoder_start_token_id (T5: the pad token's, BART: EOS's)")
        ends = tokenizer("", verbose=False)["input_ids"][-1:] == [tokenizer.eos_token_id]
        return cls(tuple(token for token in start if token is not None), tokenizer.eos_token_id if ends else None)

    def prompts(self, tokens: Tensor, prompt_length: Tensor) -> tuple[Tensor, Tensor]:
        """Encoder's ids and mask (1 on real tokens), int64 ``[B, E]``, for rows ``[B, L]`` and lengths ``[B]``."""
        ids, length = tokens[:, : int(prompt_length.max())], prompt_length.unsqueeze(1)
        if self.prompt_end is not None:
            ids = pad(ids, (0, 1)).scatter(1, length, self.prompt_end)
            length = length + (ids.gather(1, length - 1) != self.prompt_end)  # no second EOS
        return ids, (torch.arange(ids.shape[1], device=ids.device) < length).long()

    def inputs(self, tokens: Tensor, prompt_length: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """Arguments of the model's forward for rows ``[B, L]``, and the place of each position's state in its output.

        Places are int64 ``[B, L]``; before a prompt's last position, where there is no state, they are 0.
        """
        if prompt_length is None:
            raise ValueError("encoder-decoder models need prompts with answers, not plain text (SFT: packing=False)")
        ids, known = self.prompts(tokens, prompt_length)
        start, place = tokens.new_tensor(self.decoder_start), torch.arange(tokens.shape[1], device=tokens.device)
        columns = prompt_length.unsqueeze(1) + place[: tokens.shape[1] - int(prompt_length.min())]
        answers = tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1))
        answers = torch.cat([start.expand(len(tokens), -1), answers], dim=1)
        place = (place - prompt_length.unsqueeze(1) + len(start)).clamp(min=0)
        inputs = {"input_ids": ids, "attention_mask": known, "decoder_input_ids": answers}
        return inputs | {"decoder_attention_mask": torch.ones_like(answers)}, place  # T5Gemma would leave out <pad>

    def hidden(self, trunk: Callable[..., Tensor], tokens: Tensor, prompt_length: Tensor | None) -> Tensor:
        """See `LanguageModel.hidden`; ``trunk`` is as `LanguageModel.trunk`."""
        inputs, place = self.inputs(tokens, prompt_length)
        ids, known, answers, every = inputs.values()
        encoded = trunk("encoder", input_ids=ids, attention_mask=known)
        read = {"encoder_hidden_states": encoded, "encoder_attention_mask": known, "use_cache": False}
        hidden = trunk("decoder", input_ids=answers, attention_mask=every, **read)
        return hidden.take_along_dim(place.unsqueeze(2), 1)

    def finish(self, logits: Tensor, model: Any) -> Tensor:
        """Scale the output layer's logits as T5 does, and add BART's bias."""
        config = plain_model(model).config
        tied = config.model_type in ("umt5", "switch_transformers") and config.tie_word_embeddings
        if tied or setting(config, "scale_decoder_outputs"):
            logits = logits * config.d_model**-0.5
        bias = plain_model(model)._buffers.get("final_logits_bias")
        return logits if bias is None else logits + bias.squeeze(0)


class _Cohort(NamedTuple):
    """Slots with answers of one length, because the caches of `transformers` advance all rows together."""

    slots: np.ndarray
    encoded: Tensor
    """Output of the encoder, ``[n, E, hidden size]``."""
    known: Tensor  # its mask
    cache: EncoderDecoderCache

    def select(self, chosen: np.ndarray) -> _Cohort:
        """Return the cohort of these rows (bool ``[n]``)."""
        if chosen.all():
            return self
        rows, cache = torch.from_numpy(np.flatnonzero(chosen)).to(self.known.device), copy.deepcopy(self.cache)
        cache.batch_select_indices(rows)
        return _Cohort(self.slots[chosen], self.encoded[rows], self.known[rows], cache)


class Seq2SeqDecoder:
    """Like `Decoder`, for encoder-decoders: a slot's first text after `reset` is its prompt, which is encoded once.

    If tokens of the prompt change without `reset`, the text is another prompt; all other tokens belong to the answer.
    """

    def __init__(self, lm: Any, *, num_slots: int, max_length: int) -> None:
        lm.check_length(max_length)
        self.lm, self.device, self.shape = lm, lm.device, (num_slots, max_length)
        self.prompt_length, self.read = np.zeros((2, num_slots), dtype=np.int64)
        """Length of each slot's prompt, and of the text read so far, in tokens."""
        self._seen = np.zeros(self.shape, dtype=np.int64)
        self._cohorts: list[_Cohort] = []
        self.cached = lm.cached.get(max_length, True)
        """False if each step reads prompt and answer again, because the model's cache gives other probabilities."""
        if max_length > 4 and max_length not in lm.cached:
            self.cached = lm.cached[max_length] = self._cache_agrees()
            self.reset()

    def reset(self, rows: np.ndarray | None = None) -> None:
        """Clear these slots (bool ``[num_slots]``); None clears all."""
        self.prompt_length[slice(None) if rows is None else rows] = 0

    @torch.no_grad()
    def logits(self, tokens: np.ndarray, length: np.ndarray) -> Tensor:
        """See `Decoder.logits`."""
        self._forget_other_texts(tokens, length)
        begun, known = self.read > 0, np.maximum(self.read, self.prompt_length)
        new, cohorts = length - known, []
        for cohort in self._cohorts:
            own, on = new[cohort.slots], begun[cohort.slots]
            cohorts += [cohort.select(on & (own == size)) for size in np.unique(own[on])]
        fresh = ~begun & (length > 0)
        cohorts += [self._encode(tokens, np.flatnonzero(fresh & (new == size))) for size in np.unique(new[fresh])]
        out = torch.zeros(self.shape[0], self.lm.num_tokens, device=self.device)
        self._cohorts, self.read = [], np.zeros_like(length)  # after an interrupt, all is read again
        for cohort in cohorts:
            slots = cohort.slots[:, None]
            columns = known[slots] + np.arange(new[cohort.slots[0]])
            out[cohort.slots] = self._decode(cohort, torch.from_numpy(tokens[slots, columns]).to(self.device))
        self._cohorts, self.read = cohorts, length.copy()
        return out

    def _forget_other_texts(self, tokens: np.ndarray, length: np.ndarray) -> None:
        """Clear slots whose text does not extend the one read so far; see the class for those with another prompt."""
        place, other = np.arange(self.shape[1]), tokens != self._seen
        begins = (other & (place < self.prompt_length[:, None])).any(1) | (length < self.prompt_length)
        begins |= self.prompt_length == 0
        again = begins | (length <= self.read) | (other & (place < self.read[:, None])).any(1)
        self.prompt_length = np.where(begins, length, self.prompt_length)
        self.read = np.where(again | (not self.cached), 0, self.read)
        self._seen[:] = tokens

    def _encode(self, tokens: np.ndarray, slots: np.ndarray) -> _Cohort:
        """Read the prompts of these slots."""
        from transformers import DynamicCache, EncoderDecoderCache

        text, length = (torch.from_numpy(x[slots]).to(self.device) for x in (tokens, self.prompt_length))
        ids, known = self.lm.seq2seq.prompts(text, length)
        own = DynamicCache(config=trunk_of(self.lm.model, "decoder").config)
        encoded = self.lm.trunk("encoder", input_ids=ids, attention_mask=known)
        return _Cohort(slots, encoded, known, EncoderDecoderCache(own, DynamicCache()))

    def _decode(self, cohort: _Cohort, tokens: Tensor) -> Tensor:
        """Read more tokens of these answers, ``[n, q]``; return the logits after the last."""
        if not cohort.cache.get_seq_length():
            start = tokens.new_tensor(self.lm.seq2seq.decoder_start)
            tokens = torch.cat([start.expand(len(tokens), -1), tokens], dim=1)
        prompt = {"encoder_hidden_states": cohort.encoded, "encoder_attention_mask": cohort.known}
        hidden = self.lm.trunk("decoder", input_ids=tokens, past_key_values=cohort.cache, use_cache=True, **prompt)
        return self.lm.logits(hidden[:, -1]).float()

    @torch.no_grad()
    def _cache_agrees(self) -> bool:
        """Compare one text, read in pieces, with a plain pass; log the difference if it is not rounding."""
        slots, ends = np.arange(self.shape[0]), [2, 3, self.shape[1] - 1, self.shape[1]]
        tokens = np.random.default_rng(0).integers(0, self.lm.num_tokens, self.shape)
        text, at = torch.from_numpy(tokens[:1]).to(self.device), torch.tensor(ends, device=self.device) - 1
        plain = self.lm.logits(self.lm.hidden(text, text.new_tensor([2]))[0, at])
        found = torch.stack([self.logits(tokens, np.where(slots == 0, end, 0))[0] for end in ends])
        gap = (found.log_softmax(-1) - plain.float().log_softmax(-1)).abs().max().item()
        name, agrees = type(self.lm.model).__name__, gap <= rounding(plain)
        if not agrees:
            logging.getLogger(__name__).warning("%s decodes without a cache, whose logits differ by %.3g", name, gap)
        return agrees
