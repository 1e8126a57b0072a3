"""`RewardModel`: a sequence classifier of `transformers` as a reward function."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from textenv.embedded.folder import EMBEDDED
from textenv.lm.ends import ids_after_end, template_end, turn_ends
from textenv.lm.loading import from_pretrained, setting
from textenv.lm.model import position_limits
from textenv.prompts.messages import read_messages, with_answer, without_prompt
from textenv.prompts.special_tokens import ordinary_ids
from textenv.prompts.tokenize import chat_ids, warn_of_unwritten

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class RewardModel:
    """Score prompt and completion together by a model: its raw score, or the probability of a label.

    If the policy's tokenizer has the same ids, the model reads the policy's own ids, EOS included; else it reads the
    texts. A causal model's score is that of the last real token, even if a text ends with the pad token
    (`transformers` takes the last token that is not the pad token). Texts that are too long are truncated at the
    beginning, with one warning.

    Args:
        model: any model of ``AutoModelForSequenceClassification``; it computes in its own dtype.
        tokenizer: its tokenizer (a copy is kept). Chat prompts are rendered by its chat template.
        label: name or index of the label whose probability is the score. None means the raw score if the
            head has one output, else ``"positive"``.
        log_odds: return ``log(p / (1 - p))`` instead of the probability p.
        batch_size: maximum number of texts in a forward pass; texts are sorted by length first.

    Raises:
        ValueError: if the model has no such label, if label or log_odds is given for one output, or batch_size < 1.

    Example:
        >>> rate = RewardModel.load("embedded")  # doctest: +SKIP
        >>> rate(prompts=["this film was"], completions=[" a joy from start to finish."])  # doctest: +SKIP
    """

    __name__ = "reward_model"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        label: str | int | None = None,
        log_odds: bool = False,
        batch_size: int = 32,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1 text")
        self.model = model.eval()
        self.tokenizer = copy.deepcopy(tokenizer)
        self.tokenizer.truncation_side = "left"
        self.index = _label_index(model, label)
        """Column of the label in the logits; None if the score is raw."""
        if log_odds and self.index is None:
            raise ValueError("the model has one output, a raw score, which has no log-odds: leave log_odds out")
        self.log_odds = log_odds
        # With fewer rows than ids, some id ends no row; `logits` needs one for the padding
        self.batch_size = min(batch_size, model.config.get_text_config().vocab_size - 1)
        self.max_tokens = _max_tokens(model, tokenizer)
        self._has_warned = False
        self._compared_tokenizer: PreTrainedTokenizerBase | None = None
        """The policy's tokenizer whose vocabulary was last compared to this model's."""
        self._has_same_vocabulary = False
        """Result of this comparison."""

    @classmethod
    def load(cls, name: str | Path = EMBEDDED, **options: Any) -> RewardModel:
        """Load model and tokenizer: ``"embedded"`` (sentiment of reviews), a local folder, or a hub name.

        The weights keep their saved dtype; the options are arguments of the class.

        Raises:
            ValueError: if the model cannot be read, or as the class does.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        model = from_pretrained(
            AutoModelForSequenceClassification, name, "classifier", use_safetensors=True, dtype="auto"
        )
        tokenizer = from_pretrained(AutoTokenizer, name, "classifier")
        return cls(model, tokenizer, **options)

    def __call__(
        self,
        /,
        prompts: Sequence[object],
        completions: Sequence[object],
        *,
        prompt_ids: Sequence[list[int]] | None = None,
        completion_ids: Sequence[list[int]] | None = None,
        terminated: Sequence[bool] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **columns: object,
    ) -> list[float]:
        """Score completions as a reward function, from the policy's ids, else from the texts or chats.

        The texts are used if ``tokenizer`` (of the ids) is None or not equivalent to the model's, and for a completion
        that a stop of the environment ended, which this model never saw as an end. ``terminated`` is True
        where the policy ended the completion itself.
        """
        if terminated is None:
            terminated = [False] * len(prompts)
        by_ids: list[list[int] | None] = [None] * len(prompts)
        if prompt_ids is not None and completion_ids is not None and self.reads_ids_of(tokenizer, prompts):
            by_ids = self._rows_by_ids(prompts, prompt_ids, completion_ids, terminated)

        rows = []
        for prompt, completion, ids, has_ended in zip(prompts, completions, by_ids, terminated, strict=True):
            if ids is None:
                ids = self.encode(prompt, completion, ended=has_ended and self.reads_ends)
            rows.append(ids)
        return self.score_rows(rows).tolist()

    def _rows_by_ids(
        self,
        prompts: Sequence[object],
        prompt_ids: Sequence[list[int]],
        completion_ids: Sequence[list[int]],
        terminated: Sequence[bool],
    ) -> list[list[int] | None]:
        """Return the policy's ids of prompts with completions; None where something else than an end ended one."""
        end_ids = turn_ends(self.tokenizer).ids
        end_ids_of_chat = template_end(self.tokenizer).ids
        after_end = ids_after_end(self.tokenizer)
        rows: list[list[int] | None] = []
        for prompt, asked_ids, answer_ids, has_ended in zip(
            prompts, prompt_ids, completion_ids, terminated, strict=True
        ):
            if not answer_ids:  # which a reward may be asked about, though a policy writes at least one token
                rows.append(None)
                continue
            ids = [*asked_ids, *answer_ids]
            last = answer_ids[-1]
            if has_ended and last not in end_ids:
                rows.append(None)
                continue

            # In a chat a model reads what its template writes after the end of a message, too, as in `encode`
            if not isinstance(prompt, str) and last in end_ids_of_chat:
                ids += after_end
            rows.append(self._cut(ids))
        return rows

    def to(self, device: torch.device | str) -> RewardModel:
        """Move the model to a device; return self."""
        self.model.to(device)
        return self

    @property
    def reads_ends(self) -> bool:
        """True if the model was trained on completions that end with EOS (as by `algos.train_reward_model`)."""
        return bool(setting(self.model.config, "trained_with_eos"))

    def reads_ids_of(self, tokenizer: PreTrainedTokenizerBase | None, prompts: Sequence[object] = ()) -> bool:
        """Return True if a policy's tokenizer has this model's vocabulary and, for chat prompts, its chat template."""
        if tokenizer is None:
            return False
        if self._compared_tokenizer is not tokenizer:  # the comparison is slow
            self._has_same_vocabulary = tokenizer.get_vocab() == self.tokenizer.get_vocab()
            self._compared_tokenizer = tokenizer
        if not self._has_same_vocabulary:
            return False
        if all(isinstance(prompt, str) for prompt in prompts):
            return True
        return tokenizer.chat_template == self.tokenizer.chat_template

    def scores(self, texts: Sequence[str]) -> Tensor:
        """Score texts, as if the policy had ended each: float32 ``[len(texts)]``."""
        return self.score_rows([self.encode(text, "", ended=self.reads_ends) for text in texts])

    def score_ids(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Score of token ids, int64 ``[B, L]``, where ``attention_mask`` is 1 on real tokens: float32 ``[B]``.

        Raises:
            ValueError: if a row has no real token.
        """
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        if not all(rows):
            raise ValueError(f"attention_mask is 0 in all of row {rows.index([])}, expected at least one 1")
        return self.score_rows(rows)

    @torch.no_grad()
    def score_rows(self, rows: Sequence[list[int]]) -> Tensor:
        """Score rows of token ids, as returned by `encode`: float32 ``[len(rows)]``."""
        indices_by_length = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        scores = torch.zeros(len(rows), device="cpu")
        for start in range(0, len(rows), self.batch_size):
            indices = indices_by_length[start : start + self.batch_size]
            logits = self.logits([rows[index] for index in indices])
            scores[indices] = self._reward_of(logits).cpu()
        return scores

    def logits(self, rows: Sequence[list[int]]) -> Tensor:
        """Logits of unpadded rows, with a gradient: float32 ``[B, labels]``; needs fewer rows than the model has ids.

        Rows are padded on the right, so positions and BERT's first token stay. The padding is an id that ends no row,
        set as the pad id in the model's configuration during the call.
        """
        # A pad id that ends no row: the tokenizer's, or else the first one
        last_ids = {ids[-1] for ids in rows}
        pad = self.tokenizer.pad_token_id
        if pad is None or pad in last_ids:
            pad = 0
            while pad in last_ids:
                pad += 1

        # [B, L]
        length = max(map(len, rows))
        padded_ids = []
        mask = []
        for ids in rows:
            num_padding = length - len(ids)
            padded_ids.append(ids + [pad] * num_padding)
            mask.append([1] * len(ids) + [0] * num_padding)
        device = self.model.device
        input_ids = torch.tensor(padded_ids, device=device)
        attention_mask = torch.tensor(mask, device=device)

        with _pad_id(self.model.config.get_text_config(), pad):
            return self.model(input_ids=input_ids, attention_mask=attention_mask).logits.float()

    def encode(self, prompt: Any, completion: Any, *, ended: bool = False) -> list[int]:
        """Encode prompt and completion as ids, at least one, because a model cannot read an empty row.

        A terminated completion of a text prompt gets the tokenizer's EOS, if any; a chat's template adds its own. A
        completion of a chat is messages or a text; it continues a chat that ends with an assistant's message, and may
        repeat the chat. The only special tokens are those of the tokenizer and of the chat template: a completion that
        spells one out is ordinary text, see `textenv.prompts.special_tokens`.
        """
        if isinstance(prompt, str):
            ids = self._text_ids(prompt + completion, ended=ended)
        else:
            ids = self._chat_ids(prompt, completion)
        ids = self._cut(ids)
        if ids:
            return ids

        # An empty text becomes padding, or another special token
        tokenizer = self.tokenizer
        for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id):
            if token is not None:
                return [token]
        return [0]

    def _text_ids(self, text: str, *, ended: bool) -> list[int]:
        """Encode a text, cut at its beginning if it is too long, and with EOS if it ``ended``."""
        eos = self.tokenizer.eos_token_id
        ids = ordinary_ids(text, self.tokenizer)
        end = []
        if ended and eos is not None and ids[-1:] != [eos]:
            end = [eos]
        if len(ids) + len(end) > self.max_tokens:
            self._warn(len(ids))
            # The tokenizer's truncation keeps special tokens in front
            ids = ordinary_ids(text, self.tokenizer, truncation=True, max_length=self.max_tokens - len(end))
        return ids + end

    def _chat_ids(self, prompt: Any, completion: Any) -> list[int]:
        """Encode a chat and its completion, a text or messages, by the chat template."""
        asked = read_messages(prompt, where="the prompt")
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        answer = without_prompt(read_messages(completion, where="the completion"), asked)
        ids = chat_ids(with_answer(asked, answer), self.tokenizer, add_generation_prompt=False)
        warn_of_unwritten(asked, self.tokenizer)
        return ids

    def _cut(self, ids: list[int]) -> list[int]:
        """Return the last ids that fit into the model."""
        if len(ids) > self.max_tokens:
            self._warn(len(ids))
        return ids[-self.max_tokens :]

    def _warn(self, length: int) -> None:
        """Warn once that a text of this length, in tokens, is too long."""
        if not self._has_warned:
            log = logging.getLogger(__name__)
            log.warning("a text of %d tokens is cut at its beginning: the model reads %d", length, self.max_tokens)
            self._has_warned = True

    def _reward_of(self, logits: Tensor) -> Tensor:
        """Return the scores ``[B]`` of logits ``[B, labels]``: raw, a probability of the label, or its log-odds."""
        if self.index is None:
            return logits[:, 0]
        if self.model.config.problem_type == "multi_label_classification":
            logit = logits[:, self.index]
            if self.log_odds:
                return logit
            return logit.sigmoid()
        if not self.log_odds:
            return logits.softmax(-1)[:, self.index]
        other_logits = torch.cat([logits[:, : self.index], logits[:, self.index + 1 :]], dim=1)
        return logits[:, self.index] - other_logits.logsumexp(-1)


def _label_index(model: PreTrainedModel, label: str | int | None) -> int | None:
    """Return the logits column of a label; None for the raw score of a head with one output."""
    if model.config.num_labels == 1:
        if label is not None:
            raise ValueError(f"label is {label!r}, but the model has one output, a raw score: leave the label out")
        return None
    if label is None:
        label = "positive"
    labels = {str(name).lower(): int(index) for index, name in (model.config.id2label or {}).items()}
    if isinstance(label, int):
        index = label
    else:
        index = labels.get(label.lower(), -1)
    if index not in labels.values():
        raise ValueError(f"label is {label!r}, expected one of {sorted(labels)}")
    return index


def _max_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the model's maximum input length: its number of positions, or the tokenizer's limit if lower."""
    num_positions = min(position_limits(model.config.get_text_config()), default=tokenizer.model_max_length)
    for name, module in model.named_modules():
        is_position_table = name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        if is_position_table and module.padding_idx is not None:
            num_positions -= module.padding_idx + 1  # RoBERTa's positions start after its pad id
    return int(min(num_positions, tokenizer.model_max_length))


_CONFIG_LOCK = threading.Lock()
"""Lock for the configuration, which threads share (`Rewards(workers=...)`)."""


@contextmanager
def _pad_id(config: PreTrainedConfig, pad: int) -> Iterator[None]:
    """Context in which a model's configuration has this pad id; one thread at a time."""
    with _CONFIG_LOCK:
        usual_pad = config.pad_token_id
        config.pad_token_id = pad
        try:
            yield
        finally:
            config.pad_token_id = usual_pad
