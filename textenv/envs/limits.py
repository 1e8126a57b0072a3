"""Length limits of texts, and the conditions that end a turn."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """Maximum tokens of the text in a row; None: room for all its turns, as long as no reply is longer than
    ``max_prompt_tokens``."""
    max_turns_per_row: int | None = None
    """Maximum turns in a row, where the task gives the model new contexts; None: all turns may be in one row."""
    stop: tuple[str | int, ...] = ()
    """Texts and token ids that end a turn, in addition to the model's own ends (`textenv.lm.ends`)."""
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
        if self.max_length is not None:
            check_at_least("max_length", self.max_length, 1)
        if self.max_length is not None and not self.max_length > self.max_prompt_tokens:
            raise ValueError(
                f"max_length is {self.max_length}, expected more than max_prompt_tokens, {self.max_prompt_tokens}: "
                "it counts the whole text"
            )
        _check_stops(self.stop)

    @property
    def width(self) -> int:
        """Maximum length of the text in a row, in tokens."""
        if self.max_length is not None:
            return self.max_length
        tokens_per_turn = self.max_prompt_tokens + self.max_new_tokens
        num_turns = self.max_turns
        if self.max_turns_per_row is not None:
            num_turns = min(num_turns, self.max_turns_per_row)
        return tokens_per_turn * num_turns


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise a ValueError unless the value is an integer of at least ``least``."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < least:
        raise ValueError(f"{name} is {value!r}, expected an integer of at least {least}")


def check_tokenizer(tokenizer: object) -> None:
    """Raise a TypeError unless this is a tokenizer of `transformers`."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        if isinstance(getattr(tokenizer, "tokenizer", None), PreTrainedTokenizerBase):
            raise TypeError(f"tokenizer is a {type(tokenizer).__name__}, expected its tokenizer: policy.tokenizer")
        raise TypeError(f"tokenizer is {tokenizer!r:.200}, expected that of AutoTokenizer.from_pretrained")


class StopConditions:
    """Conditions that end a turn: the model's own ends (`textenv.lm.ends`), other token ids, and stop texts.

    Args:
        tokenizer: the policy's tokenizer.
        stop: texts and token ids in addition to the model's own ends.
        model_ends: the model's own ends. None: what `textenv.lm.ends.turn_ends` finds for the tokenizer.

    Raises:
        TypeError: if the tokenizer is not of `transformers`, or ``stop`` has something else.
        ValueError: on an id outside the vocabulary, or an empty text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str | int] = (), model_ends: TurnEnds | None = None
    ) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.num_tokens = vocabulary_size(tokenizer)

        # What the ends come from: environment, policy, model
        self.stop = _plain_stops(stop)
        """Texts and token ids in addition to the model's own ends."""
        self.policy_stop: tuple[str | int, ...] = ()
        """Further texts and token ids: those of the policy that plays."""
        self.model_ends = TurnEnds(())
        """Own ends of all models that were added."""

        # All of them together, as `add` divides them
        self.ids: list[int] = []
        """Token ids that end a turn by themselves."""
        self.is_end = np.zeros(self.num_tokens, dtype=bool)
        """Bool ``[num_tokens]``: True for token ids that end a turn by themselves."""
        self.texts: tuple[str, ...] = ()
        """Texts that end a turn."""
        self.text_of_end: dict[int, str] = {}
        """Texts of two kinds of token ids that end a turn: special tokens in ``stop``, and own ends of the model that
        are no special tokens."""
        if model_ends is None:
            model_ends = turn_ends(tokenizer)
        self.add(model_ends)

    def ids_with(self, model_ends: TurnEnds, policy_stop: Sequence[str | int] = ()) -> list[int]:
        """Return the ids that end a turn after `add` with these arguments; nothing is changed.

        Raises:
            ValueError: on an id outside the vocabulary.
        """
        if any(not 0 <= token < self.num_tokens for token in model_ends.ids):
            raise ValueError(
                f"the model ends its turns with the ids {list(model_ends.ids)}, the environment's tokenizer has the "
                f"ids 0 to {self.num_tokens - 1}: give the environment the model's tokenizer"
            )
        stop_ids, _, _ = self._divided(policy_stop)
        return list(dict.fromkeys([*stop_ids, *self.model_ends.ids, *model_ends.ids]))

    def add(self, model_ends: TurnEnds, policy_stop: Sequence[str | int] = ()) -> None:
        """Add the own ends of another model; the stops of its policy replace those of the policy that played before.

        Raises:
            ValueError: on an id outside the vocabulary.
        """
        ids = self.ids_with(model_ends, policy_stop)
        _, stop_texts, text_of_end = self._divided(policy_stop)
        model_ids = [*self.model_ends.ids, *model_ends.ids]
        model_texts = [*self.model_ends.texts, *model_ends.texts]
        self.model_ends = TurnEnds(tuple(dict.fromkeys(model_ids)), tuple(dict.fromkeys(model_texts)))
        self.policy_stop = _plain_stops(policy_stop)

        # All ends together, without repetitions
        self.ids = ids
        self.is_end[:] = False
        self.is_end[self.ids] = True
        former_texts = self.texts
        self.texts = tuple(dict.fromkeys([*stop_texts, *self.model_ends.texts]))
        if {*self.texts} != {*former_texts}:
            self.__dict__.pop("may_complete", None)  # a cached property, computed from the former texts

        # Decoding hides special tokens. An own end of the model that is no special token stays visible: keep its text,
        # to cut it off from answers
        shown_ids = {*self.model_ends.ids} - {*special_tokens(self.tokenizer).values()}
        self.text_of_end = text_of_end | {token: str(self.tokenizer.decode([token])) for token in shown_ids}

    def _divided(self, policy_stop: Sequence[str | int]) -> tuple[list[int], list[str], dict[int, str]]:
        """Divide all stops into ids and texts; a text that is a special token becomes its id.

        Returns:
            The ids, the texts, and the spelling of each special token.

        Raises:
            ValueError: on an id outside the vocabulary.
        """
        stop = dict.fromkeys([*_plain_stops(policy_stop), *self.stop])
        id_of_special_token = special_tokens(self.tokenizer)
        stop_ids = []
        stop_texts = []
        text_of_end = {}
        for end in stop:
            if isinstance(end, int):
                stop_ids.append(end)
            elif end in id_of_special_token:
                text_of_end[id_of_special_token[end]] = end
            else:
                stop_texts.append(end)
        stop_ids += text_of_end.keys()
        if any(not 0 <= token < self.num_tokens for token in stop_ids):
            raise ValueError(f"stop is {tuple(stop)!r}, expected texts or ids from 0 to {self.num_tokens - 1}")
        return stop_ids, stop_texts, text_of_end

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts to cut off from the end of an answer."""
        return (*self.texts, *self.text_of_end.values())

    @functools.cached_property
    def may_complete(self) -> np.ndarray:
        """Bool ``[num_tokens]``: True for token ids that can complete a stop text; only these are checked."""
        may_complete = np.zeros(self.num_tokens, dtype=bool)
        if not self.texts:
            return may_complete
        last_characters = [text[-1] for text in self.texts]
        if any(character.isspace() for character in last_characters):
            may_complete[:] = True  # the decoder may insert a space before any token
            return may_complete
        for token in range(self.num_tokens):
            text = str(self.tokenizer.decode([token]))
            # Part of a character decodes to the replacement character, or to nothing (ByT5): it may complete any text
            is_part_of_character = not text or "\N{REPLACEMENT CHARACTER}" in text
            has_last_character = any(character in text for character in last_characters)
            may_complete[token] = is_part_of_character or has_last_character
        return may_complete

    def __str__(self) -> str:
        """Describe the conditions for a log: each token with its id, then the texts."""
        tokens = [f"{self.tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in self.ids]
        texts = [f"the text {text!r}" for text in self.texts]
        return ", ".join([*tokens, *texts]) or "nothing but limits"


def _check_stops(stop: Sequence[str | int]) -> None:
    """Raise an error unless these are token ids, and texts with a character."""
    for end in stop:
        if end == "":
            raise ValueError("stop has an empty text, which would end every turn at once: remove it")
        if not isinstance(end, (str, int, np.integer)) or isinstance(end, bool):
            raise TypeError(f"stop has {end!r:.200}, expected texts and token ids, such as ['.', 5]")


def _plain_stops(stop: Sequence[str | int]) -> tuple[str | int, ...]:
    """Check texts and token ids, and return them with NumPy's integers as Python's."""
    _check_stops(stop)
    return tuple(end if isinstance(end, str) else int(end) for end in stop)
