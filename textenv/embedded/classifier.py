"""Embedded sentiment classifier: a GPT-2 of one layer for complete and incomplete reviews."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2ForSequenceClassification, PreTrainedTokenizerFast

from textenv.embedded.grammar import LABELS, Review, sample_review
from textenv.embedded.tokenizer import CONTEXT
from textenv.embedded.training import batched, isolated, train

REVIEWS = 4_000
BATCH = 16
LEARNING_RATE = 2e-3
SEED = 2
BARE, CUT = 0.2, 0.5
"""Fractions of training examples: openings only, and reviews truncated after the opening."""


def train_classifier(tokenizer: PreTrainedTokenizerFast, *, reviews: int = REVIEWS) -> GPT2ForSequenceClassification:
    """Train on sampled reviews, most of them truncated, so that it also scores incomplete ones."""
    rng = np.random.default_rng(SEED)
    examples = [_example(sample_review(rng), tokenizer, rng) for _ in range(reviews)]
    rows, targets = zip(*examples, strict=True)
    with isolated(SEED):
        model = GPT2ForSequenceClassification(_config(tokenizer))

        def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
            ids, positive = batch
            known = ids != tokenizer.pad_token_id
            logits = model(input_ids=ids, attention_mask=known, use_cache=False).logits
            return cross_entropy(logits, torch.stack([1 - positive, positive], dim=-1))

        ids = batched(rows, size=BATCH, pad=tokenizer.pad_token_id)
        train(
            model,
            list(zip(ids, torch.tensor(targets).split(BATCH), strict=True)),
            loss_of=loss_of,
            learning_rate=LEARNING_RATE,
        )
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


def _config(tokenizer: PreTrainedTokenizerFast) -> GPT2Config:
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=1,
        n_head=4,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        id2label=dict(enumerate(LABELS)),
        label2id={name: label for label, name in enumerate(LABELS)},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
