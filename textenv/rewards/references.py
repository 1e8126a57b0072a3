"""Rewards that compare a completion with a reference column, or score it by a model."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from textenv.rewards.answer import ColumnReward, TextReward, by_any_reference, reference_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from textenv.rewards.reward_model import RewardModel


def exact_answer(column: str = "answer") -> ColumnReward:
    """Reward 1 if completion and column are equal up to surrounding white space, else 0; None if the column is empty.

    Empty are None, a text of white space, and NaN. A column of floats may stem from whole numbers, as in a pandas table
    with an empty cell: 4.0 equals the completions ``4`` and ``4.0``, and the text ``"4.0"`` only the second one. True
    and False are equal to ``true`` and ``false`` in any case. An entry may be a list, any of whose references is right,
    or SQuAD's ``{"text": [...], "answer_start": [...]}``; an empty list or another mapping is an error.

    Example:
        >>> exact_answer()(prompts=["capital of Peru?"] * 2, completions=[" Lima", "lima"], answer=["Lima"] * 2)
        [1.0, 0.0]
    """

    def score(text: str, reference: object) -> float:
        if isinstance(reference, (bool, np.bool_)):  # JSON has true, and Python True
            return float(text.strip().lower() == str(reference).lower())
        accepted_texts = [accepted_text.strip() for accepted_text in reference_texts(reference)]
        return float(text.strip() in accepted_texts)

    return by_any_reference("exact_answer", column, score)


def token_f1(column: str = "reference") -> ColumnReward:
    """Reward the F1 of the completion's words and the reference's, in any order (Rajpurkar et al. 2016, §6.1).

    Words are runs of letters, digits and ``_`` in lower case; unlike in the paper, articles count. The time is linear
    in the lengths (for ROUGE-L it is their product). None if the column is empty, as in `exact_answer`; 1 if neither
    text has a word. Of several references, which are given as there, the largest F1 counts, as in the paper.

    Example:
        >>> token_f1()(prompts=["where?"] * 2, completions=["In the park.", "at home"], reference=["the park"] * 2)
        [0.8, 0.0]
    """

    def f1(text: str, reference: object) -> float:
        text_words = _count_words(text)
        return max(_f1(text_words, _count_words(reference_text)) for reference_text in reference_texts(reference))

    return by_any_reference("token_f1", column, f1)


def _f1(text_words: Counter[str], reference_words: Counter[str]) -> float:
    """Return the F1 of two bags of words."""
    num_words = text_words.total() + reference_words.total()
    if not num_words:
        return 1.0
    num_common = (text_words & reference_words).total()
    return 2 * num_common / num_words


def _count_words(text: str) -> Counter[str]:
    """Count each word of a text, in lower case."""
    return Counter(re.findall(r"\w+", text.lower()))


def sentiment(model: str | Path = "embedded", *, label: str | int = "positive") -> TextReward:
    """Reward a classifier's probability of ``label`` for prompt and completion together.

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

    def sentiment(
        prompts: Sequence[object],
        completions: Sequence[object],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **columns: Any,
    ) -> list[float]:
        return load()(prompts, completions, tokenizer=tokenizer, **columns)

    return sentiment
