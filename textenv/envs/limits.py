"""Length limits of texts, and the conditions that end a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from textenv.lm.loading import vocabulary_size
from textenv.prompts.special_tokens import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Length limits of texts, and stop sequences, checked at construction."""

    max_prompt_tokens: int = 32
    max_new_tokens: int = 32
    """Maximum tokens of a turn."""
    max_turns: int = 1
    max_length: int | None = None
    """Maximum tokens of the whole text; None fits all turns if no reply exceeds ``max_prompt_tokens``."""
    stop: tuple[str | int, ...] = ()
    """Texts and token ids that end a turn, in addition to EOS."""
    min_new_tokens: int = 0
    """Minimum tokens of a turn before it may end."""

    def __post_init__(self) -> None:
        check_at_least("max_prompt_tokens", self.max_prompt_tokens, 1)
        check_at_least("max_new_tokens", self.max_new_tokens, 1)
        check_at_least("max_turns", self.max_turns, 1)
        check_at_least("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, expected at most max_new_tokens, {self.max_new_tokens}"
            )
        if self.max_length is not None and not self.max_length > self.max_prompt_tokens:
            raise ValueError(
                f"max_length is {self.max_length}, expected more than max_prompt_tokens, {self.max_prompt_tokens}: "
                "it counts the whole text"
            )
        if any(not text and isinstance(text, str) for text in self.stop):
            raise ValueError("stop has an empty text, which would end every turn at once: remove it")

    @property
    def width(self) -> int:
        """Maximum length of the whole text, in tokens."""
        a_turn = self.max_prompt_tokens + self.max_new_tokens
        return a_turn * self.max_turns if self.max_length is None else self.max_length


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise a ValueError unless the value is an integer of at least ``least``."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, expected an integer of at least {least}")


def check_tokenizer(tokenizer: Any) -> None:
    """Raise a TypeError unless this is a tokenizer of `transformers`."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"tokenizer is {tokenizer!r:.200}, expected that of AutoTokenizer.from_pretrained")


class Ends:
    """Conditions that end a turn: the tokenizer's EOS, other token ids, and stop texts.

    Raises:
        TypeError: if the tokenizer is not of `transformers`.
        ValueError: on an id outside the vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str | int] = ()) -> None:
        check_tokenizer(tokenizer)
        self.num_tokens = vocabulary_size(tokenizer)
        special = special_tokens(tokenizer)
        # Decoded text has no special tokens, so a stop text that is a special token is matched by its id.
        ids = [
            special[end] if isinstance(end, str) else int(end) for end in stop if end in special or type(end) is not str
        ]
        if tokenizer.eos_token_id is not None:
            ids.append(int(tokenizer.eos_token_id))
        if any(not 0 <= token < self.num_tokens for token in ids):
            raise ValueError(f"stop is {tuple(stop)!r}, expected texts or ids from 0 to {self.num_tokens - 1}")
        self.ids = ids
        self.token = np.zeros(self.num_tokens, dtype=bool)
        """Bool ``[num_tokens]``: True for token ids that end a turn by themselves."""
        self.token[ids] = True
        self.texts = tuple(text for text in stop if isinstance(text, str) and text not in special)
        self.may_complete = np.zeros(self.num_tokens, dtype=bool)
        """Bool ``[num_tokens]``: True for token ids that can complete a stop text; only these are checked."""
        if self.texts:
            tails = tuple(text[-1] for text in self.texts)
            for token in range(self.num_tokens):
                said = str(tokenizer.decode([token]))
                # Part of a character decodes to the replacement character and may complete any text. The decoder may
                # insert a space before any token.
                self.may_complete[token] = "�" in said or any(tail in said or tail.isspace() for tail in tails)
