"""From words to token ids: prompts, chats by the model's template, and what an environment answers.

Ids are made once and appended; what a policy wrote is never tokenised again.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from textenv.prompts.prompts import Prompt
from textenv.prompts.special_tokens import (
    broken_up,
    check_unicode,
    field_names,
    ordinary_ids,
    special_tokens,
    strings,
    with_strings,
)
from textenv.rendering import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
_START, _END = "\U000f0000", "\U000f0001"
"""Two characters that mean nothing: they stand around what a message spells, and a template carries them along."""
_PRIVATE = range(0xF0002, 0xFFFFE)
"""Characters that mean nothing: one stands for an assistant's message, to find what a template writes after it."""


def is_chat(prompt: Prompt) -> bool:
    """Whether the prompt is a list of messages."""
    return not isinstance(prompt.content, str) and isinstance(prompt.content[0], dict)


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt.

    Text gets the tokenizer's own special tokens, a leading BOS once; a chat is rendered by the tokenizer's template
    up to where the assistant begins to speak. What a text or message spells out is text: who means a special token
    gives ids.

    Raises:
        ValueError: if there are none, the tokenizer has no chat template for a chat, or as `ordinary_ids` does.
    """
    if is_chat(prompt):
        ids = chat_ids(prompt.content, tokenizer)
    elif isinstance(prompt.content, str):
        ids = _prompt_text_ids(prompt.content, tokenizer)
    else:
        ids = [int(token) for token in prompt.content if not isinstance(token, dict)]
    if not ids:
        raise ValueError(f"prompt {prompt.content!r:.200} has no tokens: a policy needs at least one to start from")
    return ids


def reply_ids(reply: str, prompt: Prompt, said: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids to append when the environment has answered.

    Args:
        reply: what it says.
        prompt: how the episode began: a chat goes on by its template, a text goes on as it is.
        said: the ids so far, which end with the policy's turn.
        tokenizer: of the policy.
    """
    if not is_chat(prompt):
        return text_ids(reply, tokenizer)
    system = [message for message in prompt.content[:1] if isinstance(message, dict) and message["role"] == "system"]
    written = "".join(strings([*system, reply]))
    answer = next(mark for mark in map(chr, _PRIVATE) if mark not in written)
    chat = (*system, {"role": "user", "content": "."}, {"role": "assistant", "content": answer})
    ids = chat_ids((*chat, {"role": "user", "content": reply}), tokenizer, after=answer)
    # The template closes the assistant's message; where the policy has closed it itself, once is enough.
    return ids[1:] if ids and said[-1] == ids[0] else ids


def chat_ids(
    messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, *, after: str = "", add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a chat by the tokenizer's template. Special tokens are what the template writes, and no others.

    Args:
        messages: of people, games and policies; special tokens that they spell out are text.
        tokenizer: whose template it is.
        after: only what follows the message that says this.
        add_generation_prompt: end where the assistant begins to speak.

    Raises:
        ValueError: if there is no template, it refuses these messages, or they spell a special token where it cannot
            be told from the template's.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"prompt {messages!r:.200} is a chat, but the tokenizer has no chat template: "
            "set tokenizer.chat_template, or give the prompt as text"
        )
    spelt = _control_tokens(messages, tokenizer)
    if spelt is not None:
        messages = with_strings(messages, functools.partial(broken_up, tokenizer=tokenizer))
        messages = [_marked(message, own) for message, own in zip(messages, spelt, strict=True)]
    rendered = _render(messages, tokenizer, add_generation_prompt=add_generation_prompt)
    if after and rendered.count(after) != 1:
        raise ValueError(
            f"the tokenizer's chat template writes what the assistant said {rendered.count(after)} times, expected "
            "once: a conversation could not go on from there"
        )
    wanted = rendered.partition(after)[2] if after else rendered
    if spelt is None:  # the usual case, by the usual way
        return _usual_ids(wanted, tokenizer)
    return _marked_ids(wanted, tokenizer)


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of what stands inside an episode: no special tokens around it, and none of what it spells."""
    return ordinary_ids(text, tokenizer, add_special_tokens=False) if text else []


def without_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text to be closed by EOS, without the EOS that it may spell out at its end."""
    return text.removesuffix(tokenizer.eos_token or "")


def warn_of_spelling(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a warning, once a token, about special tokens that a text of the data spells: they are read as letters."""
    for token in special_tokens(tokenizer):
        if token in text:
            _say_once(token)


def _prompt_text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    bos = tokenizer.bos_token
    if bos and text.startswith(bos) and tokenizer("", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]:
        while text.startswith(bos):  # it gets one anyhow
            text = text.removeprefix(bos)
    warn_of_spelling(text, tokenizer)
    ids = ordinary_ids(text, tokenizer)
    # A tokenizer that closes a text with EOS would end the answer before it begins.
    while len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids


@functools.cache
def _say_once(token: str) -> None:
    """A prompt that was rendered from a chat by its template looks like this, or an answer that EOS was appended to."""
    logger.warning(
        "a prompt or an answer spells out the special token %r, which is read as text: where it is meant, give a "
        "chat's messages or token ids; an answer gets its EOS anyhow",
        token,
    )


def _control_tokens(messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[re.Pattern[str]] | None:
    """For each message what finds the tokens that it may not make, if one of them spells such a token; else None.

    These are special tokens, and added ones that the template writes; of the latter an assistant may write its own,
    such as ``<think>``.

    Raises:
        ValueError: as `chat_ids` does.
    """
    template = str(tokenizer.get_chat_template())
    added = tokenizer.added_tokens_decoder.values()
    special = [str(token) for token in added if token.special]
    words = [str(token) for token in added if not token.special and str(token) in template and str(token).strip()]
    texts = list(strings(messages))
    names = [name for name in field_names(messages) if not name.isidentifier()]
    for text in texts:
        check_unicode(text)
    whole = "\n".join([*texts, *names, *map(_joined, messages)])
    if not any(token in whole for token in (*special, *words)):
        return None
    of_others, of_assistants = _any_of([*special, *words]), _any_of(special)
    spelt = [of_assistants if message["role"] == "assistant" else of_others for message in messages]
    for message, own in zip(messages, spelt, strict=True):
        if found := own.search("\n".join([*names, _joined(message)])):
            raise ValueError(
                f"a message spells out the special token {found[0]!r} in a list of parts, its role or the name of a "
                f"field, where it cannot be told from the chat template's own: {message!r:.200}. Give its content as "
                "one text"
            )
    return spelt


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """What finds one of these, the longest first; nothing if there are none."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")


def _marked(message: Any, tokens: re.Pattern[str]) -> Any:
    """A message with marks around each of these tokens that its texts spell."""
    marks = rf"{_START}\g<0>{_END}"
    return with_strings(message, lambda text: tokens.sub(marks, text.replace(_START, "").replace(_END, "")))


def _marked_ids(chat: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a rendered chat: what is marked is text. (`transformers` has this itself from 5.20 on.)

    A template that cuts texts may leave half of a pair of marks: it is dropped, and the texts beside it stay apart.
    """
    tokens = _any_of(list(tokenizer.get_added_vocab())).pattern
    newline, ids = _usual_ids("\n", tokenizer), []
    for number, piece in enumerate(re.split(f"{_START}({tokens}){_END}|[{_START}{_END}]", chat)):
        if piece:
            encode = _word_ids if number % 2 else _usual_ids
            # After a newline, for some tokenizers put a space before a text's first word.
            found = encode(f"\n{piece}", tokenizer)
            inside = number > 0 and found[: len(newline)] == newline
            found = found[len(newline) :] if inside else encode(piece, tokenizer)
            if number % 2 and tokenizer.convert_tokens_to_ids(piece) in found:
                raise ValueError(f"the tokenizer reads {piece!r} in a message as a special token: take it out")
            ids += found
    return ids


def _usual_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _word_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids by the vocabulary alone: no added token is looked for, special or not."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    cut = backend.pre_tokenizer
    words = [text] if cut is None else [word for word, _ in cut.pre_tokenize_str(text)]
    return [token.id for word in words for token in backend.model.tokenize(word)]


def _joined(message: Mapping[str, Any]) -> str:
    """What a template may make of a content in parts: their texts with nothing between them."""
    content = message.get("content")
    parts = content if isinstance(content, (list, tuple)) else []
    return "".join(strings([part.get("text") for part in parts if isinstance(part, Mapping)]))


def _render(messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, *, add_generation_prompt: bool) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
        )
    except Exception as error:  # a template raises what its author pleased, in jinja
        raise ValueError(f"the tokenizer's chat template refused {messages!r:.300}: {printable(str(error))}") from error
