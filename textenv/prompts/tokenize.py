"""Tokenization of prompts, of chats with the model's chat template, and of environment replies.

Token ids are made once and appended; the policy's completions are never tokenized again.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from textenv.prompts.messages import beginning, read_messages
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

_START, _END = "\U000f0000", "\U000f0001"
"""Private-use characters around each control token that a message spells; templates pass them through."""
_PRIVATE = range(0xF0002, 0xFFFFE)
"""Private-use characters; one stands for an assistant message, to find the text that follows it."""
_LONGEST_END = 16
"""Maximum number of tokens in which a template ends a message."""
_warn = functools.cache(logging.getLogger(__name__).warning)


def is_chat(prompt: Prompt) -> bool:
    """Return True if the prompt is a list of messages."""
    return not isinstance(prompt.content, str) and isinstance(prompt.content[0], dict)


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    """Token ids of a prompt.

    Text gets the tokenizer's own special tokens, with at most one BOS; a chat is rendered by the chat template up to
    the start of the assistant's message. If the chat ends with an assistant's message, that is the beginning of the
    answer, and the ids end with it. Special tokens spelled in a text or message are read as plain text; to use these
    tokens, give ids.

    Raises:
        ValueError: if the prompt has no tokens, the chat ends with an assistant's message that has no text to continue,
            or as `chat_ids` or `ordinary_ids` does.
    """
    if is_chat(prompt):
        messages = read_messages(prompt.content, where="the prompt")
        ids = chat_ids(messages, tokenizer, **(_start_options(messages) | options))
    elif isinstance(prompt.content, str):
        ids = _prompt_text_ids(prompt.content, tokenizer)
    else:
        ids = [int(token) for token in prompt.content if not isinstance(token, dict)]
    if not ids:
        raise ValueError(f"prompt {prompt.content!r:.200} has no tokens: a policy needs at least one to start from")
    return ids


def reply_ids(reply: Any, prompt: Prompt, said: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids to append for a reply of the environment.

    Args:
        reply: text of the reply, or a list of messages with the results of tools.
        prompt: the episode's prompt; if it is a chat, the reply is rendered by the chat template.
        said: token ids so far, which end with the policy's turn.
        tokenizer: the policy's tokenizer.
    """
    replies = [{"role": "user", "content": reply}] if isinstance(reply, str) else reply
    if not is_chat(prompt):
        results = (f"\n<tool_response>\n{message['content']}\n</tool_response>\n" for message in replies)
        return text_ids(reply if isinstance(reply, str) else "".join(results), tokenizer)
    system = [message for message in prompt.content[:1] if isinstance(message, dict) and message["role"] == "system"]
    written = "".join(strings([*system, *replies]))
    answer = next(mark for mark in map(chr, _PRIVATE) if mark not in written)
    chat = (*system, {"role": "user", "content": "."}, {"role": "assistant", "content": answer})
    ids = chat_ids((*chat, *replies), tokenizer, after=answer)
    # The first tokens close the assistant's message: drop what the policy has written already
    for count in range(min(len(ids), len(said), _LONGEST_END), 0, -1):
        if list(said[-count:]) == ids[:count]:
            return ids[count:]
    after_space = _without_space(ids, tokenizer)
    last_message = chat_ids(chat, tokenizer, after=answer, add_generation_prompt=False)
    # A template may close the last message by another token than one inside a chat
    if said[-1] in (*after_space[:1], *_without_space(last_message, tokenizer)[:1]):
        return after_space[1:]
    return ids


def _without_space(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Leave out a first token that is white space."""
    return ids[1:] if ids and not str(tokenizer.decode(ids[:1])).strip() else ids


def chat_ids(
    messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, *, after: str = "", **options: Any
) -> list[int]:
    """Token ids of a chat by the tokenizer's template; all special tokens come from the template.

    Args:
        messages: chat messages; special tokens that they spell are read as plain text.
        tokenizer: tokenizer with a chat template.
        after: return only the part after the message with this text.
        options: of the tokenizer's ``apply_chat_template``, such as ``tools``; by default ``add_generation_prompt``.

    Raises:
        ValueError: if there is no template, if it refuses the messages, or if a special token that they spell looks
            like the template's own.
    """
    check_template(messages, tokenizer)
    protected, marked = protect(messages, tokenizer)
    rendered = render(protected, tokenizer, **{"add_generation_prompt": True} | options)
    if after and (times := rendered.count(after)) != 1:
        expected = "expected once: use another template for conversations"
        raise ValueError(f"the tokenizer's chat template writes an assistant message {times} times, {expected}")
    wanted = rendered.partition(after)[2] if after else rendered
    return rendered_ids(wanted, tokenizer, marked=marked)


def check_template(messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError if the tokenizer has no chat template for these messages."""
    if not tokenizer.chat_template:
        hint = "set tokenizer.chat_template, or give the prompt as text (without system_prompt and chat)"
        raise ValueError(f"prompt {messages!r:.200} is a chat, but the tokenizer has no chat template: {hint}")


def protect(messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[Any], bool]:
    """Put marks around the control tokens that messages spell, so that `rendered_ids` reads them as text.

    Returns:
        The messages, and True if they have marks.

    Raises:
        ValueError: as `chat_ids`.
    """
    patterns = _control_tokens(messages, tokenizer)
    if patterns is None:
        return list(messages), False
    broken = with_strings(messages, functools.partial(broken_up, tokenizer=tokenizer))
    return [_marked(message, tokens) for message, tokens in zip(broken, patterns, strict=True)], True


def rendered_ids(text: str, tokenizer: PreTrainedTokenizerBase, *, marked: bool) -> list[int]:
    """Token ids of a rendered chat, or of its beginning; ``marked`` says if `protect` has put marks into it."""
    return _marked_ids(text, tokenizer) if marked else _usual_ids(text, tokenizer)


def unmarked(text: str) -> str:
    """Return a rendered chat without marks, for errors."""
    return text.replace(_START, "").replace(_END, "")


def _start_options(messages: Sequence[Any]) -> dict[str, Any]:
    """Options of the chat template by which a chat ends where the policy begins to write."""
    if beginning(messages) is None:
        return {"add_generation_prompt": True}
    return {"add_generation_prompt": False, "continue_final_message": True}


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text inside an episode: no special tokens are added, and spelled ones are read as text."""
    return ordinary_ids(text, tokenizer, add_special_tokens=False) if text else []


def without_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Remove an EOS spelled at the end of a text, because the caller appends EOS."""
    return text.removesuffix(tokenizer.eos_token or "")


def warn_of_spelling(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a warning, once per token, if a text of the data spells special tokens: they are read as text."""
    for token in special_tokens(tokenizer):
        if token in text:  # such as a chat that is already rendered, or a completion with EOS appended
            hint = "if you mean the token, give chat messages or token ids; a completion gets its EOS automatically"
            _warn("a prompt or completion spells out the special token %r, which is read as text: %s", token, hint)


def _prompt_text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    bos = tokenizer.bos_token
    while bos and text.startswith(bos) and tokenizer("", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]:
        text = text.removeprefix(bos)  # the tokenizer adds one
    warn_of_spelling(text, tokenizer)
    ids = ordinary_ids(text, tokenizer)
    # An EOS added by the tokenizer would end the completion before it begins.
    while len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids


def _control_tokens(messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[re.Pattern[str]] | None:
    """Return, for each message, a pattern of its control tokens; None if no message spells one.

    Control tokens are special tokens, and added tokens that the template writes; in assistant messages, the latter
    (such as ``<think>``) stay tokens.

    Raises:
        ValueError: as `chat_ids` does.
    """
    template = str(tokenizer.get_chat_template())
    added = tokenizer.added_tokens_decoder.values()
    special = [str(token) for token in added if token.special]
    words = [str(token) for token in added if not token.special and str(token) in template and str(token).strip()]
    check_unicode(messages)
    names = [name for name in field_names(messages) if not name.isidentifier()]
    whole = "\n".join([*strings(messages), *names, *map(_parts_text, messages)])
    if not any(token in whole for token in (*special, *words)):
        return None
    of_others, of_assistants = _any_of([*special, *words]), _any_of(special)
    spelt = [of_assistants if message["role"] == "assistant" else of_others for message in messages]
    for message, own in zip(messages, spelt, strict=True):
        if found := own.search("\n".join([*names, _parts_text(message)])):
            raise ValueError(
                f"a message spells out the special token {found[0]!r} in a list of parts, its role or the name of a "
                f"field, where it looks like the chat template's own: {message!r:.200}. Give its content as one text"
            )
    return spelt


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Pattern that matches any of these tokens, longest first; if there are none, it never matches."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")


def _marked(message: Any, tokens: re.Pattern[str]) -> Any:
    """Return the message with marks around each of these tokens in its texts."""
    marks = rf"{_START}\g<0>{_END}"
    return with_strings(message, lambda text: tokens.sub(marks, text.replace(_START, "").replace(_END, "")))


def _marked_ids(chat: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a rendered chat; marked parts are read as text. (`transformers` >= 5.20 does this itself.)

    A template that cuts texts may leave an unpaired mark: it is dropped; both sides are tokenized separately.
    """
    tokens = _any_of(list(tokenizer.get_added_vocab())).pattern
    newline, ids = _usual_ids("\n", tokenizer), []
    for number, piece in enumerate(re.split(f"{_START}({tokens}){_END}|[{_START}{_END}]", chat)):
        if piece:
            encode = _word_ids if number % 2 else _usual_ids
            # Encode after a newline: some tokenizers put a space before the first word of a text.
            found = encode(f"\n{piece}", tokenizer)
            inside = number > 0 and found[: len(newline)] == newline
            found = found[len(newline) :] if inside else encode(piece, tokenizer)
            if number % 2 and tokenizer.convert_tokens_to_ids(piece) in found:
                raise ValueError(f"the tokenizer reads {piece!r} in a message as a special token: remove it")
            ids += found
    return ids


def _usual_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _word_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids by the base vocabulary alone: added tokens, special or not, are not matched."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    cut = backend.pre_tokenizer
    words = [text] if cut is None else [word for word, _ in cut.pre_tokenize_str(text)]
    return [token.id for word in words for token in backend.model.tokenize(word)]


def _parts_text(message: Mapping[str, Any]) -> str:
    """Texts of a message's parts, joined without a separator, as a template may render them."""
    content = message.get("content")
    parts = content if isinstance(content, (list, tuple)) else []
    return "".join(strings([part.get("text") for part in parts if isinstance(part, Mapping)]))


def render(messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    """Text of a chat by the tokenizer's template; raise a ValueError if the template refuses the messages.

    Where it refuses a message without content (of tool calls), that message gets an empty one.
    """
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # a jinja template may raise anything
        if not all("content" in message for message in messages):
            filled = [{"content": "", **message} for message in messages]
            return render(filled, tokenizer, **options)
        raise ValueError(f"the tokenizer's chat template refused {messages!r:.300}: {printable(str(error))}") from error
