"""Training data of reward models: answers with scores, or pairs of a chosen and a rejected answer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from textenv.prompts.prompts import Prompt, content_hash
from textenv.prompts.tokenize import warn_of_spelling
from textenv.rewards.reward_model import RewardModel

Kind = Literal["scores", "pairs"]


@dataclass(frozen=True, kw_only=True)
class RewardRow:
    """Scored answer, or preference pair."""

    ids: tuple[list[int], ...]
    """Token ids of prompt and answer: one sequence, or two for the chosen and the rejected answer."""
    target: float
    """Score, or margin by which the chosen answer's reward should exceed the rejected one's."""
    key: int
    """Hash of the prompt, with runs of whitespace as one space; without a prompt, of the (chosen) answer."""


@dataclass(frozen=True, kw_only=True)
class RewardRows:
    """Rows of one kind."""

    kind: Kind
    rows: list[RewardRow]
    skipped: int
    """Number of rows without a judgement: questions that a person skipped, and ties."""


def read_reward_rows(data: Sequence[Mapping[str, Any]], model: RewardModel) -> RewardRows:
    """Read rows and encode their texts with the model's own tokenization (`RewardModel.encode`).

    Args:
        data: ``{"prompt", "completion", "score"}``, or ``{"prompt", "chosen", "rejected"}`` with optional ``"margin"``.
            Other columns are ignored, so lines of a `textenv.FeedbackFile` are valid. A prompt may be empty.
        model: reward model that encodes the texts.

    Raises:
        ValueError: if a row has neither form, both kinds are mixed, a number is not finite, or there are no rows.
    """
    kinds = [_kind(index, row) for index, row in enumerate(data)]
    if len(set(kinds)) != 1:
        raise ValueError(
            f"data has {kinds.count('scores')} scored answers and {kinds.count('pairs')} pairs, expected one kind and "
            "at least one row: keep one of the two"
        )
    rows = [_reward_row(index, row, kinds[0], model) for index, row in enumerate(data)]
    kept = [row for row in rows if row is not None]
    return RewardRows(kind=kinds[0], rows=kept, skipped=len(rows) - len(kept))


def _kind(index: int, row: Any) -> Kind:
    columns = set(row) if isinstance(row, Mapping) else set()
    if {"prompt", "completion", "score"} <= columns:
        return "scores"
    if {"prompt", "chosen", "rejected"} <= columns:
        return "pairs"
    raise ValueError(
        f"row {index} is {row!r:.200}, expected {{'prompt', 'completion', 'score'}} or {{'prompt', 'chosen', "
        "'rejected'}"
    )


def _reward_row(index: int, row: Mapping[str, Any], kind: Kind, model: RewardModel) -> RewardRow | None:
    """Read a row; None if it has no judgement."""
    answers, number = (("chosen", "rejected"), "margin") if kind == "pairs" else (("completion",), "score")
    if any(row[name] is None for name in (answers if kind == "pairs" else ["score"])):
        return None
    ids = tuple(_encode(index, row, name, model) for name in answers)
    target = 0.0 if row.get(number) is None else row[number]
    if not (isinstance(target, (bool, int, float)) and math.isfinite(target)):
        raise ValueError(
            f"row {index} has the {number} {target!r:.100}, expected a finite number (or None: not answered)"
        )
    content = row["prompt"] or row[answers[0]]
    key = content_hash(Prompt(content if isinstance(content, str) else tuple(content)))
    return RewardRow(ids=ids, target=float(target), key=key)


def _encode(index: int, row: Mapping[str, Any], answer: str, model: RewardModel) -> list[int]:
    if isinstance(row["prompt"], str) != isinstance(row[answer], str):
        raise ValueError(
            f"row {index} has the prompt {row['prompt']!r:.100} and the {answer} answer {row[answer]!r:.100}, expected "
            "both as text, or both as chat messages"
        )
    if isinstance(row[answer], str):
        warn_of_spelling(row[answer], model.tokenizer)
    return model.encode(row["prompt"], row[answer], ended=bool(row.get("terminated", True)))
