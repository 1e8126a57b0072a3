"""Encoder-decoder models (T5, BART): how they read the rows of a rollout, and cached decoding in slots."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from textenv.lm.loading import plain_model, setting, trunk_of
from textenv.lm.scoring import rounding
from textenv.prompts.tokenize import ending_ids

if TYPE_CHECKING:
    from transformers import EncoderDecoderCache, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Seq2Seq(NamedTuple):
    """Division of rows into prompts, for the encoder, and answers (all tokens after the prompt), for the decoder.

    The encoder's text ends with what the tokenizer appends to a text: EOS, or ``[SEP]``. The decoder's text begins with
    ``decoder_start``. The state of a row at the prompt's last position is the decoder's state at the end of
    ``decoder_start``; from there on, row and decoder advance together.
    """

    decoder_start: tuple[int, ...]
    """The model's ``decoder_start_token_id``, and its ``forced_bos_token_id`` if it has one."""
    prompt_end: tuple[int, ...]
    """`textenv.prompts.tokenize.ending_ids`, for prompts that do not end with them already."""

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Self | None:
        """Return the division for a model; None if it is decoder-only."""
        if not model.config.is_encoder_decoder:
            return None
        generation = plain_model(model).generation_config
        if generation is None or generation.decoder_start_token_id is None:
            raise ValueError(
                "set model.generation_config.decoder_start_token_id (T5: the id of the pad token, BART: that of EOS)"
            )
        decoder_start = [generation.decoder_start_token_id]
        if generation.forced_bos_token_id is not None:
            decoder_start.append(generation.forced_bos_token_id)
        return cls(tuple(decoder_start), tuple(ending_ids(tokenizer)))

    def prompts(self, tokens: Tensor, prompt_length: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder's ids and mask for rows ``[B, L]`` with prompts of these lengths ``[B]``.

        Both are int64 ``[B, E]``; the mask is 1 on real tokens.
        """
        ids = tokens[:, : int(prompt_length.max())]
        length = prompt_length.unsqueeze(1)
        if self.prompt_end:
            num_ending = len(self.prompt_end)
            ending = ids.new_tensor(self.prompt_end).expand(len(ids), -1)
            columns = length + torch.arange(num_ending, device=ids.device)
            ids = pad(ids, (0, num_ending)).scatter(1, columns, ending)
            last_ids = ids.gather(1, (columns - num_ending).clamp(min=0))
            has_no_end = (last_ids != ending).any(1, keepdim=True)
            length = length + num_ending * has_no_end  # longer, unless the prompt ends with these tokens already
        mask = torch.arange(ids.shape[1], device=ids.device) < length
        return ids, mask.long()

    def inputs(self, tokens: Tensor, prompt_length: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """Return arguments of the model's forward pass for rows ``[B, L]``, and where their states are in the output.

        The second result has the index of the state of each position, int64 ``[B, L]``. Before a prompt's last
        position, where there is no state, it is 0.
        """
        if prompt_length is None:
            raise ValueError("encoder-decoder models need prompts with answers, not plain text (SFT: packing=False)")
        ids, mask = self.prompts(tokens, prompt_length)

        # The decoder's text: its start, then the answers, padded on the right
        start = tokens.new_tensor(self.decoder_start)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        longest_answer = tokens.shape[1] - int(prompt_length.min())
        columns = prompt_length.unsqueeze(1) + positions[:longest_answer]
        answers = tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1))
        answers = torch.cat([start.expand(len(tokens), -1), answers], dim=1)

        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "decoder_input_ids": answers,
            "decoder_attention_mask": torch.ones_like(answers),  # T5Gemma would leave out <pad>
        }
        state_index = positions - prompt_length.unsqueeze(1) + len(start)
        return inputs, state_index.clamp(min=0)

    def hidden(self, trunk: Callable[..., Tensor], tokens: Tensor, prompt_length: Tensor | None) -> Tensor:
        """See `LanguageModel.hidden`; ``trunk`` is as `LanguageModel.trunk`."""
        inputs, state_index = self.inputs(tokens, prompt_length)
        encoded = trunk("encoder", input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        hidden = trunk(
            "decoder",
            input_ids=inputs["decoder_input_ids"],
            attention_mask=inputs["decoder_attention_mask"],
            encoder_hidden_states=encoded,
            encoder_attention_mask=inputs["attention_mask"],
            use_cache=False,
        )
        return hidden.take_along_dim(state_index.unsqueeze(2), 1)

    def finish(self, logits: Tensor, model: PreTrainedModel) -> Tensor:
        """Scale the output layer's logits as T5 does, and add BART's bias."""
        plain = plain_model(model)
        config = plain.config
        scales_if_tied = config.model_type in ("umt5", "switch_transformers")
        if (scales_if_tied and config.tie_word_embeddings) or setting(config, "scale_decoder_outputs"):
            logits = logits * config.d_model**-0.5
        bias = plain._buffers.get("final_logits_bias")
        if bias is not None:
            logits = logits + bias.squeeze(0)
        return logits


class _Cohort(NamedTuple):
    """Slots with answers of one length, because the caches of `transformers` advance all rows together."""

    slots: np.ndarray
    """Indices of the slots, int64 ``[n]``."""
    encoded: Tensor
    """Output of the encoder, ``[n, E, hidden size]``."""
    prompt_mask: Tensor
    """1 on real tokens of the prompts, int64 ``[n, E]``."""
    cache: EncoderDecoderCache

    def select(self, rows: np.ndarray) -> _Cohort:
        """Return the cohort of these rows (bool ``[n]``)."""
        if rows.all():
            return self
        indices = torch.from_numpy(np.flatnonzero(rows)).to(self.prompt_mask.device)
        cache = copy.deepcopy(self.cache)
        cache.batch_select_indices(indices)
        return _Cohort(self.slots[rows], self.encoded[indices], self.prompt_mask[indices], cache)


class _LanguageModel(Protocol):
    """What `Seq2SeqDecoder` needs of a `textenv.lm.model.LanguageModel`."""

    model: PreTrainedModel
    num_tokens: int
    seq2seq: Seq2Seq | None
    cached: dict[int, bool]

    @property
    def device(self) -> torch.device: ...
    def check_length(self, length: int) -> None: ...
    def trunk(self, part: str = "", /, *, input_ids: Tensor, **inputs: object) -> Tensor: ...
    def hidden(self, tokens: Tensor, prompt_length: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Seq2SeqDecoder:
    """Like `Decoder`, for encoder-decoders: a slot's first text after `reset` is its prompt, which is encoded once.

    If tokens of the prompt change without `reset`, the text is another prompt; all other tokens belong to the answer.
    """

    def __init__(self, lm: _LanguageModel, *, num_slots: int, max_length: int) -> None:
        assert lm.seq2seq is not None, "this model has no encoder: use Decoder"
        lm.check_length(max_length)
        self.lm = lm
        self._division = lm.seq2seq
        self.device = lm.device
        self.shape = (num_slots, max_length)
        self.prompt_length = np.zeros(num_slots, dtype=np.int64)
        """Length of each slot's prompt, in tokens."""
        self.num_read = np.zeros(num_slots, dtype=np.int64)
        """Length of each slot's text read so far, in tokens."""
        self._seen = np.zeros(self.shape, dtype=np.int64)
        """Texts of the last call of `logits`."""
        self._cohorts: list[_Cohort] = []
        self.cached = lm.cached.get(max_length, True)
        """False if each step reads prompt and answer again, because the model's cache gives other probabilities."""
        if max_length > 4 and max_length not in lm.cached:
            self.cached = self._cache_agrees()
            lm.cached[max_length] = self.cached
            self.reset()

    def reset(self, rows: np.ndarray | None = None) -> None:
        """Clear these slots (bool ``[num_slots]``); None clears all."""
        if rows is None:
            self.prompt_length[:] = 0
        else:
            self.prompt_length[rows] = 0

    @torch.no_grad()
    def logits(self, tokens: np.ndarray, length: np.ndarray) -> Tensor:
        """See `Decoder.logits`."""
        self._forget_other_texts(tokens, length)
        goes_on = self.num_read > 0
        start = np.maximum(self.num_read, self.prompt_length)
        num_new = length - start

        # Slots that go on: cohorts are divided where slots have different numbers of new tokens
        cohorts = []
        for cohort in self._cohorts:
            cohort_goes_on = goes_on[cohort.slots]
            num_new_of_cohort = num_new[cohort.slots]
            for size in np.unique(num_new_of_cohort[cohort_goes_on]):
                cohorts.append(cohort.select(cohort_goes_on & (num_new_of_cohort == size)))

        # Slots that begin: their prompts are encoded
        begins = ~goes_on & (length > 0)
        for size in np.unique(num_new[begins]):
            cohorts.append(self._encode(tokens, np.flatnonzero(begins & (num_new == size))))

        # Decode. Until this is done no slot counts as read, so after an interrupt all is read again
        self._cohorts = []
        self.num_read = np.zeros_like(length)
        logits = torch.zeros(self.shape[0], self.lm.num_tokens, device=self.device)
        for cohort in cohorts:
            slots = cohort.slots[:, None]
            columns = start[slots] + np.arange(num_new[cohort.slots[0]])
            new_tokens = torch.from_numpy(tokens[slots, columns]).to(self.device)
            logits[cohort.slots] = self._decode(cohort, new_tokens)
        self._cohorts = cohorts
        self.num_read = length.copy()
        return logits

    def _forget_other_texts(self, tokens: np.ndarray, length: np.ndarray) -> None:
        """Clear slots whose text does not extend the one read so far; see the class for those with another prompt."""
        columns = np.arange(self.shape[1])
        differs = tokens != self._seen

        # Slots with another prompt: the whole text is the prompt
        in_prompt = columns < self.prompt_length[:, None]
        has_new_prompt = (differs & in_prompt).any(1) | (length < self.prompt_length)
        has_new_prompt |= self.prompt_length == 0

        # Slots with another answer, or the same text again
        was_read = columns < self.num_read[:, None]
        is_other = has_new_prompt | (length <= self.num_read) | (differs & was_read).any(1)

        self.prompt_length = np.where(has_new_prompt, length, self.prompt_length)
        self.num_read = np.where(is_other | (not self.cached), 0, self.num_read)
        self._seen[:] = tokens

    def _encode(self, tokens: np.ndarray, slots: np.ndarray) -> _Cohort:
        """Read the prompts of these slots."""
        from transformers import DynamicCache, EncoderDecoderCache

        text = torch.from_numpy(tokens[slots]).to(self.device)
        prompt_length = torch.from_numpy(self.prompt_length[slots]).to(self.device)
        ids, mask = self._division.prompts(text, prompt_length)
        answer_cache = DynamicCache(config=trunk_of(self.lm.model, "decoder").config)
        encoded = self.lm.trunk("encoder", input_ids=ids, attention_mask=mask)
        return _Cohort(slots, encoded, mask, EncoderDecoderCache(answer_cache, DynamicCache()))

    def _decode(self, cohort: _Cohort, tokens: Tensor) -> Tensor:
        """Read more tokens of these answers, ``[n, q]``; return the logits after the last."""
        if not cohort.cache.get_seq_length():
            start = tokens.new_tensor(self._division.decoder_start)
            tokens = torch.cat([start.expand(len(tokens), -1), tokens], dim=1)
        hidden = self.lm.trunk(
            "decoder",
            input_ids=tokens,
            past_key_values=cohort.cache,
            use_cache=True,
            encoder_hidden_states=cohort.encoded,
            encoder_attention_mask=cohort.prompt_mask,
        )
        return self.lm.logits(hidden[:, -1]).float()

    @torch.no_grad()
    def _cache_agrees(self) -> bool:
        """Compare one text, read in pieces, with a plain pass; log the difference if it is not rounding."""
        tokens = np.random.default_rng(0).integers(0, self.lm.num_tokens, self.shape)
        ends = [2, 3, self.shape[1] - 1, self.shape[1]]

        # All prefixes by a plain pass, with a prompt of two tokens
        text = torch.from_numpy(tokens[:1]).to(self.device)
        positions = torch.tensor(ends, device=self.device) - 1
        plain_logits = self.lm.logits(self.lm.hidden(text, text.new_tensor([2]))[0, positions])

        # And one after the other in the first slot
        prefix_logits = []
        for end in ends:
            length = np.zeros(self.shape[0], dtype=np.int64)
            length[0] = end
            prefix_logits.append(self.logits(tokens, length)[0])

        difference = torch.stack(prefix_logits).log_softmax(-1) - plain_logits.float().log_softmax(-1)
        gap = difference.abs().max().item()
        agrees = gap <= rounding(plain_logits)
        if not agrees:
            model_name = type(self.lm.model).__name__
            logger.warning("%s decodes without a cache, whose logits differ by %.3g", model_name, gap)
        return agrees
