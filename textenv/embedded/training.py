"""Supervised training of the embedded models: one reproducible loop that leaves the caller's settings unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, PreTrainedTokenizerFast

from textenv.embedded.tokenizer import CONTEXT

BATCH_SIZE = 16

WARM_UP = 0.1
"""Warmup ratio of the learning rate; afterwards it follows a cosine to 0."""
WEIGHT_DECAY = 1e-3
GRADIENT_NORM = 1.0


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seeded float32 training on one CPU thread; the caller's settings are restored afterwards.

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
