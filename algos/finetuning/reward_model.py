"""Reward-model training: a sequence classifier with one output is trained on human scores or preferences."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from algos.config import NotNegative, Positive, UnitInterval
from algos.finetuning.optimizer import CosineOptimizer, SupervisedConfig, dropout_on, length_buckets
from algos.finetuning.reward_data import Kind, RewardRow, RewardRows, read_reward_rows
from textenv.rewards.reward_model import RewardModel

SUREST = 0.99
"""Maximum probability: for the log-likelihood of 0-1 data, predictions are clipped to [1 - SUREST, SUREST]."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(SupervisedConfig):
    """Hyper-parameters of reward-model training; after more than a few epochs, predicted preferences are overconfident.

    Batches hold rows of similar length.
    """

    learning_rate: Positive = 2e-5
    weight_decay: NotNegative = 0.1
    held_out_fraction: UnitInterval = 0.1
    """Fraction of the prompts held out for evaluation, if no held-out rows are given."""


@dataclass(frozen=True, kw_only=True)
class RewardModelReport:
    """Training history of a reward model, and its metrics on held-out rows."""

    kind: Kind
    """``"scores"`` (regression) or ``"pairs"`` (Bradley-Terry)."""
    rows: int
    """Number of training rows."""
    held_out_rows: int
    """Number of held-out rows."""
    skipped: int
    """Number of rows without a judgement."""
    accuracy: float | None = None
    """Fraction of pairs ranked correctly; for scores of 0 and 1, fraction on the right side of 0.5; otherwise None."""
    mean_squared_error: float | None = None
    """Mean squared error of predicted scores; None for pairs."""
    spearman: float | None = None
    """Rank correlation of predicted and given scores; None for pairs."""
    log_likelihood: float | None = None
    """Mean log-probability of the judgements, nats; None for scores other than 0 and 1."""
    calibration_error: float | None = None
    """`expected_calibration_error` of the probabilities; None for scores other than 0 and 1."""
    history: list[dict[str, float]]
    """For each epoch ``steps`` (rows so far), ``reward/loss`` and ``time/seconds``."""


def train_reward_model(
    model: RewardModel,
    data: Sequence[Mapping[str, Any]],
    config: RewardModelConfig | None = None,
    *,
    held_out: Sequence[Mapping[str, Any]] | None = None,
) -> RewardModelReport:
    """Train a reward model in place: least squares on scores, Bradley-Terry on pairs.

    Texts are encoded as for scoring (`RewardModel.encode`) and end with EOS as a policy's answers do, so the trained
    model can be used as a reward function directly.

    Args:
        model: reward model around a sequence classifier with one output (``num_labels=1``). Only parameters that
            require a gradient are trained; dropout is on during training, as the model's config says.
        data: see `algos.finetuning.reward_data.read_reward_rows`.
        config: hyper-parameters.
        held_out: rows for evaluation. Without them a fraction of the prompts is held out, by a hash of their content,
            so no prompt is in both parts (for rows without a prompt, no answer).

    Raises:
        ValueError: if the model has several outputs, a row has another form, a prompt is in both ``data`` and
            ``held_out``, or no training or held-out rows are left.

    Example:
        >>> judge = RewardModel(classifier, tokenizer)  # doctest: +SKIP
        >>> report = train_reward_model(judge, FeedbackFile("runs/thumbs.jsonl").scored())  # doctest: +SKIP
    """
    config = RewardModelConfig() if config is None else config
    if model.index is not None:
        raise ValueError(
            f"the model has {model.model.config.num_labels} outputs, expected one (the reward): make it with "
            "num_labels=1"
        )
    model.model.config.trained_with_eos = True
    rows = read_reward_rows(data, model)
    given = None if held_out is None else read_reward_rows(held_out, model)
    training, measured = _split(rows, given, config)
    history = _fit(model, training, config, rows.kind)
    rewards = [model.score_rows(list(ids)) for ids in zip(*(row.ids for row in measured), strict=True)]
    if rows.kind == "pairs":
        metrics = _pair_metrics(rewards[0] - rewards[1])
    else:
        metrics = _score_metrics(rewards[0], torch.tensor([row.target for row in measured], device="cpu"))
    return RewardModelReport(
        kind=rows.kind,
        rows=len(training),
        held_out_rows=len(measured),
        skipped=rows.skipped + (0 if given is None else given.skipped),
        history=history,
        **metrics,
    )


def bradley_terry_loss(*, chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """Loss per pair, -log σ(r_chosen - r_rejected - margin) (Touvron et al. 2023, eq. 2): float32 ``[n]``, nats.

    Args:
        chosen: rewards of the chosen answers, ``[n]``.
        rejected: rewards of the rejected answers, ``[n]``.
        margin: required difference of the two rewards, ``[n]``; 0 gives Bradley and Terry 1952.

    Raises:
        ValueError: if the shapes differ.
    """
    if not chosen.shape == rejected.shape == margin.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (chosen, rejected, margin))
        raise ValueError(f"chosen, rejected and margin have shapes {shapes}, expected equal ones")
    return -logsigmoid(chosen - rejected - margin)


def _split(
    data: RewardRows, given: RewardRows | None, config: RewardModelConfig
) -> tuple[list[RewardRow], list[RewardRow]]:
    """Training rows and held-out rows."""
    if given is None:
        chosen = [row.key < config.held_out_fraction * 2**64 for row in data.rows]
        measured = [row for row, out in zip(data.rows, chosen, strict=True) if out]
        training = [row for row, out in zip(data.rows, chosen, strict=True) if not out]
    else:
        training, measured = data.rows, given.rows
        if given.kind != data.kind:
            raise ValueError(f"data holds {data.kind}, but held_out holds {given.kind}: give the same kind")
        both = {row.key for row in training} & {row.key for row in measured}
        if both:
            raise ValueError(
                f"{len(both)} prompts are in both data and held_out: remove them from one, or omit held_out to hold "
                "out a fraction of data"
            )
    if not training or not measured:
        raise ValueError(
            f"{len(training)} training rows and {len(measured)} held-out rows are left, expected at least one of each: "
            "give more rows, held_out, or another held_out_fraction"
        )
    return training, measured


def _fit(model: RewardModel, rows: list[RewardRow], config: RewardModelConfig, kind: Kind) -> list[dict[str, float]]:
    generator = torch.Generator().manual_seed(config.seed)
    steps = config.num_epochs * -(-len(rows) // config.batch_size)
    optimizer = CosineOptimizer(model.model.parameters(), config, steps=steps)
    lengths, start = [max(map(len, row.ids)) for row in rows], time.perf_counter()
    history: list[dict[str, float]] = []
    for epoch in range(1, config.num_epochs + 1):
        total = 0.0
        with dropout_on(model.model, seed=int(torch.randint(2**31, (), generator=generator, device=generator.device))):
            for batch in length_buckets(lengths, size=config.batch_size, generator=generator):
                losses = _losses(model, [rows[i] for i in batch], kind)
                losses.mean().backward()
                optimizer.step()
                total += losses.sum().item()
        seconds = time.perf_counter() - start
        history.append(
            {"steps": epoch * len(rows), "epoch": epoch, "reward/loss": total / len(rows), "time/seconds": seconds}
        )
    return history


def _losses(model: RewardModel, rows: list[RewardRow], kind: Kind) -> Tensor:
    """Loss of each row, differentiable: float32 ``[n]``."""
    target = torch.tensor([row.target for row in rows], device=model.model.device)
    rewards = [model.logits([row.ids[i] for row in rows])[:, 0] for i in range(len(rows[0].ids))]
    if kind == "pairs":
        return bradley_terry_loss(chosen=rewards[0], rejected=rewards[1], margin=target)
    return (rewards[0] - target).square()


def _pair_metrics(difference: Tensor) -> dict[str, float]:
    """Metrics from reward differences, chosen minus rejected, ``[n]``."""
    right, sure = difference > 0, difference.abs().sigmoid()
    return {
        "accuracy": right.double().mean().item(),
        "log_likelihood": logsigmoid(difference).double().mean().item(),
        "calibration_error": expected_calibration_error(probability=sure, outcome=right),
    }


def _score_metrics(predicted: Tensor, score: Tensor) -> dict[str, float]:
    squared = (predicted - score).double().square().mean().item()
    metrics = {"mean_squared_error": squared, "spearman": spearman(predicted=predicted, actual=score)}
    up = score == 1
    if not (up | (score == 0)).all():
        return metrics
    likely = predicted.clamp(0, 1)
    of_what_was = torch.where(up, likely, 1 - likely).clamp(1 - SUREST, SUREST)
    return metrics | {
        "accuracy": ((likely >= 0.5) == up).double().mean().item(),
        "log_likelihood": of_what_was.double().log().mean().item(),
        "calibration_error": expected_calibration_error(probability=likely, outcome=up),
    }


BINS = 10
"""Number of equal-width probability bins from 0 to 1."""


def expected_calibration_error(*, probability: Tensor, outcome: Tensor) -> float:
    """Mean gap between predicted probability and observed frequency, over `BINS` bins (Guo et al. 2017, eq. 3).

    Args:
        probability: predicted probability, ``[n]``, from 0 to 1.
        outcome: observed outcome, 1 or 0 (bool), ``[n]``.

    Raises:
        ValueError: if the shapes differ, there are no entries, or a probability is not in [0, 1].

    Example:
        >>> said, came = torch.tensor([0.9, 0.9, 0.1]), torch.tensor([1.0, 0.0, 0.0])
        >>> round(expected_calibration_error(probability=said, outcome=came), 3)
        0.3
    """
    _check(probability=probability, outcome=outcome)
    if not ((probability >= 0) & (probability <= 1)).all():
        raise ValueError(f"probability holds {probability.min():.3g} to {probability.max():.3g}, expected 0 to 1")
    inside = (probability * BINS).long().clamp(max=BINS - 1)
    gap = (probability - outcome.to(probability.dtype)).double()
    # In each bin, |sum of gaps| is the bin's size times the difference of its two means.
    return (gap.new_zeros(BINS).index_add(0, inside, gap).abs().sum() / len(gap)).item()


def spearman(*, predicted: Tensor, actual: Tensor) -> float:
    """Rank correlation with averaged ranks for ties (Spearman 1904); 0 if one side is constant.

    Raises:
        ValueError: if the shapes differ or there are no entries.

    Example:
        >>> spearman(predicted=torch.tensor([0.1, 0.5, 0.2]), actual=torch.tensor([1.0, 3.0, 2.0]))
        1.0
    """
    _check(predicted=predicted, actual=actual)
    one, two = (ranks - ranks.mean() for ranks in (_ranks(predicted), _ranks(actual)))
    scale = (one.square().sum() * two.square().sum()).sqrt()
    return ((one * two).sum() / scale).item() if scale > 0 else 0.0


def _ranks(x: Tensor) -> Tensor:
    """Ranks from 1, averaged over ties: float64 ``[n]``."""
    _, place, count = x.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[place]


def _check(**columns: Tensor) -> None:
    (one, x), (two, y) = columns.items()
    if x.shape != y.shape or x.dim() != 1 or not len(x):
        raise ValueError(f"{one} has shape {tuple(x.shape)} and {two} {tuple(y.shape)}, expected [n] of both, n > 0")
