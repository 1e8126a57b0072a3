"""Lengths of prompts in tokens: upper bounds, so that of many prompts only the long ones are tokenized."""

from collections.abc import Callable

from textenv.prompts.prompts import Prompt, PromptList
from textenv.prompts.special_tokens import strings

Form = tuple[tuple[str, ...], ...]
"""Roles and fields of a chat's messages; of a text, nothing."""
TOKENIZED_PROMPTS = 10_000
"""Number of prompts that are always tokenized; of the others, those that may be too long, and one of each form."""


class LengthBounds:
    """Upper bounds of prompts' lengths, in tokens.

    A text has at most as many tokens as bytes. The tokenizer or the chat template adds others: at most as many as the
    shortest prompt of the same form has in all.
    """

    def __init__(self) -> None:
        self._shortest: dict[Form, int] = {}
        """By form: length of the shortest prompt that was tokenized."""

    def note(self, prompt: Prompt, length: int) -> None:
        """Note the length of a prompt that was tokenized."""
        form = _form(prompt)
        if form is not None:
            self._shortest[form] = min(length, self._shortest.get(form, length))

    def bound(self, prompt: Prompt) -> int | None:
        """Return the maximum number of tokens of a prompt; None if it must be tokenized to know."""
        form = _form(prompt)
        if form is None or form not in self._shortest:
            return None
        shortest = self._shortest[form]
        return shortest + sum(len(text.encode()) for text in strings(prompt.content))


def longest_prompt(deck: PromptList, count_tokens: Callable[[Prompt], int]) -> int:
    """Return the length of the longest of all prompts, in tokens; raise as ``count_tokens`` does."""
    bounds = LengthBounds()
    longest = 0
    for index in range(len(deck.prompts)):
        prompt = deck.prompt(index)
        bound = bounds.bound(prompt) if index >= TOKENIZED_PROMPTS else None
        if bound is None or bound > longest:
            length = count_tokens(prompt)
            bounds.note(prompt, length)
            longest = max(longest, length)
    return longest


def _form(prompt: Prompt) -> Form | None:
    """Return what prompts have in common for which a tokenizer adds the same to their texts; None for token ids."""
    if isinstance(prompt.content, str):
        return ()
    messages = [part for part in prompt.content if isinstance(part, dict)]
    if not messages:
        return None
    return tuple((str(message["role"]), *sorted(message)) for message in messages)
