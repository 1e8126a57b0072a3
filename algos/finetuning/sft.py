"""Supervised fine-tuning (SFT) of a language model on examples, the usual starting point of PPO."""

import math
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import SupportsIndex

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
from textenv.prompts.prompts import rows_by_position

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
    examples: Sequence[object],
    config: SFTConfig | None = None,
    *,
    held_out: Sequence[object] | None = None,
    run_dir: str | Path | None = None,
    progress: bool = False,
    loggers: Sequence[str | Logger] = (),
    overwrite: bool = False,
) -> list[dict[str, float]]:
    """Fine-tune a language model in place on examples, by the mean cross-entropy of the target tokens.

    Dropout is on during training only, at the rates of the model's config. Logits are divided by the model's
    temperature.

    Args:
        model: model to train; only parameters that require a gradient are trained (with LoRA, the adapter).
        examples: texts, ``{"prompt", "completion"}`` or ``{"messages"}``, also in a Series or data frame; see
            `algos.finetuning.packing.read_examples`. Targets of a text are all tokens after the first. Otherwise they
            are the answers and the token that ends each; in a chat, as the chat template writes them.
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
        ValueError: if an example has another form, or is a text for an encoder-decoder; there are no target tokens,
            ``max_length`` exceeds the model's context length, or the model does not support packing.
        FileExistsError: if ``run_dir`` holds a run and ``overwrite`` is False.
        BlockingIOError: if another process trains in ``run_dir``.

    Example:
        >>> policy = LMPolicy.load("gpt2")  # doctest: +SKIP
        >>> sft(policy, [{"prompt": "2 + 2 =", "completion": " 4"}])  # doctest: +SKIP
    """
    if config is None:
        config = SFTConfig()
    lm = model.lm if isinstance(model, LMPolicy) else model
    if not isinstance(lm, LanguageModel):
        raise TypeError(
            f"model is a {type(model).__name__}, expected textenv.LanguageModel(model, tokenizer) or an algos.LMPolicy"
        )

    # Examples, cut to the maximum length
    max_length = config.max_length or min(DEFAULT_MAX_LENGTH, lm.context or DEFAULT_MAX_LENGTH)
    check_context(lm, max_length)
    config = replace(config, max_length=max_length)
    training_examples = _read_all(examples, lm, max_length, "examples")
    held_out_examples = None
    if held_out is not None:
        held_out_examples = _read_all(held_out, lm, max_length, "held_out")
    if config.packing:
        check_packing(lm)

    # Optimizer and loggers
    generator = torch.Generator().manual_seed(config.seed)
    steps_per_epoch = math.ceil(len(training_examples) / config.batch_size)
    optimizer = CosineOptimizer(lm.parameters(), config, steps=config.num_epochs * steps_per_epoch)
    targets_per_epoch = _num_targets(training_examples)
    start = time.perf_counter()
    outputs = make_loggers(loggers)
    if progress:
        outputs.append(LiveView(config.num_epochs * targets_per_epoch))
    run_config = {"algorithm": "SFT", "environment": None} | asdict(config)

    # Epochs: train, measure, log
    history: list[dict[str, float]] = []
    with (
        lock_run_folder(run_dir, overwrite=overwrite),
        Logs(run_dir, outputs, config=run_config, history=history) as logs,
    ):
        for epoch in range(1, config.num_epochs + 1):
            targets_so_far = epoch * targets_per_epoch
            metrics: dict[str, float] = {"steps": targets_so_far, "epoch": epoch}
            metrics |= _train_epoch(lm, training_examples, config, optimizer, generator)
            if held_out_examples is not None:
                metrics |= _measure(lm, held_out_examples, config)
            seconds = time.perf_counter() - start
            metrics["time/seconds"] = seconds
            metrics["time/steps_per_second"] = targets_so_far / seconds
            logs.write(metrics, step=targets_so_far, iteration=epoch)
            history.append(metrics)
    return history


def check_context(lm: LanguageModel, max_length: int) -> None:
    """Raise a ValueError if ``max_length`` exceeds the model's context length."""
    if lm.context is not None and max_length > lm.context:
        raise ValueError(f"max_length is {max_length}, but the model's context is {lm.context} tokens: lower it")


def _read_all(examples: Sequence[object], lm: LanguageModel, max_length: int, name: str) -> list[Example]:
    """Read the examples, truncate them to ``max_length``, and drop those without target tokens.

    Raises:
        ValueError: if rows cannot be read (it says how many), or no example has a target.
    """
    # Read all rows, to say how many are wrong
    rows = rows_by_position(examples, name)
    full_examples: list[Example] = []
    errors: list[ValueError] = []
    for index, row in enumerate(rows):
        try:
            if lm.seq2seq is not None and isinstance(row, str):
                raise ValueError(
                    f"example {index} is the text {row!r:.200}, but {type(lm.model).__name__} is an encoder-decoder, "
                    "which learns prompts with answers: give {'prompt': ..., 'completion': ...} (and packing=False)"
                )
            full_examples += read_examples(index, row, lm.tokenizer)
        except ValueError as error:
            errors.append(error)
    if errors:
        raise ValueError(f"{len(errors)} of {len(rows)} {name} cannot be learnt. The first: {errors[0]}") from errors[0]

    _warn_of_repeated_prompts(rows, name)

    # Truncate
    kept = []
    num_truncated = 0
    for example in full_examples:
        num_truncated += len(example.ids) > max_length
        truncated = Example(example.ids[:max_length], example.learnt[:max_length])
        if any(truncated.learnt):
            kept.append(truncated)
    num_dropped = len(full_examples) - len(kept)

    if not kept:
        raise ValueError(
            f"none of the {len(full_examples)} {name} has a target in its first {max_length} tokens: give more "
            "examples, shorten the prompts, or raise max_length"
        )
    if num_truncated or num_dropped:
        warnings.warn(
            f"of {len(full_examples)} {name}, {num_truncated} were longer than max_length={max_length} and were "
            f"truncated; {num_dropped} were dropped, because they have no target tokens left",
            stacklevel=3,
        )
    return kept


def _warn_of_repeated_prompts(rows: Sequence[object], name: str) -> None:
    """Warn if more than half of the rows with a prompt, as texts, repeat it at the beginning of the completion."""
    num_prompts = 0
    repeating = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            continue
        prompt = row.get("prompt")
        completion = row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str) and prompt.strip():
            num_prompts += 1
            if re.match(rf"\s*{re.escape(prompt.strip())}(?!\w)", completion):
                repeating.append(index)
    if 2 * len(repeating) > num_prompts:
        warnings.warn(
            f"{len(repeating)} of {num_prompts} completions in {name} begin with their prompts (the first is row "
            f"{repeating[0]}), so the model learns to write the prompt once more: unless this is what it should do, "
            "remove the prompts from the completions",
            stacklevel=4,
        )


def _train_epoch(
    lm: LanguageModel,
    examples: list[Example],
    config: SFTConfig,
    optimizer: CosineOptimizer,
    generator: torch.Generator,
) -> dict[str, float]:
    """Train for one epoch; returns the mean loss per token and the mean gradient norm."""
    dropout_seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))

    # Batches of indices; without packing, of examples of similar length
    batches: Sequence[Iterable[SupportsIndex]]
    if config.packing:
        order = torch.randperm(len(examples), generator=generator, device=generator.device)
        batches = order.split(config.batch_size)
    else:
        lengths = [len(example.ids) for example in examples]
        batches = length_buckets(lengths, size=config.batch_size, generator=generator)

    # A step for each batch
    batch_losses = []
    grad_norms = []
    with dropout_on(lm.model, seed=dropout_seed):
        for indices in batches:
            batch = [examples[i] for i in indices]
            batch_losses.append(_add_gradient(lm, batch, config))
            grad_norms.append(optimizer.step())
    loss = torch.stack(batch_losses).sum().item() / _num_targets(examples)
    return {"sft/loss": loss, "sft/grad_norm": torch.stack(grad_norms).mean().item()}


def _num_targets(examples: list[Example]) -> int:
    """Number of target tokens."""
    return sum(sum(example.learnt) for example in examples)


def _add_gradient(lm: LanguageModel, batch: list[Example], config: SFTConfig) -> Tensor:
    """Accumulate the gradient of the mean loss over a batch's target tokens; returns the summed loss."""
    count = _num_targets(batch)
    summed_loss = torch.zeros((), device=lm.device)
    for rows in _token_rows(lm, batch, config):
        loss = -learnt_log_probs(lm, rows).sum()
        (loss / count).backward()
        summed_loss += loss.detach()
    return summed_loss


@torch.no_grad()
def _measure(lm: LanguageModel, examples: list[Example], config: SFTConfig) -> dict[str, float]:
    """Loss in nats per token and perplexity of held-out examples."""
    by_length = sorted(examples, key=lambda example: len(example.ids))
    log_probs = []
    for start in range(0, len(by_length), config.batch_size):
        batch = by_length[start : start + config.batch_size]
        for rows in _token_rows(lm, batch, config):
            log_probs.append(learnt_log_probs(lm, rows))
    loss = -torch.cat(log_probs).double().mean().item()
    return {"held_out/loss": loss, "held_out/perplexity": math.exp(loss)}


def _token_rows(lm: LanguageModel, batch: list[Example], config: SFTConfig) -> Iterator[TokenRows]:
    """Yield a batch as tensors, ``micro_batch_size`` rows at a time."""
    if config.packing:
        assert config.max_length is not None
        rows = pack(batch, max_length=config.max_length)
    else:
        rows = [[example] for example in batch]
    size = config.micro_batch_size or len(rows)
    for start in range(0, len(rows), size):
        yield token_rows(rows[start : start + size], lm=lm)
