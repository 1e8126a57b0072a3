"""`Classifier`: the probability of a label, by any `AutoModelForSequenceClassification`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from textenv.lm.loading import EMBEDDED, from_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Classifier:
    """Probability that texts carry a label; padding on either side changes nothing.

    Args:
        model: a sequence classifier of `transformers`.
        tokenizer: its tokenizer, with a pad token.
        label: name or index of the label; ``"positive"`` by default.

    Raises:
        ValueError: if the model has no such label, or the tokenizer no pad token.

    Example:
        >>> Classifier.load("embedded").probability(["a joy from start to finish."])  # doctest: +SKIP
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, label: str | int = "positive"
    ) -> None:
        labels = {str(name).lower(): int(index) for index, name in (model.config.id2label or {}).items()}
        index = label if isinstance(label, int) else labels.get(label.lower(), -1)
        if index not in labels.values():
            raise ValueError(f"label is {label!r}, the classifier has {sorted(labels)}")
        if tokenizer.pad_token_id is None:
            raise ValueError("the classifier's tokenizer has no pad token: set tokenizer.pad_token to its EOS token")
        # `transformers` finds a text's last token by the model's pad id, which must be the one that pads here.
        model.config.pad_token_id = tokenizer.pad_token_id
        self.model, self.tokenizer, self.index = model.eval().requires_grad_(False), tokenizer, index

    @classmethod
    def load(cls, name: str | Path = EMBEDDED, *, label: str | int = "positive") -> Classifier:
        """Load model and tokenizer: ``"embedded"``, a local folder, or a hub name."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        model = from_pretrained(AutoModelForSequenceClassification, name, "classifier", use_safetensors=True)
        return cls(model, from_pretrained(AutoTokenizer, name, "classifier"), label=label)

    @torch.no_grad()
    def probability(self, texts: Sequence[str]) -> Tensor:
        """Probability of the label for each text: float32 ``[len(texts)]``."""
        # An empty text has no last token to read; a lone special token stands in for it.
        filled = [text or self.tokenizer.pad_token for text in texts]
        limit = getattr(self.model.config, "max_position_embeddings", None)
        batch = self.tokenizer(
            filled, return_tensors="pt", padding=True, truncation=limit is not None, max_length=limit
        )
        return self.score(batch["input_ids"], batch["attention_mask"])

    def score(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`probability` of token ids, int64 ``[B, L]``, where ``attention_mask`` is 1 on real tokens."""
        device = self.model.device
        # Rolled to the left edge, so that position and last token mean the same whatever the padding.
        order = attention_mask.argsort(dim=1, descending=True, stable=True)
        mask = attention_mask.gather(1, order).to(device)
        tokens = torch.where(mask.bool(), input_ids.gather(1, order).to(device), self.tokenizer.pad_token_id)
        return self.model(input_ids=tokens, attention_mask=mask).logits.float().softmax(-1)[:, self.index]
