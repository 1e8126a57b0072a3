"""Token ids as the text that people and rewards read: without special tokens, but with tags that an answer writes."""

from __future__ import annotations

import functools
import logging
import re
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from textenv.prompts.messages import Message
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
    """Ids of the special tokens by their spelling."""
    template: object
    """The chat template."""
    ids: frozenset[int]
    """Ids of the tags."""


_CACHE: WeakKeyDictionary[PreTrainedTokenizerBase, _Tags] = WeakKeyDictionary()
"""Tags of each tokenizer; a text is decoded at many steps."""


def plain_text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of token ids without special tokens, except for tags that an answer writes (`written_tags`)."""
    tags = written_tags(tokenizer)
    if tags.isdisjoint(ids):
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    hidden = set(special_tokens(tokenizer).values()) - tags
    shown = [token for token in ids if token not in hidden]
    return str(tokenizer.decode(shown, skip_special_tokens=False))


def written_tags(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of special tokens that are part of an answer's text: pairs of an opening and a closing tag.

    ``<think>`` and ``</think>`` are such a pair, and so are ``[THINK]`` and ``[/THINK]``. Named tokens (BOS, EOS,
    padding, …) do not count, nor do tags that the chat template writes around a user's or system's message.
    """
    special = special_tokens(tokenizer)
    cached = _CACHE.get(tokenizer)
    if cached is None or cached.special is not special or cached.template != tokenizer.chat_template:
        cached = _Tags(special, tokenizer.chat_template, _find_tags(tokenizer))
        _CACHE[tokenizer] = cached
    return cached.ids


def opened_tag(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tag with which the chat template begins each answer, such as ``<think>``; empty if there is none.

    This tag belongs to the prompt, so completions lack it. A tag before the content of every message of an assistant
    does not count, because it marks who speaks.
    """
    user: Message = {"role": "user", "content": "."}
    answer: Message = {"role": "assistant", "content": _CONTENT}
    try:
        prompt = render([user], tokenizer, add_generation_prompt=True)
        conversation = render([user, answer], tokenizer, add_generation_prompt=False)
    except ValueError:  # no template, or one that takes no such chat
        return ""
    text_before, _, _ = conversation.partition(_CONTENT)
    match = _OPENING_AT_END.search(prompt.rstrip())
    if match is None:
        return ""
    tag = match[0]
    marks_speaker = text_before.rstrip().endswith(tag)
    return "" if marks_speaker else tag


def warn_of_opened_tag(tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a warning, once per tag, if the chat template writes the beginning of each answer (`opened_tag`)."""
    tag = opened_tag(tokenizer)
    if tag:
        hint = "a reward gets completions without it (format_tags takes it from the prompt)"
        _warn("the chat template begins each answer with %s, which is therefore part of the prompt: %s", tag, hint)


def _find_tags(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of `written_tags`, without the cache."""
    special = special_tokens(tokenizer)

    # Special tokens that are pairs of tags
    pairs = []
    for opening in special:
        closing = f"{opening[:1]}/{opening[1:]}"
        if _OPENING.fullmatch(opening) and closing in special:
            pairs.append((opening, closing))
    if not pairs:
        return frozenset()

    # Those without another meaning
    named = {str(token) for token in tokenizer.special_tokens_map.values()}
    excluded = named | _tokens_around_messages(tokenizer)
    ids: set[int] = set()
    for opening, closing in pairs:
        if opening not in excluded and closing not in excluded:
            ids |= {special[opening], special[closing]}
    return frozenset(ids)


def _tokens_around_messages(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the special tokens that the chat template writes next to a user's or system's content."""
    if not tokenizer.chat_template:
        return set()
    user: Message = {"role": "user", "content": _CONTENT}
    system: Message = {"role": "system", "content": _CONTENT}
    after_system: Message = {"role": "user", "content": "."}
    tokens = set()
    for chat in ([user], [system, after_system]):
        try:
            rendered = render(chat, tokenizer, add_generation_prompt=False)
        except ValueError:  # the template takes no such chat
            continue
        text_before, _, text_after = rendered.partition(_CONTENT)
        for token in special_tokens(tokenizer):
            if text_before.rstrip().endswith(token) or text_after.lstrip().startswith(token):
                tokens.add(token)
    return tokens
