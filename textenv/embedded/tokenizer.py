"""Embedded tokenizer: a byte-level BPE, so that any text is unchanged by encoding and decoding."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from textenv.embedded.grammar import sample_review

CONTEXT = 128
"""Maximum number of tokens of the embedded models."""
END, PAD = "<|endoftext|>", "<|pad|>"
LARGEST_VOCABULARY = 1024


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Learn the merges from sampled reviews: about 700 tokens, with one for nearly every word of the grammar.

    Digits are always separate tokens, with or without a space before. Text is split into words first and nothing is
    added at the start, so if a text is cut before a space that begins a word, the tokens of its first part are a
    prefix of its tokens.
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
