"""Length limits of texts, and the conditions that end a turn."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from textenv.lm.ends import TurnEnds, turn_ends
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
    """Texts and token ids that end a turn, in addition to those that end the model's own (`textenv.lm.ends`)."""
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


class StopConditions:
    """Conditions that end a turn: what ends the model's own turns (`textenv.lm.ends`), other token ids, and stop texts.

    Args:
        tokenizer: the policy's tokenizer.
        stop: texts and token ids in addition to the model's own ends.
        own: the model's own ends; None: those of the tokenizer's model, as far as it is known.

    Raises:
        TypeError: if the tokenizer is not of `transformers`.
        ValueError: on an id outside the vocabulary.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str | int] = (), own: TurnEnds | None = None
    ) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.num_tokens = vocabulary_size(tokenizer)
        self.stop = tuple(end if isinstance(end, str) else int(end) for end in stop)
        """Texts and token ids that were given in addition to the model's own."""
        self.own = TurnEnds(())
        """What ends the model's own turns."""
        self.ids: list[int] = []
        """Token ids that end a turn by themselves."""
        self.token = np.zeros(self.num_tokens, dtype=bool)
        """Bool ``[num_tokens]``: True for token ids that end a turn by themselves."""
        self.texts: tuple[str, ...] = ()
        """Texts that end a turn."""
        self.spelled: dict[int, str] = {}
        """Spelling of ids that end a turn: of special tokens given as stop texts, and of the model's other tokens."""
        self.add(turn_ends(tokenizer) if own is None else own)

    def add(self, own: TurnEnds) -> None:
        """End turns also where this model ends its own; a ValueError on an id outside the vocabulary."""
        if any(not 0 <= token < self.num_tokens for token in own.ids):
            raise ValueError(
                f"the model ends its turns with the ids {list(own.ids)}, the environment's tokenizer has the ids 0 to "
                f"{self.num_tokens - 1}: give the environment the model's tokenizer"
            )
        ids = [*self.own.ids, *own.ids]
        texts = [*self.own.texts, *own.texts]
        self.own = TurnEnds(tuple(dict.fromkeys(ids)), tuple(dict.fromkeys(texts)))

        # A stop text that is a special token ends a turn by its id
        special = special_tokens(self.tokenizer)
        spelled = {special[end]: end for end in self.stop if isinstance(end, str) and end in special}
        other_ids = [end for end in self.stop if isinstance(end, int)] + [*spelled]
        if any(not 0 <= token < self.num_tokens for token in other_ids):
            raise ValueError(f"stop is {self.stop!r}, expected texts or ids from 0 to {self.num_tokens - 1}")
        self.ids = list(dict.fromkeys([*other_ids, *self.own.ids]))
        self.token[self.ids] = True
        other_texts = [end for end in self.stop if isinstance(end, str) and end not in special]
        self.texts = tuple(dict.fromkeys([*other_texts, *self.own.texts]))

        # Texts show no special tokens, but an end may be another token
        shown = {*self.own.ids} - {*special.values()}
        self.spelled = spelled | {token: str(self.tokenizer.decode([token])) for token in shown}
        self.__dict__.pop("may_complete", None)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that are cut off from an answer that they end."""
        return (*self.texts, *self.spelled.values())

    @functools.cached_property
    def may_complete(self) -> np.ndarray:
        """Bool ``[num_tokens]``: True for token ids that can complete a stop text; only these are checked."""
        possible = np.zeros(self.num_tokens, dtype=bool)
        tails = tuple(text[-1] for text in self.texts)
        for token in range(self.num_tokens if self.texts else 0):
            text = str(self.tokenizer.decode([token]))
            # Part of a character decodes to the replacement character, or to nothing (ByT5), and may complete any text.
            # The decoder may insert a space before any token.
            part_of_character = not text or "\N{REPLACEMENT CHARACTER}" in text
            possible[token] = part_of_character or any(tail in text or tail.isspace() for tail in tails)
        return possible

    def __str__(self) -> str:
        """Describe them for a log: each token with its id, and texts."""
        tokens = [f"{self.tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in self.ids]
        texts = [f"the text {text!r}" for text in self.texts]
        return ", ".join([*tokens, *texts]) or "nothing but limits"
