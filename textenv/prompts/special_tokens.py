"""Special tokens; a text from users, games or policies that spells one is still read as plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_State = tuple[int, list[str]]
"""What a tokenizer's special tokens depend on: size of the vocabulary, and the named tokens."""
_CACHE: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[_State, dict[str, int]]] = WeakKeyDictionary()
"""State and special tokens of each tokenizer; collecting the tokens takes longer than tokenizing a text."""


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the tokens that control a model, such as EOS or chat markers: their ids by their spelling."""
    state = (len(tokenizer), tokenizer.all_special_tokens)
    cached = _CACHE.get(tokenizer)
    if cached is not None and cached[0] == state:
        return cached[1]
    tokens = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for index, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            tokens[str(token)] = index
    _CACHE[tokenizer] = (state, tokens)
    return tokens


def first_special_token(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the special token that a text spells first, the longest if several begin there; empty if none."""
    spelled = [token for token in special_tokens(tokenizer) if token and token in text]

    def position_then_longest(token: str) -> tuple[int, int]:
        return text.index(token), -len(token)

    return min(spelled, key=position_then_longest, default="")


def ordinary_ids(text: str, tokenizer: PreTrainedTokenizerBase, **options: object) -> list[int]:
    """Return the token ids of a text; special tokens that it spells are read as plain text.

    Special tokens that the tokenizer itself adds around the text stay. In some vocabularies (word-level, unigram) a
    special token is also an ordinary word, which no other ids spell: it gets a space after its first character.

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
    control = _control_ids(tokenizer)
    if control.isdisjoint(ids):
        return ids

    # The tokenizer adds some control tokens even to an empty text. If there are more, the text spells them
    num_added = _count(control, tokenizer("", **options)["input_ids"])
    if _count(control, ids) > num_added:
        ids = list(tokenizer(broken_up(text, tokenizer), **options)["input_ids"])
    if _count(control, ids) > num_added:
        raise ValueError(
            f"the tokenizer reads a part of {text!r:.200} as a special token, though it is text: remove that part, "
            "or give token ids if you mean the special token"
        )
    return ids


def _control_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of special tokens that a text must not contain; it may contain the unknown-word token."""
    control = set(special_tokens(tokenizer).values())
    if tokenizer.unk_token_id not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        control.discard(tokenizer.unk_token_id)
    return control


def _count(control: set[int], ids: Sequence[int]) -> int:
    """Count the control tokens among the ids."""
    return sum(token in control for token in ids)


def broken_up(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text with a space inside special tokens that are also ordinary words of the tokenizer."""
    for token, index in special_tokens(tokenizer).items():
        if token not in text:
            continue
        ids_as_text = tokenizer(token, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if index in ids_as_text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def check_unicode(value: object) -> None:
    """Raise a ValueError if a text, or a text in messages, has an unpaired surrogate (a JSON escape can make one)."""
    for text in (*strings(value), *field_names(value)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{text!r:.200} is not valid Unicode: character {error.start} is an unpaired surrogate, remove it"
            ) from error


def strings(value: object) -> Iterator[str]:
    """Yield the texts in messages, in order, without roles and field names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name != "role":
                yield from strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from strings(item)


def field_names(value: object) -> Iterator[str]:
    """Yield the roles and field names in messages, including those of tool arguments."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name == "role":
                yield str(item)
            else:
                yield str(name)
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
