"""Reward-model training: a sequence classifier with one output is trained on human scores or preferences."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from algos.config import NotNegative, Positive, UnitInterval
from algos.finetuning.optimizer import CosineOptimizer, SupervisedConfig, dropout_on, length_buckets
from algos.finetuning.reward_data import Kind, RewardRow, RewardRows, read_reward_rows
from textenv.rewards.reward_model import RewardModel

MAX_PROBABILITY = 0.99
"""For the log-likelihood of scores of 0 and 1, predictions are clipped to [1 - MAX_PROBABILITY, MAX_PROBABILITY]."""

CALIBRATION_BINS = 10
"""Number of probability bins of equal width, from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(SupervisedConfig):
    """Hyper-parameters of reward-model training.

    After more than a few epochs, predicted preferences are overconfident. Batches hold rows of similar length.
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
    """Fraction of pairs ranked correctly, or of scores of 0 and 1 on the right side of 0.5; None for other scores."""
    mean_squared_error: float | None = None
    """Mean squared error of predicted scores; None for pairs."""
    spearman: float | None = None
    """Rank correlation of predicted and given scores; None for pairs."""
    log_likelihood: float | None = None
    """Mean log-probability of the judgements, nats; None for scores other than 0 and 1."""
    calibration_error: float | None = None
    """`expected_calibration_error` of the probabilities; None for scores other than 0 and 1."""
    history: list[dict[str, float]]
    """For each epoch: ``steps`` (rows so far), ``epoch``, ``reward/loss`` and ``time/seconds``."""


def train_reward_model(
    model: RewardModel,
    data: Sequence[Mapping[str, object]],
    config: RewardModelConfig | None = None,
    *,
    held_out: Sequence[Mapping[str, object]] | None = None,
) -> RewardModelReport:
    """Train a reward model in place: least squares on scores, Bradley-Terry on pairs.

    Texts are encoded as for scoring (`RewardModel.encode`) and end with EOS as a policy's answers do, so the trained
    model can be used as a reward function directly.

    Args:
        model: reward model around a sequence classifier with one output (``num_labels=1``). Only parameters that
            require a gradient are trained; dropout is on during training, as the model's config says.
        data: see `algos.finetuning.reward_data.read_reward_rows`.
        config: hyper-parameters.
        held_out: rows for evaluation. None: a fraction of the prompts is held out, chosen by a hash of their content,
            so that no prompt is in both parts (for rows without a prompt: no answer).

    Raises:
        ValueError: if the model has several outputs, a row has another form, a prompt is in both ``data`` and
            ``held_out``, or no training or held-out rows are left.

    Example:
        >>> judge = RewardModel(classifier, tokenizer)  # doctest: +SKIP
        >>> report = train_reward_model(judge, FeedbackFile("runs/thumbs.jsonl").scored())  # doctest: +SKIP
    """
    if config is None:
        config = RewardModelConfig()
    if model.index is not None:
        raise ValueError(
            f"the model has {model.model.config.num_labels} outputs, expected one (the reward): make it with "
            "num_labels=1"
        )
    model.model.config.trained_with_eos = True

    # Rows
    data_rows = read_reward_rows(data, model)
    skipped = data_rows.skipped
    held_out_data = None
    if held_out is not None:
        held_out_data = read_reward_rows(held_out, model)
        skipped += held_out_data.skipped
    training_rows, held_out_rows = _split(data_rows, held_out_data, config)

    # Training
    history = _fit(model, training_rows, config, data_rows.kind)

    # Metrics
    if data_rows.kind == "pairs":
        chosen = model.score_rows([row.ids[0] for row in held_out_rows])
        rejected = model.score_rows([row.ids[1] for row in held_out_rows])
        metrics = _pair_metrics(chosen - rejected)
    else:
        predicted = model.score_rows([row.ids[0] for row in held_out_rows])
        scores = torch.tensor([row.target for row in held_out_rows], device="cpu")
        metrics = _score_metrics(predicted, scores)
    return RewardModelReport(
        kind=data_rows.kind,
        rows=len(training_rows),
        held_out_rows=len(held_out_rows),
        skipped=skipped,
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
    data: RewardRows, held_out: RewardRows | None, config: RewardModelConfig
) -> tuple[list[RewardRow], list[RewardRow]]:
    """Training rows and held-out rows; without the latter, a fraction of the data is held out."""
    if held_out is None:
        # A key is a hash of the prompt, below 2^64
        limit = config.held_out_fraction * 2**64
        training_rows = [row for row in data.rows if row.key >= limit]
        held_out_rows = [row for row in data.rows if row.key < limit]
    else:
        training_rows = data.rows
        held_out_rows = held_out.rows
        if held_out.kind != data.kind:
            raise ValueError(f"data holds {data.kind}, but held_out holds {held_out.kind}: give the same kind")
        shared_keys = {row.key for row in training_rows} & {row.key for row in held_out_rows}
        if shared_keys:
            raise ValueError(
                f"{len(shared_keys)} prompts are in both data and held_out: remove them from one, or omit held_out to "
                "hold out a fraction of data"
            )
    if not training_rows or not held_out_rows:
        raise ValueError(
            f"{len(training_rows)} training rows and {len(held_out_rows)} held-out rows are left, expected at least "
            "one of each: give more rows, held_out, or another held_out_fraction"
        )
    return training_rows, held_out_rows


def _fit(model: RewardModel, rows: list[RewardRow], config: RewardModelConfig, kind: Kind) -> list[dict[str, float]]:
    """Train on rows; returns the metrics of each epoch."""
    generator = torch.Generator().manual_seed(config.seed)
    steps_per_epoch = math.ceil(len(rows) / config.batch_size)
    optimizer = CosineOptimizer(model.model.parameters(), config, steps=config.num_epochs * steps_per_epoch)
    lengths = [max(map(len, row.ids)) for row in rows]  # of the longer answer of a pair
    start = time.perf_counter()
    history: list[dict[str, float]] = []
    for epoch in range(1, config.num_epochs + 1):
        # A step for each batch
        summed_loss = 0.0
        dropout_seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        with dropout_on(model.model, seed=dropout_seed):
            for indices in length_buckets(lengths, size=config.batch_size, generator=generator):
                batch = [rows[i] for i in indices]
                losses = _losses(model, batch, kind)
                losses.mean().backward()
                optimizer.step()
                summed_loss += losses.sum().item()

        history.append(
            {
                "steps": epoch * len(rows),
                "epoch": epoch,
                "reward/loss": summed_loss / len(rows),
                "time/seconds": time.perf_counter() - start,
            }
        )
    return history


def _losses(model: RewardModel, rows: list[RewardRow], kind: Kind) -> Tensor:
    """Loss of each row, differentiable: float32 ``[n]``."""
    target = torch.tensor([row.target for row in rows], device=model.model.device)
    if kind == "pairs":
        chosen = model.logits([row.ids[0] for row in rows])[:, 0]
        rejected = model.logits([row.ids[1] for row in rows])[:, 0]
        return bradley_terry_loss(chosen=chosen, rejected=rejected, margin=target)
    predicted = model.logits([row.ids[0] for row in rows])[:, 0]
    return (predicted - target).square()


def _pair_metrics(difference: Tensor) -> dict[str, float]:
    """Metrics from reward differences, chosen minus rejected, ``[n]``."""
    correct = difference > 0
    probability = difference.abs().sigmoid()  # of the answer with the higher reward
    return {
        "accuracy": correct.double().mean().item(),
        "log_likelihood": logsigmoid(difference).double().mean().item(),
        "calibration_error": expected_calibration_error(probability=probability, outcome=correct),
    }


def _score_metrics(predicted: Tensor, score: Tensor) -> dict[str, float]:
    """Metrics from predicted and given scores, ``[n]``."""
    squared_error = (predicted - score).double().square()
    metrics = {
        "mean_squared_error": squared_error.mean().item(),
        "spearman": spearman(predicted=predicted, actual=score),
    }

    # Scores of 0 and 1: a prediction is the probability of a 1
    is_one = score == 1
    is_zero = score == 0
    if not (is_one | is_zero).all():
        return metrics
    probability = predicted.clamp(0, 1)
    likelihood = torch.where(is_one, probability, 1 - probability).clamp(1 - MAX_PROBABILITY, MAX_PROBABILITY)
    metrics["accuracy"] = ((probability >= 0.5) == is_one).double().mean().item()
    metrics["log_likelihood"] = likelihood.double().log().mean().item()
    metrics["calibration_error"] = expected_calibration_error(probability=probability, outcome=is_one)
    return metrics


def expected_calibration_error(*, probability: Tensor, outcome: Tensor) -> float:
    """Mean gap between predicted probability and observed frequency (Guo et al. 2017, eq. 3).

    Probabilities are grouped into `CALIBRATION_BINS` bins.

    Args:
        probability: predicted probability, ``[n]``, from 0 to 1.
        outcome: observed outcome, 1 or 0 (bool), ``[n]``.

    Raises:
        ValueError: if the shapes differ, there are no entries, or a probability is not in [0, 1].

    Example:
        >>> probability = torch.tensor([0.9, 0.9, 0.1])
        >>> outcome = torch.tensor([1.0, 0.0, 0.0])
        >>> round(expected_calibration_error(probability=probability, outcome=outcome), 3)
        0.3
    """
    _check_columns(probability=probability, outcome=outcome)
    if not ((probability >= 0) & (probability <= 1)).all():
        raise ValueError(f"probability holds {probability.min():.3g} to {probability.max():.3g}, expected 0 to 1")
    bin_index = (probability * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    gap = (probability - outcome.to(probability.dtype)).double()
    # In each bin, |sum of gaps| is the bin's size times the difference of its two means.
    gap_by_bin = gap.new_zeros(CALIBRATION_BINS).index_add(0, bin_index, gap)
    return (gap_by_bin.abs().sum() / len(gap)).item()


def spearman(*, predicted: Tensor, actual: Tensor) -> float:
    """Rank correlation with averaged ranks for ties (Spearman 1904); 0 if one side is constant.

    Raises:
        ValueError: if the shapes differ or there are no entries.

    Example:
        >>> spearman(predicted=torch.tensor([0.1, 0.5, 0.2]), actual=torch.tensor([1.0, 3.0, 2.0]))
        1.0
    """
    _check_columns(predicted=predicted, actual=actual)
    predicted_ranks = _ranks(predicted)
    actual_ranks = _ranks(actual)
    x = predicted_ranks - predicted_ranks.mean()
    y = actual_ranks - actual_ranks.mean()
    scale = (x.square().sum() * y.square().sum()).sqrt()
    if scale > 0:
        return ((x * y).sum() / scale).item()
    return 0.0


def _ranks(x: Tensor) -> Tensor:
    """Ranks from 1, averaged over ties: float64 ``[n]``."""
    _, value_index, count = x.unique(return_inverse=True, return_counts=True)
    last_rank = count.cumsum(0).double()
    mean_rank = last_rank - (count - 1) / 2
    return mean_rank[value_index]


def _check_columns(**columns: Tensor) -> None:
    """Raise a ValueError unless two columns, given by name, have the same shape ``[n]``, with n > 0."""
    (x_name, x), (y_name, y) = columns.items()
    if x.shape != y.shape or x.dim() != 1 or not len(x):
        raise ValueError(
            f"{x_name} has shape {tuple(x.shape)} and {y_name} {tuple(y.shape)}, expected [n] of both, n > 0"
        )
