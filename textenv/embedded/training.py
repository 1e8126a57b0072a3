"""Training of the embedded models: a byte-level BPE tokenizer, a GPT-2 that writes reviews, and a classifier.

One reproducible loop trains both models. Afterwards torch's settings are those of the caller again.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NotRequired, TypedDict, TypeVar, Unpack

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

from textenv.embedded.grammar import CLASSES, Review, sample_review

CONTEXT = 128
"""Maximum number of tokens of the embedded models."""
END = "<|endoftext|>"
"""Token at the beginning and end of a text."""
PAD = "<|pad|>"
"""Padding token."""
LARGEST_VOCABULARY = 1024
"""Maximum number of tokens of the tokenizer."""


BatchT = TypeVar("BatchT")


class _Sizes(TypedDict):
    """Arguments of `GPT2Config` in which the embedded models differ."""

    n_embd: int
    n_layer: int
    n_inner: NotRequired[int]
    initializer_range: NotRequired[float]
    id2label: NotRequired[dict[int, str]]
    label2id: NotRequired[dict[str, int]]


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Learn the merges from sampled reviews: about 700 tokens, with one for nearly every word of the grammar.

    Digits are always separate tokens, with or without a space before. Text is split into words first, and nothing is
    added at the start. So the tokens of a text begin with those of any part of it that ends before the space of a word.
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
    """Return the texts from which the tokenizer is learnt."""
    rng = np.random.default_rng(0)
    reviews = [sample_review(rng).text for _ in range(4_000)]
    spaced_digits = " ".join(["", *"0123456789"])
    return [*reviews, spaced_digits, spaced_digits]  # twice, for min_frequency=2


SHARPNESS = 1.2
"""Factor applied to the logits after training (see `_sharpen`)."""


def train_language_model(tokenizer: PreTrainedTokenizerFast, *, reviews: int = 12_000) -> GPT2LMHeadModel:
    """Train a language model for one epoch on sampled reviews, each followed by the end token."""
    rng = np.random.default_rng(1)
    texts = [sample_review(rng).text for _ in range(reviews)]
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    with isolated(seed=1):
        # The initial weights' scale is closer to 1/sqrt(128) than GPT-2's .02; the model learns much faster.
        config = gpt2_config(tokenizer, n_embd=128, n_layer=2, n_inner=256, initializer_range=0.05)
        model = GPT2LMHeadModel(config)

        def loss_of(ids: Tensor) -> Tensor:
            mask = ids != tokenizer.pad_token_id  # [B, L]
            inputs = ids[:, :-1]
            targets = ids[:, 1:]
            target_mask = mask[:, 1:]
            body = model.transformer(input_ids=inputs, attention_mask=mask[:, :-1], use_cache=False)
            logits = model.lm_head(body.last_hidden_state[target_mask])  # [number of targets, V]
            return cross_entropy(logits, targets[target_mask])

        batches = batched(rows, pad=tokenizer.pad_token_id)
        train(model, batches, loss_of=loss_of, learning_rate=4e-3)
        _sharpen(model)
    return model


@torch.no_grad()
def _sharpen(model: GPT2LMHeadModel) -> None:
    """Multiply the logits by `SHARPNESS`, a temperature set after training (Guo et al. 2017), by scaling the last norm.

    A short training leaves a little probability on every wrong token, and a review samples about twenty tokens. The
    held-out loss is lowest near a factor of 1.1. At 1.2 it is only .002 nats per token higher, but 2 % of the samples
    break the grammar instead of 8 %.
    """
    model.transformer.ln_f.weight.mul_(SHARPNESS)
    model.transformer.ln_f.bias.mul_(SHARPNESS)


OPENING_FRACTION = 0.2
"""Fraction of the classifier's examples that are openings only."""
TRUNCATED_FRACTION = 0.5
"""Fraction of the classifier's examples that are reviews truncated after the opening."""


def train_classifier(tokenizer: PreTrainedTokenizerFast, *, reviews: int = 4_000) -> GPT2ForSequenceClassification:
    """Train a classifier on sampled reviews, most of them truncated, so that the model also scores incomplete ones."""
    rng = np.random.default_rng(2)
    examples = [_example(sample_review(rng), tokenizer, rng) for _ in range(reviews)]
    rows, targets = zip(*examples, strict=True)
    with isolated(seed=2):
        labels = {name: label for label, name in enumerate(CLASSES)}
        config = gpt2_config(tokenizer, n_embd=64, n_layer=1, id2label=dict(enumerate(CLASSES)), label2id=labels)
        model = GPT2ForSequenceClassification(config)

        def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
            ids, positive = batch  # [B, L], and [B] with the probability of positive sentiment
            mask = ids != tokenizer.pad_token_id
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            target_probs = torch.stack([1 - positive, positive], dim=-1)
            return cross_entropy(logits, target_probs)

        id_batches = batched(rows, pad=tokenizer.pad_token_id)
        target_batches = torch.tensor(targets).split(BATCH_SIZE)
        batches = list(zip(id_batches, target_batches, strict=True))
        train(model, batches, loss_of=loss_of, learning_rate=2e-3)
    return model


def _example(review: Review, tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator) -> tuple[list[int], float]:
    """Return the tokens of a complete or truncated review, and the target probability of positive sentiment."""
    opening_length = len(tokenizer(review.opening)["input_ids"])
    ids = [*tokenizer(review.text)["input_ids"], tokenizer.eos_token_id]
    positive = float(review.label)
    kind = rng.random()

    # An opening is neutral; others have the review's label
    if kind < OPENING_FRACTION:
        return ids[:opening_length], 0.5
    if kind < OPENING_FRACTION + TRUNCATED_FRACTION:
        length = rng.integers(opening_length + 1, len(ids))
    else:
        length = len(ids) - rng.integers(2)  # with or without the end token
    return ids[:length], positive


BATCH_SIZE = 16
"""Number of reviews in a step."""
WARM_UP = 0.1
"""Fraction of steps that warm up the learning rate, which then follows a cosine to 0."""
WEIGHT_DECAY = 1e-3
"""Weight decay of AdamW."""
GRADIENT_NORM = 1.0
"""Norm to which the gradient is clipped."""


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Context for seeded float32 training on one CPU thread; restores the caller's settings.

    With more threads the order of the sums, and so the weights, would depend on the number of cores.
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


def train(
    model: nn.Module, batches: Sequence[BatchT], *, loss_of: Callable[[BatchT], Tensor], learning_rate: float
) -> None:
    """Take one AdamW step on `loss_of(batch)` for each batch, in order; leave the model in eval mode."""
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True
    )

    def rate_of_step(step: int) -> float:
        return _rate((step + 1) / len(batches))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate_of_step)
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
    batches = []
    for start in range(0, len(rows), BATCH_SIZE):
        batch = tensors[start : start + BATCH_SIZE]
        batches.append(nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=pad))
    return batches


def gpt2_config(tokenizer: PreTrainedTokenizerFast, **sizes: Unpack[_Sizes]) -> GPT2Config:
    """Return the configuration of an embedded GPT-2 with these sizes and labels, four heads and no dropout."""
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
    """Return the learning rate as a fraction of its peak, at a progress from 0 to 1."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
