"""Supervised fine-tuning (SFT) of a language model on examples, the usual starting point of PPO."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from algos.config import check_range
from algos.finetuning.optimizer import CosineOptimizer, dropout_on, length_buckets
from algos.finetuning.packing import Example, TokenRows, check_packing, learnt_log_probs, pack, read_example, token_rows
from algos.policies.lm import LMPolicy
from algos.training.logger import Logs
from algos.training.run_folder import hold
from textenv.lm.model import LanguageModel
from textenv.names import NamedFields

LONGEST = 1024
"""Upper limit of the default ``max_length``, tokens; the context of some models is too long for the memory."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(NamedFields):
    """Hyper-parameters of supervised fine-tuning."""

    num_epochs: int = 1
    """Passes over the examples."""
    batch_size: int = 32
    """Examples per optimizer step, with or without packing."""
    micro_batch_size: int | None = None
    """Rows evaluated at a time, to save memory; the gradient is the same. None: all rows of the step."""
    max_length: int | None = None
    """Maximum tokens per row; longer examples are truncated. None: the model's context length, at most `LONGEST`."""
    packing: bool = True
    """Pack several examples into a row, with no attention between them; False: one example per row."""
    learning_rate: float = 5e-5
    """Peak learning rate of AdamW; 1e-3 and more for small models from scratch."""
    warmup_ratio: float = 0.05
    """Fraction of the steps for linear learning-rate warm-up; after it, cosine decay to 0."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices, per step, times the learning rate."""
    max_grad_norm: float = 1.0
    """Maximum global gradient norm (clipping)."""
    seed: int = 1
    """Seed of the example order and of dropout."""

    def __post_init__(self) -> None:
        check_range(self, at_least_one=["num_epochs", "batch_size", "micro_batch_size", "max_length"])
        check_range(self, positive=["learning_rate", "max_grad_norm"], not_negative=["weight_decay", "seed"])
        check_range(self, unit_interval=["warmup_ratio"])


def sft(
    model: LanguageModel | LMPolicy,
    examples: Sequence[Any],
    config: SFTConfig | None = None,
    *,
    held_out: Sequence[Any] | None = None,
    run_dir: str | Path | None = None,
    progress: bool = False,
    overwrite: bool = False,
) -> list[dict[str, float]]:
    """Fine-tune a language model in place on examples: mean cross-entropy over the target tokens.

    Dropout is on during training only, as the model's config says. Logits are divided by the model's temperature.

    Args:
        model: model to train; only parameters that require a gradient are trained (with LoRA, the adapter).
        examples: texts, ``{"prompt", "completion"}`` or ``{"messages"}`` (see `algos.finetuning.packing`). In a text
            every token after the first is a target, otherwise only answers and their EOS.
        config: hyper-parameters.
        held_out: examples to evaluate after each epoch.
        run_dir: folder for ``metrics.jsonl`` and TensorBoard files.
        progress: show a progress bar.
        overwrite: delete an existing run in ``run_dir`` first.

    Returns:
        Metrics of every epoch: ``sft/loss`` in nats per token, and loss and perplexity on ``held_out``; ``steps``
        counts the target tokens so far.

    Raises:
        TypeError: if the model is neither a `LanguageModel` nor an `LMPolicy`.
        ValueError: if an example has another form, there are no target tokens, ``max_length`` exceeds the model's
            context length, or the model does not support packing.
        FileExistsError: if ``run_dir`` holds a run and ``overwrite`` is False.
        BlockingIOError: if another process trains in ``run_dir``.

    Example:
        >>> policy = LMPolicy.load("gpt2")  # doctest: +SKIP
        >>> sft(policy, [{"prompt": "2 + 2 =", "completion": " 4"}])  # doctest: +SKIP
    """
    config = SFTConfig() if config is None else config
    lm = _language_model(model)
    max_length = config.max_length or min(LONGEST, lm.context or LONGEST)
    check_context(lm, max_length)
    config = replace(config, max_length=max_length)
    training = _read_all(examples, lm, max_length, "examples")
    measured = None if held_out is None else _read_all(held_out, lm, max_length, "held_out")
    if config.packing:
        check_packing(lm)
    generator = torch.Generator().manual_seed(config.seed)
    descent = CosineOptimizer(lm.parameters(), config, steps=config.num_epochs * -(-len(training) // config.batch_size))
    history: list[dict[str, float]] = []
    tokens, start = sum(sum(example.learnt) for example in training), time.perf_counter()
    logged = partial(Logs, run_dir, total_steps=config.num_epochs * tokens, progress=progress)
    with hold(run_dir, overwrite=overwrite), logged() as logs:
        for epoch in range(1, config.num_epochs + 1):
            metrics = {"steps": epoch * tokens, "epoch": epoch} | _epoch(lm, training, config, descent, generator)
            if measured is not None:
                metrics |= _measure(lm, measured, config)
            seconds = time.perf_counter() - start
            metrics |= {"time/seconds": seconds, "time/steps_per_second": epoch * tokens / seconds}
            logs.write(metrics)
            history.append(metrics)
    return history


def check_context(lm: LanguageModel, max_length: int) -> None:
    """Raise a ValueError if ``max_length`` exceeds the model's context length."""
    if lm.context is not None and max_length > lm.context:
        raise ValueError(f"max_length is {max_length}, the model reads {lm.context} tokens: set max_length to that")


def _language_model(model: Any) -> LanguageModel:
    lm = model if isinstance(model, LanguageModel) else getattr(model, "lm", None)
    if not isinstance(lm, LanguageModel):
        raise TypeError(
            f"model is a {type(model).__name__}, expected textenv.LanguageModel(model, tokenizer) or an algos.LMPolicy"
        )
    return lm


def _read_all(examples: Sequence[Any], lm: LanguageModel, max_length: int, name: str) -> list[Example]:
    """Read the examples, truncated to ``max_length``; those left without target tokens are dropped."""
    whole = [read_example(i, example, lm.tokenizer) for i, example in enumerate(examples)]
    cut = [Example(ids[:max_length], learnt[:max_length]) for ids, learnt in whole]
    kept = [example for example in cut if any(example.learnt)]
    if not kept:
        raise ValueError(
            f"none of the {len(whole)} {name} has a token to learn among its first {max_length}: give more, "
            "shorten the prompts, or raise max_length"
        )
    shortened = sum(len(example.ids) > max_length for example in whole)
    if shortened or len(kept) < len(cut):
        warnings.warn(
            f"of {len(whole)} {name} {shortened} are longer than max_length={max_length} and lost their end; "
            f"{len(cut) - len(kept)} were left out, for nothing in them was left to learn",
            stacklevel=3,
        )
    return kept


def _epoch(
    lm: LanguageModel, examples: list[Example], config: SFTConfig, descent: CosineOptimizer, generator: torch.Generator
) -> dict[str, float]:
    """Train for one epoch; returns the mean loss per token and the mean gradient norm."""
    losses, norms, count = [], [], 0
    with dropout_on(lm.model, seed=int(torch.randint(2**31, (), generator=generator))):
        for batch in _batches(examples, config, generator):
            losses.append(_add_gradient(lm, batch, config))
            norms.append(descent.step())
            count += sum(sum(example.learnt) for example in batch)
    return {
        "sft/loss": torch.stack(losses).sum().item() / count,
        "sft/grad_norm": torch.stack(norms).mean().item(),
    }


def _batches(examples: list[Example], config: SFTConfig, generator: torch.Generator) -> Iterator[list[Example]]:
    """Yield batches in random order; unpacked examples are grouped by similar length, to reduce padding."""
    if config.packing:
        order = torch.randperm(len(examples), generator=generator)
        batches = [batch.tolist() for batch in order.split(config.batch_size)]
    else:
        lengths = [len(example.ids) for example in examples]
        batches = length_buckets(lengths, size=config.batch_size, generator=generator)
    for batch in batches:
        yield [examples[i] for i in batch]


def _add_gradient(lm: LanguageModel, batch: list[Example], config: SFTConfig) -> Tensor:
    """Accumulate the gradient of the mean loss over a batch's target tokens; returns the summed loss."""
    count = sum(sum(example.learnt) for example in batch)
    total = torch.zeros((), device=lm.device)
    for rows in _rows(lm, batch, config):
        loss = -learnt_log_probs(lm, rows).sum()
        (loss / count).backward()
        total += loss.detach()
    return total


@torch.no_grad()
def _measure(lm: LanguageModel, examples: list[Example], config: SFTConfig) -> dict[str, float]:
    in_order = sorted(examples, key=lambda example: len(example.ids))
    batches = [in_order[i : i + config.batch_size] for i in range(0, len(in_order), config.batch_size)]
    log_probs = [learnt_log_probs(lm, rows) for batch in batches for rows in _rows(lm, batch, config)]
    loss = -torch.cat(log_probs).double().mean().item()
    return {"held_out/loss": loss, "held_out/perplexity": math.exp(loss)}


def _rows(lm: LanguageModel, batch: list[Example], config: SFTConfig) -> Iterator[TokenRows]:
    """Yield a batch as tensors, ``micro_batch_size`` rows at a time."""
    rows = pack(batch, max_length=cast(int, config.max_length)) if config.packing else [[example] for example in batch]
    size = config.micro_batch_size or len(rows)
    for start in range(0, len(rows), size):
        yield token_rows(rows[start : start + size], lm=lm)
