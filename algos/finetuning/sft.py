"""Supervised fine-tuning: a language model learns to write like examples. What PPO usually starts from."""

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
from algos.names import NamedFields
from algos.policies.lm import LMPolicy
from algos.training.logger import Logs
from algos.training.run_folder import hold
from textenv.lm.model import LanguageModel

LONGEST = 1024
"""Tokens in a row where nobody says; models may read many more than fit into memory."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(NamedFields):
    """Hyper-parameters of supervised fine-tuning."""

    num_epochs: int = 1
    """Passes over the examples."""
    batch_size: int = 32
    """Examples in an optimiser's step; packing does not change which."""
    micro_batch_size: int | None = None
    """Rows evaluated at a time, to save memory; the gradient is the same. None: all of the step's."""
    max_length: int | None = None
    """Tokens in a row at most; a longer example loses its end. None: what the model reads, `LONGEST` at most."""
    packing: bool = True
    """Put several examples into a row, where none sees another; False gives each a row of its own."""
    learning_rate: float = 5e-5
    """AdamW's step size at its highest; 1e-3 and more for small models from scratch."""
    warmup_ratio: float = 0.05
    """Share of the steps in which the step size rises; then it falls to 0 on a cosine."""
    weight_decay: float = 0.01
    """Of matrices, a step, times the step size."""
    max_grad_norm: float = 1.0
    """Longest gradient; a longer one is scaled down to it."""
    seed: int = 1
    """Of the order of the examples and of dropout."""

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
    """Train a language model, in place, to continue as the examples do: mean cross-entropy over the learnt tokens.

    Dropout is on while training, as the model's config says, and off before and after. The temperature is the
    model's own, here as everywhere.

    Args:
        model: what is trained: of its parameters those that require a gradient, so with LoRA the adapter alone.
        examples: texts, ``{"prompt", "completion"}`` or ``{"messages"}`` (see `algos.finetuning.packing`). In a text
            every token is learnt, otherwise only answers and their EOS.
        config: hyper-parameters.
        held_out: examples to measure after each epoch.
        run_dir: folder for ``metrics.jsonl`` and TensorBoard files.
        progress: show a progress bar.
        overwrite: remove the run that is in ``run_dir`` first; without it such a folder is refused.

    Returns:
        The metrics of every epoch: ``sft/loss`` in nats a token, and of ``held_out`` loss and perplexity;
        ``steps`` counts the tokens that were learnt so far.

    Raises:
        TypeError: if the model is neither a `LanguageModel` nor an `LMPolicy`.
        ValueError: on an example of another kind, if there is nothing to learn, if ``max_length`` is more than the
            model reads, or if it cannot pack.
        FileExistsError: if ``run_dir`` holds a run; BlockingIOError if another process trains in it.

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
    """Raise a ValueError if rows of this many tokens are longer than the model reads."""
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
    """The examples, cut to ``max_length``; those of which nothing is left to learn are left out."""
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
    """Every example once; the mean loss a token while learning, and the mean norm of the gradients."""
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
    """The examples in random order; unpacked ones in batches of about equal length, where little is padding."""
    if config.packing:
        order = torch.randperm(len(examples), generator=generator)
        batches = [batch.tolist() for batch in order.split(config.batch_size)]
    else:
        lengths = [len(example.ids) for example in examples]
        batches = length_buckets(lengths, size=config.batch_size, generator=generator)
    for batch in batches:
        yield [examples[i] for i in batch]


def _add_gradient(lm: LanguageModel, batch: list[Example], config: SFTConfig) -> Tensor:
    """Add the gradient of the mean loss over all of a batch's learnt tokens; returns the sum of the losses."""
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
    """A batch as tensors, ``micro_batch_size`` rows at a time."""
    rows = pack(batch, max_length=cast(int, config.max_length)) if config.packing else [[example] for example in batch]
    size = config.micro_batch_size or len(rows)
    for start in range(0, len(rows), size):
        yield token_rows(rows[start : start + size], lm=lm)
