"""Reward functions, each returned by a factory, as in ``reward=rewards.numeric_answer()``; and transforms of them.

A reward function is ``f(prompts, completions, **columns) -> list[float | None]``, called by keyword with one entry per
row; see `textenv.rewards.composite.RewardFunction`. None means that the function does not apply to the row.
"""

from textenv.importing import load_function
from textenv.rewards.composite import Rewards
from textenv.rewards.judge import judge
from textenv.rewards.lengths import length_window, overlong, repetition, unfinished
from textenv.rewards.numeric import numeric_answer
from textenv.rewards.packages import grammar, json_schema, math_answer, python_tests, similarity, vader
from textenv.rewards.patterns import forbidden_words, format_tags, keyword_count, matches
from textenv.rewards.references import exact_answer, sentiment, token_f1
from textenv.rewards.transforms import Normalize, clip, whiten

__all__ = [
    "Normalize", "Rewards", "clip", "exact_answer", "forbidden_words", "format_tags", "grammar", "json_schema", "judge",
    "keyword_count", "length_window", "load_function", "matches", "math_answer", "numeric_answer", "overlong",
    "python_tests", "repetition", "sentiment", "similarity", "token_f1", "unfinished", "vader", "whiten",
]  # fmt: skip
