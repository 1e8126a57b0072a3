"""Rewards that compare a completion with a reference column, or score it by a model."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textenv.rewards.answer import answer_text, column_of
from textenv.rewards.patterns import Scores

if TYPE_CHECKING:
    from textenv.rewards.reward_model import RewardModel


def exact_answer(column: str = "answer") -> Callable[..., list[float | None]]:
    """Reward 1 if completion and column are equal up to surrounding white space, else 0; None if the column is None.

    Example:
        >>> exact_answer()(prompts=["capital of Peru?"] * 2, completions=[" Lima", "lima"], answer=["Lima"] * 2)
        [1.0, 0.0]
    """

    def exact_answer(completions: list[Any], **columns: Any) -> list[float | None]:
        rows = zip(completions, column_of(columns, column, "exact_answer"), strict=True)
        return [None if right is None else float(answer_text(x).strip() == str(right).strip()) for x, right in rows]

    return exact_answer


def token_f1(column: str = "reference") -> Callable[..., list[float | None]]:
    """Reward the F1 of the words that completion and reference share, in any order (Rajpurkar et al. 2016, §6.1).

    Words are runs of letters and digits in lower case; unlike there, articles count. It takes linear time, ROUGE-L the
    product of both lengths. None if the column is None; 1 if neither text has a word.

    Example:
        >>> token_f1()(prompts=["where?"] * 2, completions=["In the park.", "at home"], reference=["the park"] * 2)
        [0.8, 0.0]
    """

    def token_f1(completions: list[Any], **columns: Any) -> list[float | None]:
        rows = zip(completions, column_of(columns, column, "token_f1"), strict=True)
        return [None if reference is None else _f1(answer_text(answer), str(reference)) for answer, reference in rows]

    return token_f1


def _f1(one: str, other: str) -> float:
    given, wanted = (Counter(re.findall(r"\w+", text.lower())) for text in (one, other))
    if not given and not wanted:
        return 1.0
    return 2 * (given & wanted).total() / (given.total() + wanted.total())


def sentiment(model: str | Path = "embedded", *, label: str | int = "positive") -> Scores:
    """Reward the probability, by a classifier, that prompt and completion together have a label.

    The classifier is loaded at the first call; for one already in memory see `textenv.RewardModel`.

    Args:
        model: ``"embedded"`` (movie reviews), or folder or hub name of a sequence classifier.
        label: the label whose probability is returned.

    Example:
        >>> sentiment()(prompts=["this film was"], completions=[" a joy from start to finish."])  # doctest: +SKIP
    """

    @functools.cache
    def load() -> RewardModel:
        from textenv.rewards.reward_model import RewardModel

        return RewardModel.load(model, label=label)

    def sentiment(prompts: list[Any], completions: list[Any], *, tokenizer: Any = None, **columns: Any) -> list[float]:
        return load()(prompts, completions, tokenizer=tokenizer, **columns)

    return sentiment
