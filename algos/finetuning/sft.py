"""Supervised fine-tuning (SFT) of a language model on examples, the usual starting point of PPO."""

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from algos.config import Count
from algos.finetuning.optimizer import CosineOptimizer, SupervisedConfig, dropout_on, length_buckets
from algos.finetuning.packing import (
    Example,
    TokenRows,
    check_packing,
    learnt_log_probs,
    pack,
    read_examples,
    token_rows,
)
from algos.policies.lm import LMPolicy
from algos.storage.run_folder import lock_run_folder
from algos.training.live_view import LiveView
from algos.training.loggers import Logger, Logs, make_loggers
from textenv.lm.model import LanguageModel
from textenv.prompts.prompts import by_position

DEFAULT_MAX_LENGTH = 1024
"""Upper limit of the default ``max_length``, tokens; the context of some models is too long for memory."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Hyper-parameters of supervised fine-tuning; ``batch_size`` counts examples, with packing too."""

    micro_batch_size: Count | None = None
    """Rows evaluated at a time, to save memory; the gradient is the same. None: all rows of the step."""
    max_length: Count | None = None
    """Maximum tokens per row; longer examples are truncated. None: the context length, at most `DEFAULT_MAX_LENGTH`."""
    packing: bool = True
    """Pack several examples into a row, with no attention between them; False: one example per row."""


def sft(
    model: LanguageModel | LMPolicy,
    examples: Sequence[Any],
    config: SFTConfig | None = None,
    *,
    held_out: Sequence[Any] | None = None,
    run_dir: str | Path | None = None,
    progress: bool = False,
    loggers: Sequence[str | Logger] = (),
    overwrite: bool = False,
) -> list[dict[str, float]]:
    """Fine-tune a language model in place on examples: mean cross-entropy over the target tokens.

    Dropout is on during training only, at the model config's rates. Logits are divided by the model's temperature.

    Args:
        model: model to train; only parameters that require a gradient are trained (with LoRA, the adapter).
        examples: texts, ``{"prompt", "completion"}`` or ``{"messages"}``, also in a Series or data frame; see
            `algos.finetuning.packing.read_examples`. Targets are all tokens of a text after the first; otherwise,
            answers and the token that ends each: of a chat, as its template writes them.
        config: hyper-parameters.
        held_out: examples to evaluate after each epoch.
        run_dir: folder for ``metrics.jsonl``.
        progress: show the training in the terminal.
        loggers: further loggers, as in ``agent.learn``.
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
    lm = model.lm if isinstance(model, LMPolicy) else model
    if not isinstance(lm, LanguageModel):
        raise TypeError(
            f"model is a {type(model).__name__}, expected textenv.LanguageModel(model, tokenizer) or an algos.LMPolicy"
        )
    max_length = config.max_length or min(DEFAULT_MAX_LENGTH, lm.context or DEFAULT_MAX_LENGTH)
    check_context(lm, max_length)
    config = replace(config, max_length=max_length)
    training = _read_all(examples, lm, max_length, "examples")
    measured = None if held_out is None else _read_all(held_out, lm, max_length, "held_out")
    if config.packing:
        check_packing(lm)
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = CosineOptimizer(
        lm.parameters(), config, steps=config.num_epochs * -(-len(training) // config.batch_size)
    )
    history: list[dict[str, float]] = []
    tokens, start = _num_targets(training), time.perf_counter()
    shown = make_loggers(loggers) + ([LiveView(config.num_epochs * tokens)] if progress else [])
    described = {"algorithm": "SFT", "environment": None} | asdict(config)
    with lock_run_folder(run_dir, overwrite=overwrite), Logs(run_dir, shown, config=described, before=history) as logs:
        for epoch in range(1, config.num_epochs + 1):
            metrics = {"steps": epoch * tokens, "epoch": epoch} | _epoch(lm, training, config, optimizer, generator)
            if measured is not None:
                metrics |= _measure(lm, measured, config)
            seconds = time.perf_counter() - start
            metrics |= {"time/seconds": seconds, "time/steps_per_second": epoch * tokens / seconds}
            logs.write(metrics, step=epoch * tokens, iteration=epoch)
            history.append(metrics)
    return history


def check_context(lm: LanguageModel, max_length: int) -> None:
    """Raise a ValueError if ``max_length`` exceeds the model's context length."""
    if lm.context is not None and max_length > lm.context:
        raise ValueError(f"max_length is {max_length}, but the model's context is {lm.context} tokens: lower it")


def _read_all(examples: Sequence[Any], lm: LanguageModel, max_length: int, name: str) -> list[Example]:
    """Read the examples, truncated to ``max_length``; those left without target tokens are dropped.

    Raises:
        ValueError: if a row cannot be read, with the number of such rows, or no example has a target.
    """
    rows = by_position(examples)
    whole: list[Example] = []
    refused: list[ValueError] = []
    for index, row in enumerate(rows):
        try:
            whole += read_examples(index, row, lm.tokenizer)
        except ValueError as error:
            refused.append(error)
    if refused:
        raise ValueError(
            f"{len(refused)} of {len(rows)} {name} cannot be learnt. The first: {refused[0]}"
        ) from refused[0]
    cut = [Example(ids[:max_length], learnt[:max_length]) for ids, learnt in whole]
    kept = [example for example in cut if any(example.learnt)]
    if not kept:
        raise ValueError(
            f"none of the {len(whole)} {name} has a target in its first {max_length} tokens: give more examples, "
            "shorten the prompts, or raise max_length"
        )
    shortened = sum(len(example.ids) > max_length for example in whole)
    if shortened or len(kept) < len(cut):
        warnings.warn(
            f"of {len(whole)} {name}, {shortened} were longer than max_length={max_length} and were truncated; "
            f"{len(cut) - len(kept)} were dropped, because they have no target tokens left",
            stacklevel=3,
        )
    return kept


def _epoch(
    lm: LanguageModel,
    examples: list[Example],
    config: SFTConfig,
    optimizer: CosineOptimizer,
    generator: torch.Generator,
) -> dict[str, float]:  # fmt: skip
    """Train for one epoch; returns the mean loss per token and the mean gradient norm."""
    losses, norms = [], []
    with dropout_on(lm.model, seed=int(torch.randint(2**31, (), generator=generator, device=generator.device))):
        if config.packing:
            order = torch.randperm(len(examples), generator=generator, device=generator.device)
            batches = order.split(config.batch_size)
        else:
            lengths = [len(example.ids) for example in examples]
            batches = length_buckets(lengths, size=config.batch_size, generator=generator)
        for batch in batches:
            losses.append(_add_gradient(lm, [examples[i] for i in batch], config))
            norms.append(optimizer.step())
    loss = torch.stack(losses).sum().item() / _num_targets(examples)
    return {"sft/loss": loss, "sft/grad_norm": torch.stack(norms).mean().item()}


def _num_targets(examples: list[Example]) -> int:
    return sum(sum(example.learnt) for example in examples)


def _add_gradient(lm: LanguageModel, batch: list[Example], config: SFTConfig) -> Tensor:
    """Accumulate the gradient of the mean loss over a batch's target tokens; returns the summed loss."""
    total, count = torch.zeros((), device=lm.device), _num_targets(batch)
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
