"""Embedded sentiment classifier: a GPT-2 of one layer for complete and incomplete reviews."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2ForSequenceClassification, PreTrainedTokenizerFast

from textenv.embedded.grammar import CLASSES, Review, sample_review
from textenv.embedded.training import BATCH_SIZE, batched, gpt2_config, isolated, train

BARE, CUT = 0.2, 0.5
"""Fractions of training examples: openings only, and reviews truncated after the opening."""


def train_classifier(
    tokenizer: PreTrainedTokenizerFast, *, reviews: int = 4_000, seed: int = 2
) -> GPT2ForSequenceClassification:
    """Train on sampled reviews, most of them truncated, so that it also scores incomplete ones."""
    rng = np.random.default_rng(seed)
    examples = [_example(sample_review(rng), tokenizer, rng) for _ in range(reviews)]
    rows, targets = zip(*examples, strict=True)
    with isolated(seed):
        labels = {name: label for label, name in enumerate(CLASSES)}
        config = gpt2_config(tokenizer, n_embd=64, n_layer=1, id2label=dict(enumerate(CLASSES)), label2id=labels)
        model = GPT2ForSequenceClassification(config)

        def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
            ids, positive = batch
            known = ids != tokenizer.pad_token_id
            logits = model(input_ids=ids, attention_mask=known, use_cache=False).logits
            return cross_entropy(logits, torch.stack([1 - positive, positive], dim=-1))

        ids = batched(rows, pad=tokenizer.pad_token_id)
        batches = list(zip(ids, torch.tensor(targets).split(BATCH_SIZE), strict=True))
        train(model, batches, loss_of=loss_of, learning_rate=2e-3)
    return model


def _example(review: Review, tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator) -> tuple[list[int], float]:
    """Return the tokens of a complete or truncated review, and the target probability of positive sentiment."""
    opening = len(tokenizer(review.opening)["input_ids"])
    ids = [*tokenizer(review.text)["input_ids"], tokenizer.eos_token_id]
    kind = rng.random()
    if kind < BARE:
        return ids[:opening], 0.5
    if kind < BARE + CUT:
        return ids[: rng.integers(opening + 1, len(ids))], float(review.label)
    return ids[: len(ids) - rng.integers(2)], float(review.label)  # with or without the end token
