"""Training of the embedded models: a byte-level BPE tokenizer, a GPT-2 that writes reviews, and a classifier.

One reproducible loop trains both models; the caller's settings stay.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

from textenv.embedded.grammar import CLASSES, Review, sample_review

CONTEXT = 128
"""Maximum number of tokens of the embedded models."""
END, PAD = "<|endoftext|>", "<|pad|>"
LARGEST_VOCABULARY = 1024


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Learn the merges from sampled reviews: about 700 tokens, with one for nearly every word of the grammar.

    Digits are always separate tokens, with or without a space before. Text is split into words first and nothing is
    added at the start. So if a text is cut before the space of a word, the tokens of the first part are a prefix of
    the tokens of the whole text.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST_VOCABULARY,
        min_frequency=2,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _corpus() -> list[str]:
    rng = np.random.default_rng(0)
    spaced_digits = " ".join(["", *"0123456789"])
    return [sample_review(rng).text for _ in range(4_000)] + [spaced_digits] * 2  # twice, for min_frequency=2


SHARPNESS = 1.2
"""Factor applied to the logits after training (see `_sharpen`)."""


def train_language_model(tokenizer: PreTrainedTokenizerFast, *, reviews: int = 12_000) -> GPT2LMHeadModel:
    """Train one epoch on sampled reviews, each followed by the end token."""
    rng = np.random.default_rng(1)
    texts = [sample_review(rng).text for _ in range(reviews)]
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    with isolated(seed=1):
        # The initial weights' scale is closer to 1/sqrt(128) than GPT-2's .02; the model learns much faster.
        config = gpt2_config(tokenizer, n_embd=128, n_layer=2, n_inner=256, initializer_range=0.05)
        model = GPT2LMHeadModel(config)

        def loss_of(ids: Tensor) -> Tensor:
            known = ids != tokenizer.pad_token_id
            body = model.transformer(input_ids=ids[:, :-1], attention_mask=known[:, :-1], use_cache=False)
            return cross_entropy(model.lm_head(body.last_hidden_state[known[:, 1:]]), ids[:, 1:][known[:, 1:]])

        train(model, batched(rows, pad=tokenizer.pad_token_id), loss_of=loss_of, learning_rate=4e-3)
        _sharpen(model)
    return model


@torch.no_grad()
def _sharpen(model: GPT2LMHeadModel) -> None:
    """Set the temperature after training (Guo et al. 2017): scaling the last norm scales every logit.

    A short training leaves a little probability on every wrong token, and a review samples about twenty tokens. The
    held-out loss is lowest near a factor of 1.1, and only .002 nats per token higher at 1.2, where 2 % of the samples
    break the grammar instead of 8 %.
    """
    model.transformer.ln_f.weight.mul_(SHARPNESS)
    model.transformer.ln_f.bias.mul_(SHARPNESS)


BARE, CUT = 0.2, 0.5
"""Fractions of training examples: openings only, and reviews truncated after the opening."""


def train_classifier(tokenizer: PreTrainedTokenizerFast, *, reviews: int = 4_000) -> GPT2ForSequenceClassification:
    """Train on sampled reviews, most of them truncated, so that the model also scores incomplete ones."""
    rng = np.random.default_rng(2)
    examples = [_example(sample_review(rng), tokenizer, rng) for _ in range(reviews)]
    rows, targets = zip(*examples, strict=True)
    with isolated(seed=2):
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


BATCH_SIZE = 16

WARM_UP = 0.1
"""Fraction of steps that warm up the learning rate, which then follows a cosine to 0."""
WEIGHT_DECAY = 1e-3
GRADIENT_NORM = 1.0


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Context for seeded float32 training on one CPU thread; restores the caller's settings.

    One thread, because otherwise the order of the sums, and so the weights, would depend on the number of cores.
    """
    with ExitStack() as caller:
        caller.callback(torch.set_num_threads, torch.get_num_threads())
        caller.callback(torch.set_default_dtype, torch.get_default_dtype())
        caller.enter_context(torch.random.fork_rng(devices=[]))
        caller.enter_context(torch.device("cpu"))
        caller.enter_context(torch.inference_mode(False))
        caller.enter_context(torch.enable_grad())
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed GPUs, which is not undone
        yield


def train(model: nn.Module, batches: Sequence[Any], *, loss_of: Callable[[Any], Tensor], learning_rate: float) -> None:
    """Take one AdamW step on `loss_of(batch)` for each batch, in order; leave the model in eval mode."""
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate((step + 1) / len(batches)))
    model.train()
    for batch in batches:
        optimiser.zero_grad()
        loss_of(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimiser.step()
        schedule.step()
    model.eval()


def batched(rows: Sequence[Sequence[int]], *, pad: int) -> list[Tensor]:
    """Pad rows of ids on the right into batches ``[BATCH_SIZE, longest row]``, int64, in order."""
    tensors = [torch.tensor(row) for row in rows]
    return [
        nn.utils.rnn.pad_sequence(tensors[start : start + BATCH_SIZE], batch_first=True, padding_value=pad)
        for start in range(0, len(rows), BATCH_SIZE)
    ]


def gpt2_config(tokenizer: PreTrainedTokenizerFast, **sizes: Any) -> GPT2Config:
    """Configuration of an embedded GPT-2: four heads, no dropout, and the given sizes and labels."""
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        n_head=4,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )


def _rate(progress: float) -> float:
    """Learning rate as a fraction of its peak, at a progress from 0 to 1."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
