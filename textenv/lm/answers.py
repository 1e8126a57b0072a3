"""What a model learns from a chat: the tokens that the chat template writes for the assistant's messages."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from textenv.lm.ends import closing_ids, template_end
from textenv.prompts.messages import THOUGHTS, Message, answer_beginning
from textenv.prompts.prompts import Prompt
from textenv.prompts.special_tokens import special_tokens
from textenv.prompts.tokenize import (
    answer_ids,
    begins_message,
    check_template,
    prompt_ids,
    protect,
    render,
    rendered_ids,
    unmarked,
    without_end,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ENDS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, _Ends]] = WeakKeyDictionary()
"""Chat template of a tokenizer, and how it ends an answer; cached, as every chat needs it."""
_ADVICE = "give the answer as {'prompt': [messages before it], 'completion': 'the text that the model should write'}"
_warn_once = cache(logging.getLogger(__name__).warning)


class LearntChat(NamedTuple):
    """Token ids of a rendered chat."""

    ids: list[int]
    learnt: list[bool]
    """True on the tokens of answers, up to and with the token that ends the turn."""


class _Answer(NamedTuple):
    """An assistant's message as the template writes it, given the messages before it."""

    chat_start: str
    """Rendered chat up to the start of the answer, as the model reads it before it writes."""
    text: str
    """What the model writes."""
    end: str
    """Token that ends the turn, if the template does not write it with the message; else empty."""


class _Ends(NamedTuple):
    """How a chat template ends an answer."""

    tokens: tuple[str, ...]
    """Spelling of tokens, one of which ends it."""
    texts: tuple[str, ...]
    """Texts, if no token does."""


def without_turn_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Remove the end of a turn from the end of a text of the data, because it is added as a token later."""
    ends = _template_ends(tokenizer)
    for end in (*ends.tokens, *ends.texts):
        text = text.removesuffix(end)
    return without_end(text, tokenizer)


def eos_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token id that ends an answer where nothing else does; raise a ValueError if there is none."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS, so no answer would end: set tokenizer.eos_token")
    return [int(tokenizer.eos_token_id)]


def _template_ends(tokenizer: PreTrainedTokenizerBase) -> _Ends:
    """Return how the chat template ends an answer (`textenv.lm.ends.template_end`), found once for a template."""
    template = str(tokenizer.chat_template)
    if tokenizer not in _ENDS or _ENDS[tokenizer][0] != template:
        ends = template_end(tokenizer)
        tokens = tuple(str(tokenizer.convert_ids_to_tokens(token)) for token in ends.ids)
        _ENDS[tokenizer] = template, _Ends(tokens, ends.texts)
    return _ENDS[tokenizer][1]


def learnt_chats(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    first: int = 0,
    begun: str | None = None,
    options: Mapping[str, object] | None = None,
) -> list[LearntChat]:
    """Tokenize a chat as its template renders it, and mark what the assistant writes in it.

    An answer is the part of the rendered chat from the point where a model is asked to answer, up to the token that
    ends the turn. Usually the whole chat has all answers as they were written, and it is the only chat returned. Some
    templates render an earlier answer differently once other messages follow (Qwen 3 leaves out its thoughts). Such an
    answer gets a chat that ends with it. So each answer is learnt once, in the form in which a model writes it.

    Args:
        messages: chat, as from `textenv.prompts.messages.read_messages`.
        tokenizer: tokenizer with a chat template.
        first: index of the first message that may be learnt.
        begun: beginning of the content of message ``first`` that is given, not learnt; None if nothing is.
        options: of the template, such as ``tools``.

    Returns:
        At least one chat. Their ids are those of the rendering. If the template writes no token at the end of a last
        answer, a token is added: the one that begins the next message (GLM), or else EOS.

    Raises:
        ValueError: if there is no answer, or the template refuses the messages, does not begin an answer as it asks for
            one, leaves out what the assistant says, or has no token boundary where an answer begins or ends.
    """
    pending = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not pending or pending[0] == 0:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"it is a chat of {roles or 'no messages'}; expected an assistant's message, with a message of "
            "another role before it"
        )
    check_template(messages, tokenizer)
    start_of_answer = None if begun is None else (first, begun)
    chat = _Chat(messages, tokenizer, dict(options or {}), start_of_answer=start_of_answer)
    answers = {index: _read_answer(index, chat) for index in pending}

    # Begin with the whole chat. While answers are left, go on with the chat that ends with the last of them
    chats = []
    stop = len(messages)
    while pending:
        if messages[stop - 1]["role"] == "assistant":
            rendered = chat.rendered(stop)
        else:
            rendered = chat.asked(stop)

        # Answers that stand in this chat as the model writes them
        learnt = []
        for index in pending:
            answer = answers[index]
            if index < stop and rendered.startswith(answer.chat_start + answer.text):
                learnt.append(index)
        if learnt:
            chats.append(_learnt_chat(rendered, [answers[index] for index in learnt], chat))
        pending = [index for index in pending if index not in learnt]
        if pending:
            stop = pending[-1] + 1
    return chats


def written_answer(
    prompt: Prompt, text: str, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, object]
) -> LearntChat:
    """Tokenize a chat prompt and a text, which is what the model writes after the start of its answer.

    The token that ends a turn is added. A tag with which the template already starts the answer (``<think>``) is not
    repeated.

    Args:
        prompt: chat; it may end with the beginning of the answer.
        text: text of the answer.
        tokenizer: tokenizer with a chat template.
        options: of the template, such as ``tools``.

    Raises:
        ValueError: as `textenv.prompts.tokenize.prompt_ids`.
    """
    ids = prompt_ids(prompt, tokenizer, **options)
    text = without_turn_end(text, tokenizer)

    # Where the template's start ends with a tag, the text goes on after it
    if answer_beginning(prompt.messages) is None:
        start = render(prompt.messages, tokenizer, add_generation_prompt=True, **options)
        tag = re.search(r"(<[^<>\s]+>|\[[^\[\]\s]+\])(\s*)\Z", start)
        if tag is not None and text.startswith(tag[1]):
            text = text.removeprefix(tag[1]).removeprefix(tag[2])

    end = closing_ids(tokenizer, chat=True) or eos_ids(tokenizer)
    answer = [*answer_ids(text, tokenizer, is_message=begins_message(prompt)), *end]
    return LearntChat(ids + answer, [False] * len(ids) + [True] * len(answer))


class _Chat:
    """Messages, and the renderings of their beginnings, each made once.

    Args:
        messages: the chat.
        tokenizer: tokenizer with a chat template.
        options: options of the template.
        start_of_answer: index of a message whose content begins with a text that is given, and this text; or None.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tokenizer: PreTrainedTokenizerBase,
        options: dict[str, object],
        *,
        start_of_answer: tuple[int, str] | None,
    ) -> None:
        self.tokenizer = tokenizer
        self._options = options
        self._renderings: dict[tuple[int, bool], str] = {}

        if start_of_answer is None:
            self.messages, self.marked = protect(messages, tokenizer)
            return

        # Protect the given start together with the chat: `protect` marks all of them or none
        index, text = start_of_answer
        start_message = messages[index] | {"content": text}
        protected, self.marked = protect([*messages, start_message], tokenizer)
        self.messages = protected[:-1]
        asked = [*self.messages[:index], protected[-1]]
        self._renderings[index, True] = render(asked, tokenizer, continue_final_message=True, **options)

    def rendered(self, stop: int) -> str:
        """Text of the messages before this index."""
        return self._render(stop, False)

    def asked(self, stop: int) -> str:
        """Text of the messages before this index, and of the start of an answer to them."""
        return self._render(stop, True)

    def followed(self, stop: int) -> str:
        """Text of the messages before this index, the last of which is an answer, and of a message that follows it."""
        role = "tool" if self.messages[stop - 1].get("tool_calls") else "user"
        try:
            messages: list[Message] = [*self.messages[:stop], {"role": role, "content": "."}]
            return render(messages, self.tokenizer, add_generation_prompt=False, **self._options)
        except ValueError:  # a template that refuses such a message
            return ""

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendering, or of its beginning."""
        return rendered_ids(text, self.tokenizer, marked=self.marked)

    def _render(self, stop: int, asks: bool) -> str:
        if (stop, asks) not in self._renderings:
            messages = self.messages[:stop]
            text = render(messages, self.tokenizer, add_generation_prompt=asks, **self._options)
            self._renderings[stop, asks] = text
        return self._renderings[stop, asks]


def _read_answer(index: int, chat: _Chat) -> _Answer:
    """Return a message as the template writes it after the messages before it; raise as `learnt_chats`."""
    chat_start = chat.asked(index)
    rendered = chat.rendered(index + 1)
    if not rendered.startswith(chat_start):
        common = len(os.path.commonprefix([chat_start, rendered]))
        raise ValueError(
            f"the chat template asks a model for message {index} with {unmarked(chat_start[common:])[-60:]!r}, but "
            f"begins the message itself with {unmarked(rendered[common:])[:60]!r}, so a model that answers never "
            f"writes this: {_ADVICE}"
        )

    # The message, and the tokens after it
    body = rendered[len(chat_start) :]
    tokenizer = chat.tokenizer
    ends = _template_ends(tokenizer)
    controls = {*special_tokens(tokenizer), *ends.tokens}
    tail = re.search(rf"(?:\s|{_any_of(controls)})*\Z", body)
    assert tail is not None
    _check_complete(index, chat.messages[index], chat_start, body[: tail.start()])

    # The turn ends with the template's token for it, or else with the last control token after the message
    tokens = list(re.finditer(_any_of(controls), body[tail.start() :]))
    if tokens:
        end_token = next((token for token in tokens if token[0] in ends.tokens), tokens[-1])
        return _Answer(chat_start, body[: tail.start() + end_token.end()], "")
    if ends.texts and body.rstrip().endswith(ends.texts):
        return _Answer(chat_start, body.rstrip(), "")

    # Or with the token that begins the next message
    followed = chat.followed(index + 1)
    next_tokens = _any_of(controls - {tokenizer.bos_token})
    next_token = re.match(rf"\s*(?:{next_tokens})", followed[len(rendered) :])
    if followed.startswith(rendered) and next_token is not None:
        return _Answer(chat_start, body, next_token[0])

    # Or with EOS
    eos_ids(tokenizer)
    _warn_once(
        "the chat template writes no special token at the end of an assistant's message: %r is learnt there, because "
        "it alone ends a turn",
        tokenizer.eos_token,
    )
    return _Answer(chat_start, body.rstrip(), str(tokenizer.eos_token))


def _check_complete(index: int, message: Message, chat_start: str, body: str) -> None:
    """Raise a ValueError if the template leaves out what the assistant says, thinks or calls.

    Args:
        index: index of the message.
        message: the message.
        chat_start: rendered chat before the answer.
        body: what the template writes of the message, before the end of the turn.
    """
    # What it says and thinks
    fields: Mapping[str, object] = message
    texts = {name: str(fields[name]) for name in ("content", *THOUGHTS) if name in fields}
    for name, text in texts.items():
        if _without_space(text) not in _with_start(text, chat_start, body):
            raise _left_out(name, text, index, body)

    # The names of its calls, which it may also say or think
    dense_texts = [_without_space(text) for text in texts.values()]
    longest_text = max(texts.values(), key=len, default="")
    answer = _with_start(longest_text, chat_start, body)
    called_names = [str(call.get("function", call).get("name", "")) for call in message.get("tool_calls", [])]
    for name in called_names:
        dense_name = _without_space(name)
        mentions = max((text.count(dense_name) for text in dense_texts), default=0)
        if answer.count(dense_name) < mentions + called_names.count(name):
            raise _left_out(f"tool_calls ({name})", name, index, body)


def _left_out(name: str, text: str, index: int, body: str) -> ValueError:
    """Return the error about a text of a message that the template does not write."""
    return ValueError(
        f"the chat template leaves out the {name} of message {index}, {unmarked(text)[:100]!r}: it writes "
        f"{unmarked(body)[:100]!r}. Use a template that writes it, leave it out of the data, or {_ADVICE}"
    )


def _with_start(text: str, chat_start: str, body: str) -> str:
    """Return where a text of an answer may stand, without white space: in the body and the start of the answer.

    The start of the answer may have written the text's beginning already, such as <think>, but never all of it.
    """
    start = _without_space(chat_start[-2 * len(text) :])
    num_before = len(_without_space(text)) - 1
    return start[max(0, len(start) - num_before) :] + _without_space(body)


def _learnt_chat(rendered: str, answers: Sequence[_Answer], chat: _Chat) -> LearntChat:
    """Tokenize a rendered chat, and mark these answers in it, which are in order."""
    # The text, with ends that the template does not write, and where each answer starts and stops in it
    text = ""
    position = 0
    bounds = []
    for answer in answers:
        stop = len(answer.chat_start) + len(answer.text)
        text += rendered[position : len(answer.chat_start)]
        start = len(text)
        text += answer.text
        if answer.end and rendered[stop:].startswith(answer.end):
            stop += len(answer.end)
        text += answer.end
        bounds.append((start, len(text)))
        position = stop
    text += rendered[position:]

    # The tokens of the text; those of the answers are learnt
    ids = chat.ids(text)
    learnt = [False] * len(ids)
    for start, stop in bounds:
        start_token = _count_tokens(text, start, ids, chat)
        stop_token = _count_tokens(text, stop, ids, chat)
        learnt[start_token:stop_token] = [True] * (stop_token - start_token)
    return LearntChat(ids, learnt)


def _count_tokens(text: str, position: int, ids: list[int], chat: _Chat) -> int:
    """Return how many tokens are before a position of a text; raise a ValueError if a token lies across it."""
    ids_before = chat.ids(text[:position])
    if ids[: len(ids_before)] != ids_before:
        left = unmarked(text[:position])[-30:]
        right = unmarked(text[position:])[:30]
        raise ValueError(
            f"the tokenizer joins the end of {left!r} and the beginning of {right!r} in one token, so a model that "
            "answers there never writes this: begin the answer as the template expects it (with its thoughts, without "
            f"white space), or {_ADVICE}"
        )
    return len(ids_before)


def _any_of(tokens: set[str]) -> str:
    """Pattern that matches one of these tokens, the longest first; if there are none, nothing."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return "|".join(re.escape(token) for token in longest_first) or r"(?!)"


def _without_space(text: str) -> str:
    """Return a text without white space, which templates trim and add."""
    return "".join(text.split())
