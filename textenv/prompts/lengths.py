"""Lengths of prompts in tokens. Cheap upper bounds show which of many prompts are too short to be the longest."""

from collections.abc import Callable

from textenv.prompts.prompts import Prompt, PromptList
from textenv.prompts.special_tokens import strings

Form = tuple[tuple[str, ...], ...]
"""Roles and fields of a chat's messages; empty for a text."""
TOKENIZED_PROMPTS = 10_000
"""Number of prompts that are always tokenized; a later one only if it may be too long, or has a new form."""


class LengthBounds:
    """Upper bounds of prompts' lengths, in tokens.

    A text has at most as many tokens as bytes. Tokenizer and chat template add further tokens, the same number to all
    prompts of a `Form`. This number is not larger than the length of the shortest prompt of that form.
    """

    def __init__(self) -> None:
        self._shortest: dict[Form, int] = {}
        """Length of the shortest prompt that was tokenized, by form."""

    def note(self, prompt: Prompt, length: int) -> None:
        """Note the length of a prompt that was tokenized."""
        form = _form(prompt)
        if form is None:
            return
        shortest = self._shortest.get(form, length)
        self._shortest[form] = min(length, shortest)

    def bound(self, prompt: Prompt) -> int | None:
        """Return the maximum number of tokens of a prompt; None if it must be tokenized to know."""
        form = _form(prompt)
        if form is None or form not in self._shortest:
            return None
        num_bytes = sum(len(text.encode()) for text in strings(prompt.content))
        return self._shortest[form] + num_bytes


def longest_prompt(prompt_list: PromptList, count_tokens: Callable[[Prompt], int]) -> int:
    """Return the length of the longest of all prompts, in tokens; raise as ``count_tokens`` does."""
    bounds = LengthBounds()
    longest = 0
    for index in range(len(prompt_list.prompts)):
        prompt = prompt_list.prompt(index)
        if index >= TOKENIZED_PROMPTS:
            bound = bounds.bound(prompt)
            if bound is not None and bound <= longest:
                continue
        length = count_tokens(prompt)
        bounds.note(prompt, length)
        longest = max(longest, length)
    return longest


def _form(prompt: Prompt) -> Form | None:
    """Return the form of a prompt: prompts of one form get the same tokens beside their texts.

    None for token ids, and for chats with calls of tools, whose numbers and brackets are no texts.
    """
    if isinstance(prompt.content, str):
        return ()
    if not prompt.messages or any(message.get("tool_calls") for message in prompt.messages):
        return None
    return tuple((message["role"], *sorted(message)) for message in prompt.messages)
