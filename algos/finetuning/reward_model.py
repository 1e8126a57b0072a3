"""Training a reward model: a sequence classifier with one output learns people's scores, or their preferences."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from algos.config import check_range
from algos.finetuning.optimizer import CosineOptimizer, dropout_on, length_buckets
from algos.finetuning.reward_data import Kind, RewardRow, RewardRows, read_reward_rows
from algos.names import NamedFields
from textenv.rewards.reward_model import RewardModel

SUREST = 0.99
"""A score that is taken for a probability counts as no more than this, and no less than 1 - this."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(NamedFields):
    """Hyper-parameters of reward-model training."""

    num_epochs: int = 1
    """Passes over the rows; more than a few make preferences over-confident."""
    batch_size: int = 32
    """Scored answers, or pairs, in an optimiser's step; they are of about equal length."""
    learning_rate: float = 2e-5
    """AdamW's step size at its highest; about 1e-3 for small models from scratch."""
    warmup_ratio: float = 0.05
    """Share of the steps in which the step size rises; then it falls to 0 on a cosine."""
    weight_decay: float = 0.1
    """Of matrices, a step, times the step size."""
    max_grad_norm: float = 1.0
    """Longest gradient; a longer one is scaled down to it."""
    held_out_fraction: float = 0.1
    """Share of the prompts that are kept for measuring, where no held-out rows are given."""
    seed: int = 1
    """Of the order of the rows and of dropout."""

    def __post_init__(self) -> None:
        check_range(self, at_least_one=["num_epochs", "batch_size"], positive=["learning_rate", "max_grad_norm"])
        check_range(self, not_negative=["weight_decay", "seed"], unit_interval=["warmup_ratio", "held_out_fraction"])


@dataclass(frozen=True, kw_only=True)
class RewardReport:
    """How a reward model was trained, and how good it is on prompts that it was not trained on."""

    kind: Kind
    """``"scores"`` (regression) or ``"pairs"`` (Bradley-Terry)."""
    rows: int
    """Rows trained on."""
    held_out_rows: int
    """Rows measured on."""
    skipped: int
    """Rows without an answer."""
    accuracy: float | None
    """Share of pairs whose better answer gets more; of scores of 0 and 1, share on the right side of .5, else None."""
    mean_squared_error: float | None
    """Of scores; None of pairs."""
    spearman: float | None
    """Rank correlation of scores; None of pairs."""
    log_likelihood: float | None
    """Mean log-probability of what was answered, nats; None of other scores than 0 and 1."""
    calibration_error: float | None
    """Of that probability (`expected_calibration_error`); None likewise."""
    history: list[dict[str, float]]
    """Of each epoch ``steps`` (rows so far), ``reward/loss`` and ``time/seconds``."""


def train_reward_model(
    model: RewardModel,
    data: Sequence[Mapping[str, Any]],
    config: RewardModelConfig | None = None,
    *,
    held_out: Sequence[Mapping[str, Any]] | None = None,
) -> RewardReport:
    """Train a reward model in place: least squares on scores, Bradley-Terry on pairs.

    The texts become ids as they do when it pays (`RewardModel.encode`), closed by EOS as a policy closes them, so
    afterwards it is a reward function at once.

    Args:
        model: around a sequence classifier with one output (``num_labels=1``). Those of its parameters are trained
            that require a gradient; dropout is on meanwhile as its config says.
        data: see `algos.finetuning.reward_data.read_reward_rows`.
        config: hyper-parameters.
        held_out: rows to measure on. Without them a share of the prompts is held out, by a hash of their content, so
            that no prompt is on both sides (of rows without a prompt, no answer).

    Raises:
        ValueError: if the model has several outputs, a row is of another kind, a prompt stands in both data and
            ``held_out``, or nothing is left on one side.

    Example:
        >>> judge = RewardModel(classifier, tokenizer)  # doctest: +SKIP
        >>> report = train_reward_model(judge, FeedbackFile("runs/thumbs.jsonl").scored())  # doctest: +SKIP
    """
    config = RewardModelConfig() if config is None else config
    if model.index is not None:
        raise ValueError(
            f"the model has {model.model.config.num_labels} outputs, expected one, the reward: make it with "
            "num_labels=1"
        )
    model.model.config.trained_with_eos = True
    rows = read_reward_rows(data, model)
    given = None if held_out is None else read_reward_rows(held_out, model)
    training, measured = _split(rows, given, config)
    history = _train(model, training, config, rows.kind)
    return RewardReport(
        kind=rows.kind,
        rows=len(training),
        held_out_rows=len(measured),
        skipped=rows.skipped + (0 if given is None else given.skipped),
        history=history,
        **_figures(model, measured, rows.kind),
    )


def bradley_terry_loss(*, chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """-log σ(r_chosen - r_rejected - margin), a number a pair (Touvron et al. 2023, eq. 2): float32 ``[n]``, nats.

    Args:
        chosen: rewards of the better answers, ``[n]``.
        rejected: of the worse ones, ``[n]``.
        margin: by how much the first should exceed the second, ``[n]``; 0 is Bradley and Terry 1952.

    Raises:
        ValueError: if the shapes differ.
    """
    if not chosen.shape == rejected.shape == margin.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (chosen, rejected, margin))
        raise ValueError(f"chosen, rejected and margin have shapes {shapes}: they must be equal")
    return -logsigmoid(chosen - rejected - margin)


def _split(
    data: RewardRows, given: RewardRows | None, config: RewardModelConfig
) -> tuple[list[RewardRow], list[RewardRow]]:
    """Rows to train on and rows to measure on."""
    if given is None:
        chosen = [row.key < config.held_out_fraction * 2**64 for row in data.rows]
        measured = [row for row, out in zip(data.rows, chosen, strict=True) if out]
        training = [row for row, out in zip(data.rows, chosen, strict=True) if not out]
    else:
        training, measured = data.rows, given.rows
        if given.kind != data.kind:
            raise ValueError(f"data is of {data.kind}, held_out of {given.kind}: expected one kind")
        both = {row.key for row in training} & {row.key for row in measured}
        if both:
            raise ValueError(
                f"{len(both)} prompts of held_out stand in data too: take them out of one, or leave held_out out and "
                "a share of the prompts is held out"
            )
    if not training or not measured:
        raise ValueError(
            f"{len(training)} rows are left to train on and {len(measured)} to measure on, expected at least one "
            "each: give more rows, held_out, or another held_out_fraction"
        )
    return training, measured


def _train(model: RewardModel, rows: list[RewardRow], config: RewardModelConfig, kind: Kind) -> list[dict[str, float]]:
    generator = torch.Generator().manual_seed(config.seed)
    steps = config.num_epochs * -(-len(rows) // config.batch_size)
    descent = CosineOptimizer(model.model.parameters(), config, steps=steps)
    lengths, start = [max(map(len, row.ids)) for row in rows], time.perf_counter()
    history: list[dict[str, float]] = []
    for epoch in range(1, config.num_epochs + 1):
        total = 0.0
        with dropout_on(model.model, seed=int(torch.randint(2**31, (), generator=generator))):
            for batch in length_buckets(lengths, size=config.batch_size, generator=generator):
                losses = _losses(model, [rows[i] for i in batch], kind)
                losses.mean().backward()
                descent.step()
                total += losses.sum().item()
        seconds = time.perf_counter() - start
        history.append(
            {"steps": epoch * len(rows), "epoch": epoch, "reward/loss": total / len(rows), "time/seconds": seconds}
        )
    return history


def _losses(model: RewardModel, rows: list[RewardRow], kind: Kind) -> Tensor:
    """The loss of each row, with a gradient: float32 ``[n]``."""
    target = torch.tensor([row.target for row in rows], device=model.model.device)
    rewards = [model.logits([row.ids[i] for row in rows])[:, 0] for i in range(len(rows[0].ids))]
    if kind == "pairs":
        return bradley_terry_loss(chosen=rewards[0], rejected=rewards[1], margin=target)
    return (rewards[0] - target).square()


def _figures(model: RewardModel, rows: list[RewardRow], kind: Kind) -> dict[str, float | None]:
    """The measures of a `RewardReport`."""
    rewards = [model.score_rows([row.ids[i] for row in rows]) for i in range(len(rows[0].ids))]
    if kind == "pairs":
        return _pair_figures(rewards[0] - rewards[1])
    return _score_figures(rewards[0], torch.tensor([row.target for row in rows]))


def _pair_figures(difference: Tensor) -> dict[str, float | None]:
    """From what the better answer got more than the worse one, ``[n]``."""
    right, sure = difference > 0, difference.abs().sigmoid()
    return {
        "accuracy": right.double().mean().item(),
        "mean_squared_error": None,
        "spearman": None,
        "log_likelihood": logsigmoid(difference).double().mean().item(),
        "calibration_error": expected_calibration_error(probability=sure, outcome=right),
    }


def _score_figures(predicted: Tensor, score: Tensor) -> dict[str, float | None]:
    figures: dict[str, float | None] = {
        "accuracy": None,
        "mean_squared_error": (predicted - score).double().square().mean().item(),
        "spearman": spearman(predicted=predicted, actual=score),
        "log_likelihood": None,
        "calibration_error": None,
    }
    up = score == 1
    if (up | (score == 0)).all():
        likely = predicted.clamp(0, 1)
        figures["accuracy"] = ((likely >= 0.5) == up).double().mean().item()
        of_what_was = torch.where(up, likely, 1 - likely).clamp(1 - SUREST, SUREST)
        figures["log_likelihood"] = of_what_was.double().log().mean().item()
        figures["calibration_error"] = expected_calibration_error(probability=likely, outcome=up)
    return figures


BINS = 10
"""Of the probabilities from 0 to 1, of equal width."""


def expected_calibration_error(*, probability: Tensor, outcome: Tensor) -> float:
    """Mean distance of what was predicted from what happened, over `BINS` of the prediction (Guo et al. 2017, eq. 3).

    Args:
        probability: predicted, ``[n]``, from 0 to 1.
        outcome: what happened, 1 or 0 (bool), ``[n]``.

    Raises:
        ValueError: if shapes differ, there is nothing, or a probability is none.

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
    # Bin by bin |sum of gaps| is the bin's size times the distance of its two means.
    return (torch.zeros(BINS, dtype=torch.float64).index_add(0, inside, gap).abs().sum() / len(gap)).item()


def spearman(*, predicted: Tensor, actual: Tensor) -> float:
    """Correlation of the ranks, equal numbers sharing theirs (Spearman 1904); 0 where one side does not vary.

    Raises:
        ValueError: if shapes differ or there is nothing.

    Example:
        >>> spearman(predicted=torch.tensor([0.1, 0.5, 0.2]), actual=torch.tensor([1.0, 3.0, 2.0]))
        1.0
    """
    _check(predicted=predicted, actual=actual)
    one, two = (ranks - ranks.mean() for ranks in (_ranks(predicted), _ranks(actual)))
    scale = (one.square().sum() * two.square().sum()).sqrt()
    return ((one * two).sum() / scale).item() if scale > 0 else 0.0


def _ranks(x: Tensor) -> Tensor:
    """Ranks from 1, the mean one where several are equal: float64 ``[n]``."""
    _, place, count = x.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[place]


def _check(**columns: Tensor) -> None:
    (one, x), (two, y) = columns.items()
    if x.shape != y.shape or x.dim() != 1 or not len(x):
        raise ValueError(f"{one} has shape {tuple(x.shape)} and {two} {tuple(y.shape)}, expected [n] of both, n > 0")
