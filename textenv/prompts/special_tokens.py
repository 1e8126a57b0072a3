"""Special tokens; a text from users, games or policies that spells one is still read as plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_KNOWN: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, dict[str, int]]] = WeakKeyDictionary()
"""State of a tokenizer and its special tokens, cached: collecting them takes longer than tokenizing a text."""


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of the tokens that control a model, such as EOS or chat markers, by their spelling."""
    now, known = (len(tokenizer), tokenizer.all_special_tokens), _KNOWN.get(tokenizer)
    if known is None or known[0] != now:
        named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        known = _KNOWN[tokenizer] = now, named | added
    return known[1]


def first_special_token(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the special token that a text spells first (of several at one place the longest); empty if it has none."""
    spelled = [token for token in special_tokens(tokenizer) if token and token in text]
    return min(spelled, key=lambda token: (text.index(token), -len(token)), default="")


def ordinary_ids(text: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    """Token ids of a text; special tokens that it spells are read as plain text.

    Special tokens that the tokenizer itself adds around the text stay. In a vocabulary where a special token is also an
    ordinary word (word-level, unigram), no other ids spell it, so it gets a space after its first character.

    Args:
        text: text from users, games or policies.
        tokenizer: the tokenizer.
        options: further options of the tokenizer's call.

    Raises:
        ValueError: if a part of the text still becomes a special token, or the text is not valid Unicode.
    """
    check_unicode(text)
    options = {"split_special_tokens": True, "verbose": False} | options
    ids = list(tokenizer(text, **options)["input_ids"])
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    # Any text may contain the unknown-word token.
    steering = set(special_tokens(tokenizer).values()) - ({tokenizer.unk_token_id} - ends)
    if steering.isdisjoint(ids):
        return ids
    own = sum(token in steering for token in tokenizer("", **options)["input_ids"])
    if sum(token in steering for token in ids) > own:
        ids = list(tokenizer(broken_up(text, tokenizer), **options)["input_ids"])
    if sum(token in steering for token in ids) > own:
        raise ValueError(
            f"the tokenizer reads a part of {text!r:.200} as a special token, though it is text: remove that part, "
            "or give token ids if you mean the special token"
        )
    return ids


def broken_up(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text with a space inside special tokens that are also ordinary words of the tokenizer."""
    for token, index in special_tokens(tokenizer).items():
        if (
            token in text
            and index in tokenizer(token, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        ):
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def check_unicode(value: Any) -> None:
    """Raise a ValueError if a text, or one in messages, contains an unpaired surrogate (a JSON escape can)."""
    for text in (*strings(value), *field_names(value)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{text!r:.200} is not valid Unicode: character {error.start} is an unpaired surrogate, remove it"
            ) from error


def strings(value: Any) -> Iterator[str]:
    """Yield the texts in messages, in order, without roles and field names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from strings([item for name, item in value.items() if name != "role"])
    elif isinstance(value, Sequence):
        for item in value:
            yield from strings(item)


def field_names(value: Any) -> Iterator[str]:
    """Yield the roles and field names in messages, including those of tool arguments."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield str(item) if name == "role" else str(name)
            yield from field_names(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from field_names(item)


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return messages with ``change`` applied to their texts and roles; field names stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: with_strings(item, change) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [with_strings(item, change) for item in value]
    return value
