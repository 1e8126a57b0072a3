"""Special tokens, and texts that spell one: what people, games and policies write is text, whatever it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_KNOWN: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, dict[str, int]]] = WeakKeyDictionary()
"""What a tokenizer was like when it was looked at, and its special tokens: a look takes longer than a text."""


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of the tokens that steer a model, such as EOS or the marks of a chat, by how they are spelt."""
    now, known = (len(tokenizer), tokenizer.all_special_tokens), _KNOWN.get(tokenizer)
    if known is None or known[0] != now:
        known = _KNOWN[tokenizer] = now, _look_up(tokenizer)
    return known[1]


def _look_up(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return named | {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def ordinary_ids(text: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    """Token ids of a text, none of which is a special token, whatever the text spells.

    Those that the tokenizer itself puts around a text stay. A vocabulary in which a special token is a word like
    another (word-level, unigram) knows no other ids for its spelling: there it gets a space after its first character.

    Args:
        text: from outside.
        tokenizer: turns it into ids.
        options: further ones of its call.

    Raises:
        ValueError: if a part of the text becomes a special token all the same, or is no Unicode.
    """
    check_unicode(text)
    options = {"split_special_tokens": True, "verbose": False} | options
    ids = list(tokenizer(text, **options)["input_ids"])
    steering = _steering(tokenizer)
    if steering.isdisjoint(ids):
        return ids
    own = _count(tokenizer("", **options)["input_ids"], steering)
    if _count(ids, steering) > own:
        ids = list(tokenizer(broken_up(text, tokenizer), **options)["input_ids"])
    if _count(ids, steering) > own:
        raise ValueError(
            f"the tokenizer reads a part of {text!r:.200} as a special token, though it is text: take that part out, "
            "or give token ids if the special token is meant"
        )
    return ids


def broken_up(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text, with a space in the special tokens that the tokenizer also has among its words."""
    for token, index in special_tokens(tokenizer).items():
        if (
            token in text
            and index in tokenizer(token, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        ):
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def check_unicode(text: str) -> None:
    """Raise a ValueError if a text holds half a character, as broken JSON may (an unpaired surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{text!r:.200} is no Unicode: character {error.start} is an unpaired surrogate, take it out"
        ) from error


def strings(value: Any) -> Iterator[str]:
    """The texts in messages, in their order; neither roles nor the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from strings([item for name, item in value.items() if name != "role"])
    elif isinstance(value, Sequence):
        for item in value:
            yield from strings(item)


def field_names(value: Any) -> Iterator[str]:
    """The roles and the names of fields in messages, those of a tool's arguments included."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield str(item) if name == "role" else str(name)
            yield from field_names(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from field_names(item)


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Messages with their texts changed; the names of their fields stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: with_strings(item, change) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [with_strings(item, change) for item in value]
    return value


def _steering(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of the special tokens, less the one that stands for unknown words: any text may hold these."""
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    return set(special_tokens(tokenizer).values()) - ({tokenizer.unk_token_id} - ends)


def _count(ids: Sequence[int], wanted: set[int]) -> int:
    return sum(token in wanted for token in ids)
