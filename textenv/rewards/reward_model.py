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

from textenv.lm.ends import ids_after_end, template_end
from textenv.lm.loading import EMBEDDED, from_pretrained, setting
from textenv.prompts.messages import answered, read_messages, without_prompt
from textenv.prompts.special_tokens import ordinary_ids
from textenv.prompts.tokenize import chat_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardModel:
    """Score prompt and completion together by a model: its raw score, or the probability of a label.

    If the policy's tokenizer has the same ids, the model reads the policy's own ids, EOS included; else it reads the
    texts. A causal model is read at the last real token, even if a text ends with the pad token (`transformers` takes
    the last token that is not the pad token). Texts that are too long are truncated at the beginning, with one
    warning.

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
        self.model, self.tokenizer = model.eval(), copy.deepcopy(tokenizer)
        self.tokenizer.truncation_side = "left"
        self.index = _label_index(model, label)
        if log_odds and self.index is None:
            raise ValueError("the model has one output, a raw score, which has no log-odds: leave log_odds out")
        self.log_odds = log_odds
        # With fewer rows than ids, there is an id that ends no row: see `logits`.
        self.batch_size = min(batch_size, model.config.get_text_config().vocab_size - 1)
        self.max_tokens = _most_tokens(model, tokenizer)
        self._has_warned = False
        self._seen: tuple[Any, bool] | None = None
        """The policy's tokenizer, and True if its vocabulary is that of this model."""

    @classmethod
    def load(cls, name: str | Path = EMBEDDED, **options: Any) -> RewardModel:
        """Load model and tokenizer: ``"embedded"`` (sentiment of reviews), a local folder, or a hub name.

        The weights keep their saved dtype; the options are arguments of the class.

        Raises:
            ValueError: if the model cannot be read, or as the class does.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        auto = AutoModelForSequenceClassification
        model = from_pretrained(auto, name, "classifier", use_safetensors=True, dtype="auto")
        return cls(model, from_pretrained(AutoTokenizer, name, "classifier"), **options)

    def __call__(
        self,
        /,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        prompt_ids: Sequence[list[int]] | None = None,
        completion_ids: Sequence[list[int]] | None = None,
        terminated: Sequence[bool] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **columns: Any,
    ) -> list[float]:
        """Score completions as a reward function, from the policy's ids, else from the texts or chats.

        The texts are used if ``tokenizer`` (of the ids) is None or not equivalent to the model's. ``terminated``
        is True where the policy ended the completion itself.
        """
        if prompt_ids is not None and completion_ids is not None and self.reads_ids_of(tokenizer, prompts):
            # In a chat a model reads what its template writes after the end of a message, too, as in `encode`
            ends = template_end(self.tokenizer).ids
            after_end = ids_after_end(self.tokenizer)
            rows = []
            for prompt, asked, said in zip(prompts, prompt_ids, completion_ids, strict=True):
                closed = not isinstance(prompt, str) and said[-1] in ends
                rows.append(self._cut([*asked, *said, *(after_end if closed else [])]))
            return self.score_rows(rows).tolist()
        ended = terminated if terminated is not None and self.reads_ends else [False] * len(prompts)
        texts = zip(prompts, completions, ended, strict=True)
        return self.score_rows([self.encode(prompt, answer, ended=end) for prompt, answer, end in texts]).tolist()

    def to(self, device: torch.device | str) -> RewardModel:
        """Move the model to a device; return self."""
        self.model.to(device)
        return self

    @property
    def reads_ends(self) -> bool:
        """True if the model was trained on completions that end with EOS (as by `algos.train_reward_model`)."""
        return bool(setting(self.model.config, "trained_with_eos"))

    def reads_ids_of(self, tokenizer: PreTrainedTokenizerBase | None, prompts: Sequence[Any] = ()) -> bool:
        """Return True if a policy's tokenizer has this model's vocabulary and, for chat prompts, its chat template."""
        if tokenizer is None:
            return False
        if self._seen is None or self._seen[0] is not tokenizer:
            self._seen = tokenizer, tokenizer.get_vocab() == self.tokenizer.get_vocab()
        texts = all(isinstance(prompt, str) for prompt in prompts)
        return self._seen[1] and (texts or tokenizer.chat_template == self.tokenizer.chat_template)

    def scores(self, texts: Sequence[str]) -> Tensor:
        """Score texts, each taken as terminated: float32 ``[len(texts)]``."""
        return self.score_rows([self.encode(text, "", ended=self.reads_ends) for text in texts])

    def score_ids(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Score of token ids, int64 ``[B, L]``, where ``attention_mask`` is 1 on real tokens: float32 ``[B]``.

        Raises:
            ValueError: if a row has no real token.
        """
        rows = [ids[known.bool()].tolist() for ids, known in zip(input_ids, attention_mask, strict=True)]
        if not all(rows):
            raise ValueError(f"attention_mask is 0 in all of row {rows.index([])}, expected at least one 1")
        return self.score_rows(rows)

    @torch.no_grad()
    def score_rows(self, rows: Sequence[list[int]]) -> Tensor:
        """Score rows of token ids, as returned by `encode`: float32 ``[len(rows)]``."""
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        scores = torch.zeros(len(rows), device="cpu")
        for start in range(0, len(rows), self.batch_size):
            chosen = order[start : start + self.batch_size]
            scores[chosen] = self._reward_of(self.logits([rows[row] for row in chosen])).cpu()
        return scores

    def logits(self, rows: Sequence[list[int]]) -> Tensor:
        """Logits of unpadded rows, with a gradient: float32 ``[B, labels]``; needs fewer rows than the model has ids.

        Rows are padded on the right, so positions and BERT's first token stay. The padding is an id that ends no row,
        set as the pad id in the model's configuration during the call.
        """
        last = {ids[-1] for ids in rows}
        usual = self.tokenizer.pad_token_id
        pad = usual if usual not in last | {None} else next(i for i in range(len(last) + 1) if i not in last)
        width = max(map(len, rows))
        device = self.model.device
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        with _pad_id(self.model.config.get_text_config(), pad):
            return self.model(input_ids=ids, attention_mask=mask).logits.float()

    def encode(self, prompt: Any, completion: Any, *, ended: bool = False) -> list[int]:
        """Encode prompt and completion as ids, at least one, because a model cannot read an empty row.

        A terminated completion of a text prompt gets the tokenizer's EOS, if any; a chat's template adds its own. A
        completion of a chat is messages or a text; it continues a chat that ends with an assistant's message, and may
        repeat the chat. The only special tokens are those of the tokenizer and of the chat template: a completion that
        spells one out is ordinary text, see `textenv.prompts.special_tokens`.
        """
        eos = self.tokenizer.eos_token_id
        if isinstance(prompt, str):
            ids = ordinary_ids(prompt + completion, self.tokenizer)
            end = [eos] if ended and eos is not None and ids[-1:] != [eos] else []
            if len(ids) + len(end) > self.max_tokens:
                cut = {"truncation": True, "max_length": self.max_tokens - len(end)}  # keeps special tokens in front
                self._warn(len(ids))
                ids = ordinary_ids(prompt + completion, self.tokenizer, **cut)
            ids += end
        else:
            asked = read_messages(prompt, where="the prompt")
            said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            answer = without_prompt(read_messages(said, where="the completion"), asked)
            ids = chat_ids(answered(asked, answer), self.tokenizer, add_generation_prompt=False)
        known = (self.tokenizer.pad_token_id, eos, self.tokenizer.bos_token_id)
        return self._cut(ids) or [next((token for token in known if token is not None), 0)]

    def _cut(self, ids: list[int]) -> list[int]:
        """Return the last ids that fit into the model."""
        if len(ids) > self.max_tokens:
            self._warn(len(ids))
        return ids[-self.max_tokens :]

    def _warn(self, length: int) -> None:
        if not self._has_warned:
            log = logging.getLogger(__name__)
            log.warning("a text of %d tokens is cut at its beginning: the model reads %d", length, self.max_tokens)
            self._has_warned = True

    def _reward_of(self, logits: Tensor) -> Tensor:
        if self.index is None:
            return logits[:, 0]
        if self.model.config.problem_type == "multi_label_classification":
            logit = logits[:, self.index]
            return logit if self.log_odds else logit.sigmoid()
        if not self.log_odds:
            return logits.softmax(-1)[:, self.index]
        others = torch.cat([logits[:, : self.index], logits[:, self.index + 1 :]], dim=1)
        return logits[:, self.index] - others.logsumexp(-1)


def _label_index(model: PreTrainedModel, label: str | int | None) -> int | None:
    """Return the logits column; None for the raw score of a head with one output."""
    labels = {str(name).lower(): int(index) for index, name in (model.config.id2label or {}).items()}
    if model.config.num_labels == 1:
        if label is not None:
            raise ValueError(f"label is {label!r}, but the model has one output, a raw score: leave the label out")
        return None
    wanted = "positive" if label is None else label
    index = wanted if isinstance(wanted, int) else labels.get(wanted.lower(), -1)
    if index not in labels.values():
        raise ValueError(f"label is {wanted!r}, expected one of {sorted(labels)}")
    return index


def _most_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the model's maximum input length: its number of positions, or the tokenizer's limit if lower."""
    positions = setting(model.config.get_text_config(), "max_position_embeddings") or tokenizer.model_max_length
    for name, module in model.named_modules():
        # RoBERTa's positions start after its pad id.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            positions -= module.padding_idx + 1
    return int(min(positions, tokenizer.model_max_length))


_ONE_AT_A_TIME = threading.Lock()
"""Lock for the configuration, which threads share (`Rewards(workers=...)`)."""


@contextmanager
def _pad_id(config: Any, pad: int) -> Iterator[None]:
    with _ONE_AT_A_TIME:
        before = config.pad_token_id
        config.pad_token_id = pad
        try:
            yield
        finally:
            config.pad_token_id = before
