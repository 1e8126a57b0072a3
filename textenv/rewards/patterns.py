"""Rewards for the form of a completion: pattern, tags in order, required words and forbidden words."""

import re
from collections.abc import Iterable

from textenv.rewards.answer import TextReward, any_of, by_text


def matches(pattern: str) -> TextReward:
    """Reward 1 if the regular expression is found in the completion, else 0.

    Raises:
        ValueError: if the pattern is not a valid regular expression.

    Example:
        >>> matches(r"^[0-9]+$")(prompts=["2+2="] * 2, completions=["4", "four"])
        [1.0, 0.0]
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern is {pattern!r}, expected a regular expression: {error}") from error
    return by_text("matches", lambda text: float(compiled.search(text) is not None))


def format_tags(*tags: str) -> TextReward:
    """Reward 1 if the completion is exactly these elements, in this order, with only white space around them, else 0.

    The strict form of the rule-based format reward of DeepSeek-R1 (2025, §2.2.2), whose tags ``"think", "answer"``
    are the default.

    Raises:
        ValueError: if a name is not a word.

    Example:
        >>> answers = ["<think>2 and 2</think> <answer>4</answer>", "<answer>4</answer>"]
        >>> format_tags("think", "answer")(prompts=["2+2="] * 2, completions=answers)
        [1.0, 0.0]
    """
    names = tags or ("think", "answer")
    if not all(isinstance(name, str) and re.fullmatch(r"\w+", name) for name in names):
        raise ValueError(f"tags are {names}, expected names without brackets such as 'think'")
    return by_text("format_tags", lambda text: float(_is_tagged(text, names)))


def _is_tagged(text: str, names: tuple[str, ...]) -> bool:
    marks = [mark for name in dict.fromkeys(names) for mark in (f"<{name}>", f"</{name}>")]
    if any(text.count(mark) != names.count(mark.strip("</>")) for mark in marks):
        return False
    for name in names:
        text = text.lstrip()
        _, closed, after = text.removeprefix(f"<{name}>").partition(f"</{name}>")
        if not text.startswith(f"<{name}>") or not closed:
            return False
        text = after
    return not text.strip()


def forbidden_words(words: Iterable[str]) -> TextReward:
    """Reward -1 if the completion has one of these words (whole words, any case), else 0.

    Raises:
        ValueError: if there are no words, or one is empty.

    Example:
        >>> forbidden_words(["sorry"])(prompts=["hi"] * 2, completions=["Sorry, no.", "yes"])
        [-1.0, 0.0]
    """
    found = re.compile(any_of(words), re.IGNORECASE)
    return by_text("forbidden_words", lambda text: -1.0 if found.search(text) else 0.0)


def keyword_count(words: Iterable[str], *, most: int = 1) -> TextReward:
    """Reward the number of occurrences of these words (whole words, any case) over `most`, capped at 1.

    Raises:
        ValueError: if there are no words, one is empty, or `most` is below 1.

    Example:
        >>> keyword_count(["good", "great"], most=2)(prompts=["a"] * 3, completions=["Good.", "great good good", "bad"])
        [0.5, 1.0, 0.0]
    """
    found = re.compile(any_of(words), re.IGNORECASE)
    if most < 1:
        raise ValueError(f"most is {most}, expected at least 1 occurrence for the best score")
    return by_text("keyword_count", lambda text: min(sum(1 for _ in found.finditer(text)), most) / most)
