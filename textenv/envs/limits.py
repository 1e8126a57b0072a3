"""How long texts may become, and what ends a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from textenv.lm.loading import vocabulary_size
from textenv.prompts.special_tokens import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from textenv.envs.turn import Turn


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long texts may become, and what ends a turn."""

    max_prompt_tokens: int = 32
    max_new_tokens: int = 32
    """Of a turn."""
    max_turns: int = 1
    max_length: int | None = None
    """Of the whole text, in tokens; None: what all turns with answers as long as prompts may need."""
    stop: tuple[str | int, ...] = ()
    """Texts and token ids that end a turn, beside EOS."""
    min_new_tokens: int = 0
    """Tokens of a turn before it may end."""

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_new_tokens", "max_turns"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, which is {self.max_new_tokens}"
            )
        if self.max_length is not None and not self.max_length > self.max_prompt_tokens:
            raise ValueError(
                f"max_length is {self.max_length}, expected more than max_prompt_tokens, {self.max_prompt_tokens}: "
                "it counts the whole text"
            )
        if any(not text and isinstance(text, str) for text in self.stop):
            raise ValueError("stop holds an empty text, which would end every turn at once")

    @property
    def width(self) -> int:
        """Longest text, in tokens."""
        a_turn = self.max_prompt_tokens + self.max_new_tokens
        return a_turn * self.max_turns if self.max_length is None else self.max_length


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise a ValueError unless the value is an integer of at least that."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, expected an integer of at least {least}")


class Ends:
    """What ends a turn: EOS, other token ids, and texts.

    Args:
        tokenizer: of the policy.
        stop: token ids and texts.

    Raises:
        ValueError: on an id outside the vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str | int] = ()) -> None:
        if not hasattr(tokenizer, "get_vocab"):
            raise TypeError(
                f"tokenizer is {tokenizer!r:.200}, expected one of transformers: AutoTokenizer.from_pretrained"
            )
        self.num_tokens = vocabulary_size(tokenizer)
        special = special_tokens(tokenizer)
        # A special token is no part of a decoded text: such a stop text is looked for by its id.
        ids = [
            special[end] if isinstance(end, str) else int(end) for end in stop if end in special or type(end) is not str
        ]
        if tokenizer.eos_token_id is not None:
            ids.append(int(tokenizer.eos_token_id))
        if any(not 0 <= token < self.num_tokens for token in ids):
            raise ValueError(f"stop is {tuple(stop)!r}, expected texts, and ids from 0 to {self.num_tokens - 1}")
        self.ids = ids
        self.token = np.zeros(self.num_tokens, dtype=bool)
        """Bool by token id: whether it ends a turn by itself."""
        self.token[ids] = True
        self.texts = tuple(text for text in stop if isinstance(text, str) and text not in special)
        self.may_complete = np.zeros(self.num_tokens, dtype=bool)
        """Bool by token id: whether a text can be complete with it; most tokens need no second look."""
        if self.texts:
            tails = tuple(text[-1] for text in self.texts)
            for token in range(self.num_tokens):
                said = str(tokenizer.decode([token]))
                # A piece of a character decodes to the replacement mark: it may be the end of anything. And a space may
                # come from the decoder, before any token.
                self.may_complete[token] = "�" in said or any(tail in said or tail.isspace() for tail in tails)

    def complete(self, turn: Turn) -> bool:
        """Whether the turn's last token completed a stop text."""
        return turn.completed(self.texts) is not None
