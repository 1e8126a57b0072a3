"""Token ids as the text that people and rewards read: without special tokens, but with tags that an answer writes."""

from __future__ import annotations

import functools
import logging
import re
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from textenv.prompts.special_tokens import special_tokens
from textenv.prompts.tokenize import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPENING = re.compile(r"<(?!/)[^<>|/\s]+>|\[(?!/)[^\[\]/\s]+\]")
"""An opening tag, such as ``<think>`` or ``[THINK]``."""
_OPENING_AT_END = re.compile(rf"(?:{_OPENING.pattern})\Z")
_CONTENT = "\U000f0002"
"""A private-use character as the content of a message."""
_warn = functools.cache(logging.getLogger(__name__).warning)


class _Tags(NamedTuple):
    """Tags of a tokenizer, and what they depend on."""

    special: dict[str, int]
    template: Any
    ids: frozenset[int]


_WRITTEN: WeakKeyDictionary[PreTrainedTokenizerBase, _Tags] = WeakKeyDictionary()
"""Tags by tokenizer, cached: a text is decoded at many steps."""


def plain_text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of token ids without special tokens, except for tags that an answer writes (`written_tags`)."""
    tags = written_tags(tokenizer)
    if tags.isdisjoint(ids):
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    hidden = set(special_tokens(tokenizer).values()) - tags
    return str(tokenizer.decode([token for token in ids if token not in hidden], skip_special_tokens=False))


def written_tags(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of special tokens that are part of an answer's text: pairs of an opening and a closing tag.

    ``<think>`` and ``</think>`` are such a pair, and so are ``[THINK]`` and ``[/THINK]``. Not among them are named
    tokens (BOS, EOS, padding, …), and tags that the chat template writes around a user's or system's message.
    """
    special = special_tokens(tokenizer)
    cached = _WRITTEN.get(tokenizer)
    if cached is None or cached.special is not special or cached.template != tokenizer.chat_template:
        cached = _Tags(special, tokenizer.chat_template, _find_tags(tokenizer))
        _WRITTEN[tokenizer] = cached
    return cached.ids


def opened_tag(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tag that the chat template opens at the beginning of each answer, such as ``<think>``, or nothing.

    It belongs to the prompt, so that completions lack it. A tag that stands before an answer's content in each message
    marks who speaks, and is not meant.
    """
    user = {"role": "user", "content": "."}
    answer = {"role": "assistant", "content": _CONTENT}
    try:
        prompt = render([user], tokenizer, add_generation_prompt=True)
        before, _, _ = render([user, answer], tokenizer, add_generation_prompt=False).partition(_CONTENT)
    except ValueError:  # no template, or one that takes no such chat
        return ""
    tag = _OPENING_AT_END.search(prompt.rstrip())
    if tag is None or before.rstrip().endswith(tag[0]):
        return ""
    return tag[0]


def warn_of_opened_tag(tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a warning, once per tag, if completions lack the beginning of what the model says (`opened_tag`)."""
    tag = opened_tag(tokenizer)
    if tag:
        hint = "a reward gets completions without it (format_tags takes it from the prompt)"
        _warn("the chat template begins each answer with %s, which is therefore part of the prompt: %s", tag, hint)


def _find_tags(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    special = special_tokens(tokenizer)
    openings = [token for token in special if _OPENING.fullmatch(token)]
    pairs = [(token, f"{token[0]}/{token[1:]}") for token in openings if f"{token[0]}/{token[1:]}" in special]
    if not pairs:
        return frozenset()
    others = {*map(str, tokenizer.special_tokens_map.values()), *_tokens_around_messages(tokenizer)}
    return frozenset(special[token] for pair in pairs if others.isdisjoint(pair) for token in pair)


def _tokens_around_messages(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the special tokens that the chat template writes next to a user's or system's content."""
    if not tokenizer.chat_template:
        return set()
    user = {"role": "user", "content": _CONTENT}
    system = {"role": "system", "content": _CONTENT}
    tokens = set()
    for chat in ([user], [system, {"role": "user", "content": "."}]):
        try:
            before, _, after = render(chat, tokenizer, add_generation_prompt=False).partition(_CONTENT)
        except ValueError:  # the template takes no such chat
            continue
        for token in special_tokens(tokenizer):
            if before.rstrip().endswith(token) or after.lstrip().startswith(token):
                tokens.add(token)
    return tokens
