"""Rewards for the form of a completion: pattern, tags in order, required words and forbidden words."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from textenv.rewards.answer import TextReward, answer_text, any_of, by_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_LAST_IDS = 32
"""Number of ids at the end of a prompt in which an opened tag is looked for."""


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
    are the default. A prompt may already hold the beginning of the answer, which then counts as part of it: a tag that
    the chat template opens after the last message (``<think>``), or the last message if it is the assistant's.

    Raises:
        ValueError: if a name is not a word.

    Example:
        >>> answers = ["<think>2 and 2</think> <answer>4</answer>", "<answer>4</answer>"]
        >>> format_tags("think", "answer")(prompts=["2+2="] * 2, completions=answers)
        [1.0, 0.0]
        >>> format_tags("think", "answer")(prompts=["2+2=<think>"], completions=["2 and 2</think> <answer>4</answer>"])
        [1.0]
    """
    names = tags or ("think", "answer")
    if not all(isinstance(name, str) and re.fullmatch(r"\w+", name) for name in names):
        raise ValueError(f"tags are {names}, expected names without brackets such as 'think'")

    def reward(
        completions: Sequence[object],
        prompts: Sequence[object] = (),
        prompt_ids: Sequence[list[int]] = (),
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        **columns: object,
    ) -> list[float]:
        scores = []
        for row, completion in enumerate(completions):
            # Prompts and their ids may be missing
            prompt: object = ""
            if len(prompts):
                prompt = prompts[row]
            ids: list[int] = []
            if len(prompt_ids):
                ids = prompt_ids[row]
            text = _answer_start(prompt, ids, tokenizer, names) + answer_text(completion)
            scores.append(float(_is_tagged(text, names)))
        return scores

    reward.__name__ = "format_tags"
    return reward


def _answer_start(
    prompt: Any, ids: list[int], tokenizer: "PreTrainedTokenizerBase | None", names: tuple[str, ...]
) -> str:
    """Return the part of an answer that its prompt holds: an assistant's message, or one of these tags, opened."""
    # A text, a message, or the last message of a chat
    last = prompt
    if not isinstance(prompt, (str, Mapping)) and len(prompt):
        last = prompt[-1]
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        return answer_text([last])

    # The prompt's end, as the policy read it if its ids are known
    end = ""
    if tokenizer is not None and ids:
        end = str(tokenizer.decode(ids[-NUM_LAST_IDS:]))
    elif isinstance(last, str):
        end = last
    for name in names:
        if end.rstrip().endswith(f"<{name}>"):
            return f"<{name}>"
    return ""


def _is_tagged(text: str, names: tuple[str, ...]) -> bool:
    """Return True if a text is exactly the elements of these names, in order, with white space around them."""
    for name in names:
        for tag in (f"<{name}>", f"</{name}>"):
            if text.count(tag) != names.count(name):
                return False
    for name in names:
        text = text.lstrip()
        if not text.startswith(f"<{name}>"):
            return False
        _, end_tag, text = text.removeprefix(f"<{name}>").partition(f"</{name}>")
        if not end_tag:
            return False
    return not text.strip()


def forbidden_words(words: Iterable[str]) -> TextReward:
    """Reward -1 if the completion has one of these words (whole words, any case), else 0.

    Raises:
        ValueError: if there are no words, or one is empty.

    Example:
        >>> forbidden_words(["sorry"])(prompts=["hi"] * 2, completions=["Sorry, no.", "yes"])
        [-1.0, 0.0]
    """
    pattern = re.compile(any_of(words), re.IGNORECASE)

    def score(text: str) -> float:
        if pattern.search(text):
            return -1.0
        return 0.0

    return by_text("forbidden_words", score)


def keyword_count(words: Iterable[str], *, most: int = 1) -> TextReward:
    """Reward the number of occurrences of these words (whole words, any case) over `most`, capped at 1.

    Raises:
        ValueError: if there are no words, one is empty, or `most` is below 1.

    Example:
        >>> keyword_count(["good", "great"], most=2)(prompts=["a"] * 3, completions=["Good.", "great good good", "bad"])
        [0.5, 1.0, 0.0]
    """
    pattern = re.compile(any_of(words), re.IGNORECASE)
    if most < 1:
        raise ValueError(f"most is {most}, expected at least 1 occurrence for the best score")

    def score(text: str) -> float:
        num_occurrences = sum(1 for _ in pattern.finditer(text))
        return min(num_occurrences, most) / most

    return by_text("keyword_count", score)
