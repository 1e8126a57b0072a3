"""Tokenization of prompts, of chats with the model's chat template, and of environment replies.

Token ids are made once and appended; the policy's completions are never tokenized again.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from textenv.prompts.messages import Message, answer_beginning, read_messages
from textenv.prompts.prompts import Prompt
from textenv.prompts.special_tokens import (
    broken_up,
    check_unicode,
    field_names,
    first_special_token,
    ordinary_ids,
    special_tokens,
    strings,
    with_strings,
)
from textenv.rendering import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_START = "\U000f0000"
"""Private-use character before each control token that a message spells; templates pass it through."""
_END = "\U000f0001"
"""Private-use character after it."""
_MARKS = f"[{_START}{_END}]"
"""Pattern of both."""
_PRIVATE_USE = range(0xF0002, 0xFFFFE)
"""Further private-use characters; one stands for an assistant's message, to find the text that follows it."""
_MAX_CLOSING_TOKENS = 16
"""Maximum number of tokens in which a template closes a message."""
_KIND_OF_ROLE = {"system": "system messages", "developer": "developer messages"}
"""Roles whose messages some chat templates leave out, and the words for them in `warn_of_unwritten`."""
_TOOLS = "tools"
"""The word for schemas of tools there."""
_UNWRITTEN: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, frozenset[str]]] = WeakKeyDictionary()
"""For each tokenizer its chat template, and what that leaves out, in these words."""
_JSON_OBJECTS = re.compile(r'\s*\[?\s*\{\s*"')
"""Beginning of an object of JSON that is not empty, or of a list of such objects."""
_warn = functools.cache(logging.getLogger(__name__).warning)


def is_chat(prompt: Prompt) -> bool:
    """Return True if the prompt is a list of messages."""
    return not isinstance(prompt.content, str) and isinstance(prompt.content[0], dict)


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, **options: object) -> list[int]:
    """Return the token ids of a prompt.

    A text gets the tokenizer's own special tokens, with at most one BOS, but not those that end a finished text
    (`ending_ids`). A chat is rendered by the chat template up to the start of the assistant's message. If the chat ends
    with an assistant's message, this message is the beginning of the answer, and the ids end with it. Calls of tools
    that the template would leave out are written into the messages' texts (`with_written_calls`). Special tokens
    spelled in a text or message are read as plain text; to use these tokens, give ids.

    Raises:
        ValueError: if the prompt has no tokens, the chat ends with an assistant's message that has no text to continue,
            or as `chat_ids` or `ordinary_ids` does.
    """
    if is_chat(prompt):
        messages = read_messages(prompt.messages, where="the prompt")
        template_options = _start_options(messages) | options
        if _loses_calls(messages, tokenizer, **template_options):
            messages = with_written_calls(messages)
        ids = chat_ids(messages, tokenizer, after="", **template_options)
    elif isinstance(prompt.content, str):
        ids = _prompt_text_ids(prompt.content, tokenizer)
    else:
        ids = [int(token) for token in prompt.content if not isinstance(token, dict)]
    if not ids:
        raise ValueError(f"prompt {prompt.content!r:.200} has no tokens: a policy needs at least one to start from")
    return ids


def with_written_calls(messages: Sequence[Message]) -> list[Message]:
    """Return a chat whose earlier calls stand in the texts, as a model writes them, for templates without tools."""
    written: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            lines = [f"<tool_call>\n{json.dumps(call.get('function'))}\n</tool_call>" for call in calls]
            content = "\n".join(filter(None, [message.get("content", ""), *lines]))
            message = _without_calls(message, content)
        written.append(message)
    return written


def _without_calls(message: Message, content: str) -> Message:
    """Return a message with this content and without its calls; its other fields, such as thoughts, stay."""
    bare: Message = {**message, "content": content}
    bare.pop("tool_calls", None)
    return bare


def _loses_calls(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, **options: object) -> bool:
    """Return True if the chat template writes the same without the calls that messages have."""
    if not any(message.get("tool_calls") for message in messages):
        return False
    without: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            message = _without_calls(message, message.get("content", ""))
        without.append(message)
    check_template(messages, tokenizer)
    try:
        return render(messages, tokenizer, **options) == render(without, tokenizer, **options)
    except ValueError:  # it refuses one of them, so the calls make a difference
        return False


def reply_ids(
    reply: str | Sequence[Message], prompt: Prompt, ids_so_far: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return the token ids to append for a reply of the environment.

    Args:
        reply: text of the reply, or a list of messages with the results of tools.
        prompt: the episode's prompt; if it is a chat, the reply is rendered by the chat template.
        ids_so_far: token ids that end with the policy's turn.
        tokenizer: the policy's tokenizer.
    """
    if not is_chat(prompt):
        return text_ids(_reply_text(reply), tokenizer)
    if isinstance(reply, str):
        reply = [{"role": "user", "content": reply}]

    # Render a short chat whose assistant message is one character that occurs nowhere else
    first = prompt.messages[0]
    system: list[Message] = []
    if first["role"] == "system":
        system = [first]
    texts = "".join(strings([*system, *reply]))
    answer = next(character for character in map(chr, _PRIVATE_USE) if character not in texts)
    chat: list[Message] = [*system, {"role": "user", "content": "."}, {"role": "assistant", "content": answer}]
    ids = chat_ids([*chat, *reply], tokenizer, after=answer)

    # The first tokens close the assistant's message: drop those that the policy has written already
    max_count = min(len(ids), len(ids_so_far), _MAX_CLOSING_TOKENS)
    for count in range(max_count, 0, -1):
        if list(ids_so_far[-count:]) == ids[:count]:
            return ids[count:]

    # The policy may have closed it by another token: the one with which the template closes the last message
    last_message_ids = chat_ids(chat, tokenizer, after=answer, add_generation_prompt=False)
    closing_ids = _without_space(ids, tokenizer)
    closing_ids_at_end = _without_space(last_message_ids, tokenizer)
    if ids_so_far[-1] in (*closing_ids[:1], *closing_ids_at_end[:1]):
        return closing_ids[1:]
    return ids


def _reply_text(reply: str | Sequence[Message]) -> str:
    """Return the text of a reply where there is no chat: results of tools stand in tags."""
    if isinstance(reply, str):
        return reply
    return "".join(f"\n<tool_response>\n{message['content']}\n</tool_response>\n" for message in reply)


def _without_space(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids without the first tokens that are white space."""
    start = 0
    while start < len(ids) and not str(tokenizer.decode(ids[start])).strip():
        start += 1
    return ids[start:]


def chat_ids(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, after: str = "", **options: object
) -> list[int]:
    """Return the token ids of a chat by the tokenizer's template; all special tokens come from the template.

    Args:
        messages: chat messages; special tokens that they spell are read as plain text.
        tokenizer: tokenizer with a chat template.
        after: text of a message; only the part after this text is returned. Empty: all.
        options: options of the tokenizer's ``apply_chat_template``, such as ``tools``; by default
            ``add_generation_prompt=True``.

    Raises:
        ValueError: if there is no template, if it refuses the messages, or if a special token that they spell looks
            like the template's own.
    """
    check_template(messages, tokenizer)
    protected, marked = protect(messages, tokenizer)
    options = {"add_generation_prompt": True} | options
    text = render(protected, tokenizer, **options)
    if after:
        times = text.count(after)
        if times != 1:
            raise ValueError(
                f"the tokenizer's chat template writes an assistant message {times} times, expected once: "
                "use another template for conversations"
            )
        _, _, text = text.partition(after)
    return rendered_ids(text, tokenizer, marked=marked)


def check_template(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError if the tokenizer has no chat template for these messages."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"prompt {messages!r:.200} is a chat, but the tokenizer has no chat template: set tokenizer.chat_template, "
            "or give the prompt as text (without system_prompt and chat)"
        )


def has_system_message(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the tokenizer's chat template writes a system message; some refuse it, others leave it out."""
    return _writes_role("system", tokenizer)


def _writes_role(role: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the chat template writes a first message of this role."""
    content = chr(_PRIVATE_USE[0])
    messages: list[Message] = [{"role": role, "content": content}, {"role": "user", "content": "."}]
    try:
        return content in render(messages, tokenizer, add_generation_prompt=True)
    except ValueError:
        return False


def warn_of_unwritten(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, has_tools: bool = False
) -> None:
    """Log a warning, once for each cause, if a chat template leaves out messages of the system or developer, or tools.

    What a template leaves out is found once, so the function takes no time on further chats.

    Args:
        messages: the chat; none for a text.
        tokenizer: tokenizer with a chat template.
        has_tools: True if the template was given schemas of tools, too.
    """
    # What the chat has to lose
    roles = {message["role"] for message in messages}
    kinds = [kind for role, kind in _KIND_OF_ROLE.items() if role in roles]
    if has_tools:
        kinds.append(_TOOLS)
    if not kinds:
        return

    # What is lost
    owner = tokenizer.name_or_path or "the tokenizer"
    unwritten = _unwritten_kinds(tokenizer)
    for kind in kinds:
        if kind in unwritten:
            _warn(
                "the chat template of %s does not write %s, so the model never reads them: put their text into the "
                "user's first message, or use another template",
                owner,
                kind,
            )


def _unwritten_kinds(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return what the chat template leaves out or refuses, of the kinds of `warn_of_unwritten`; found once."""
    cached = _UNWRITTEN.get(tokenizer)
    if cached is not None and cached[0] == tokenizer.chat_template:
        return cached[1]

    kinds = {kind for role, kind in _KIND_OF_ROLE.items() if not _writes_role(role, tokenizer)}
    if not _writes_tools(tokenizer):
        kinds.add(_TOOLS)
    unwritten = frozenset(kinds)
    _UNWRITTEN[tokenizer] = tokenizer.chat_template, unwritten
    return unwritten


def _writes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the chat template writes the schemas of tools, or refuses them with an error."""
    question: Message = {"role": "user", "content": "."}
    parameters = {"type": "object", "properties": {}}
    function = {"name": "look", "description": "Look around.", "parameters": parameters}
    schema = {"type": "function", "function": function}
    try:
        return render([question], tokenizer) != render([question], tokenizer, tools=[schema])
    except ValueError:
        return True


def unread_columns(prompt: Prompt) -> list[str]:
    """Return the names of a chat's columns for the chat template, which only `algos.sft` reads."""
    if not is_chat(prompt):
        return []
    names = ("chat_template_kwargs", "tools")
    return [name for name in names if _has_objects(prompt.columns.get(name))]  # others may have the same name


def warn_of_unread_columns(prompt: Prompt) -> None:
    """Log a warning, once for each of them, if a chat has `unread_columns`."""
    for name in unread_columns(prompt):
        _warn(
            "the prompts have the column %s, which only sft reads: their texts are written without it (an "
            "environment takes %s= for all its prompts)",
            name,
            name,
        )


def _has_objects(value: object) -> bool:
    """Return True for an object of JSON that is not empty, and for a list with one, as Python's or as text."""
    if isinstance(value, str):
        return _JSON_OBJECTS.match(value) is not None
    entries: list[object] = [value]
    if isinstance(value, (Sequence, np.ndarray)):
        entries = list(value)
    return any(isinstance(entry, Mapping) and len(entry) > 0 for entry in entries)


def protect(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[list[Message], bool]:
    """Put marks around the control tokens that messages spell, so that `rendered_ids` reads them as text.

    Returns:
        The messages, and whether they have marks.

    Raises:
        ValueError: as `chat_ids`.
    """
    patterns = _control_tokens(messages, tokenizer)
    if patterns is None:
        return list(messages), False
    broken = with_strings(messages, functools.partial(broken_up, tokenizer=tokenizer))
    protected = [_marked(message, pattern) for message, pattern in zip(broken, patterns, strict=True)]
    return protected, True


def rendered_ids(text: str, tokenizer: PreTrainedTokenizerBase, *, marked: bool) -> list[int]:
    """Return the token ids of a rendered chat, or of a part; ``marked`` says whether it has marks (`protect`)."""
    if marked:
        return _marked_ids(text, tokenizer)
    return _usual_ids(text, tokenizer)


def unmarked(text: str) -> str:
    """Return a rendered chat without marks, for errors."""
    return re.sub(_MARKS, "", text)


def _start_options(messages: Sequence[Message]) -> dict[str, bool]:
    """Return the options of the chat template with which a rendered chat ends where the policy begins to write."""
    if answer_beginning(messages) is None:
        return {"add_generation_prompt": True}
    return {"add_generation_prompt": False, "continue_final_message": True}


def separate_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text by itself: no special tokens are added, spelled ones are read as text.

    Tokenizers made by SentencePiece (Llama 2, Mistral, T5) put a space before it.
    """
    if not text:
        return []
    return ordinary_ids(text, tokenizer, add_special_tokens=False)


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text that goes on inside an episode, without a space that only begins a text.

    As by `separate_ids`, but as the text stands behind another one. Answers of encoder-decoder models are texts by
    themselves.
    """
    habits = _habits(tokenizer)
    if habits.ends_texts or not habits.begins_with_space:
        return separate_ids(text, tokenizer)
    return _ids_inside(text, functools.partial(separate_ids, tokenizer=tokenizer))


def begins_message(prompt: Prompt) -> bool:
    """Return True if the answer to a prompt is a message of a chat, of which the prompt has no beginning."""
    return is_chat(prompt) and answer_beginning(prompt.messages) is None


def answer_ids(text: str, tokenizer: PreTrainedTokenizerBase, *, is_message: bool) -> list[int]:
    """Return the token ids of a text that the policy might write.

    Args:
        text: the text.
        tokenizer: the policy's tokenizer.
        is_message: whether it is a whole message of a chat (`begins_message`). Then the white space that the chat
            template writes before an answer stands before it, if the tokenizer leaves it out when it decodes.
    """
    space = _habits(tokenizer).space_before_answer
    if text and space and is_message:
        ids = text_ids(space + text, tokenizer)
        if tokenizer.decode(ids) == text:
            return ids
    return text_ids(text, tokenizer)


def starts_answers_anew(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the tokenizer ends texts by EOS, as those of encoder-decoder models do (T5, BART).

    Their answers do not go on behind the prompt: the decoder writes a text of its own.
    """
    return _habits(tokenizer).ends_texts


def ending_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that the tokenizer appends to a finished text: EOS (T5), ``[SEP]`` (BERT), or none.

    A prompt that is a text ends without them, because it goes on; an encoder reads them.
    """
    return _habits(tokenizer).ending_ids


class _Habits(NamedTuple):
    """What a tokenizer and its chat template do around texts, and what this depends on."""

    special: dict[str, int]
    """Ids of the special tokens by their spelling."""
    template: object
    """The chat template."""
    ending_ids: list[int]
    """Token ids that the tokenizer appends to a text (`ending_ids`)."""
    ends_texts: bool
    """The tokenizer ends a text by EOS."""
    begins_with_space: bool
    """It puts a space before the first word of a text."""
    space_before_answer: str
    """White space that the template writes before an answer."""


_HABITS: WeakKeyDictionary[PreTrainedTokenizerBase, _Habits] = WeakKeyDictionary()
"""Habits of each tokenizer; a rule may ask for the ids of many texts at every token."""


def _habits(tokenizer: PreTrainedTokenizerBase) -> _Habits:
    """Return a tokenizer's habits, found once for its special tokens and its template."""
    special = special_tokens(tokenizer)
    habits = _HABITS.get(tokenizer)
    if habits is not None and habits.special is special and habits.template == tokenizer.chat_template:
        return habits

    eos = tokenizer.eos_token_id
    appended_ids = _appended_ids(tokenizer)
    if eos in appended_ids[:-1]:  # EOS and a language (mBART), which is an encoder's, and which may be changed later
        appended_ids = []
    encode = functools.partial(_usual_ids, tokenizer=tokenizer)
    habits = _Habits(
        special=special,
        template=tokenizer.chat_template,
        ending_ids=appended_ids,
        ends_texts=eos is not None and appended_ids[-1:] == [eos],
        begins_with_space=_ids_inside("a", encode) != encode("a"),
        space_before_answer=_space_before_answer(tokenizer),
    )
    _HABITS[tokenizer] = habits
    return habits


def _appended_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return all token ids that the tokenizer puts after a text, by a text with and without its special tokens."""
    for text in ("a", *tokenizer.get_vocab()):  # "a" has no ids in a small alphabet without it
        ids_alone = _usual_ids(text, tokenizer)
        if not ids_alone:
            continue
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        for start in range(len(ids) - len(ids_alone) + 1):
            stop = start + len(ids_alone)
            if ids[start:stop] == ids_alone:
                return ids[stop:]
        return []
    return []


def _space_before_answer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the white space that the chat template writes between the start of an answer and its content."""
    user: Message = {"role": "user", "content": "."}
    content = chr(_PRIVATE_USE[0])
    try:
        start = render([user], tokenizer, add_generation_prompt=True)
        chat = render([user, {"role": "assistant", "content": content}], tokenizer, add_generation_prompt=False)
    except ValueError:  # a template that takes no such chat
        return ""
    space, _, _ = chat.removeprefix(start).partition(content)
    if chat.startswith(start) and not space.strip():
        return space
    return ""


def _ids_inside(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the token ids of a text behind another one: some tokenizers put a space before a text's first word."""
    ids_alone = encode(text)
    newline = encode("\n")
    ids_behind = encode(f"\n{text}")
    if newline and ids_behind[: len(newline)] == newline:
        return ids_behind[len(newline) :]
    return ids_alone


def without_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Remove an EOS spelled at the end of a text, because the caller appends EOS."""
    return text.removesuffix(tokenizer.eos_token or "")


def warn_of_spelling(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a warning, once per token, if a text of the data spells special tokens: they are read as text."""
    for token in special_tokens(tokenizer):
        # The text may be a chat that is rendered already, or a completion with EOS appended
        if token in text:
            hint = "if you mean the token, give chat messages or token ids; a completion gets its EOS automatically"
            _warn("a prompt or completion spells out the special token %r, which is read as text: %s", token, hint)


def _prompt_text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a prompt that is a text."""
    text = _without_bos(text, tokenizer)
    warn_of_spelling(text, tokenizer)
    ids = ordinary_ids(text, tokenizer)

    # Tokens that end a finished text, and an EOS, would end the completion before it begins
    ending = ending_ids(tokenizer)
    if ending and len(ids) > len(ending) and ids[-len(ending) :] == ending:
        ids = ids[: -len(ending)]
    while len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids


def _without_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text without a BOS at its beginning, which would stand beside the one that the tokenizer adds."""
    bos = tokenizer.bos_token
    if bos and text.startswith(bos):
        added_ids = tokenizer("", verbose=False)["input_ids"]
        while text.startswith(bos) and added_ids[:1] == [tokenizer.bos_token_id]:
            text = text.removeprefix(bos)
    return text


def spelled_token(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the first special token that a prompt's text spells, and that is read as letters; empty if none."""
    return first_special_token(_without_bos(text, tokenizer), tokenizer)


def _control_tokens(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[re.Pattern[str]] | None:
    """Return, for each message, a pattern of its control tokens; None if no message spells one.

    Control tokens are special tokens and added tokens that the template writes, such as ``<think>``. In assistant
    messages the added tokens stay tokens.

    Raises:
        ValueError: as `chat_ids` does.
    """
    special, written = _tokens_of_template(tokenizer)
    check_unicode(messages)

    # Nearly always, no message spells one
    unusual_names = [name for name in field_names(messages) if not name.isidentifier()]
    parts = [_parts_text(message) for message in messages]
    texts = "\n".join([*strings(messages), *unusual_names, *parts])
    if not any(token in texts for token in (*special, *written)):
        return None

    # Marks can be put into texts, but not around names and parts
    in_assistants = _any_of(special)
    in_others = _any_of([*special, *written])
    patterns = []
    for message, parts_text in zip(messages, parts, strict=True):
        pattern = in_others
        if message["role"] == "assistant":
            pattern = in_assistants
        match = pattern.search("\n".join([*unusual_names, parts_text]))
        if match is not None:
            raise ValueError(
                f"a message spells out the special token {match[0]!r} in a list of parts, its role or the name of a "
                f"field, where it looks like the chat template's own: {message!r:.200}. Give its content as one text"
            )
        patterns.append(pattern)
    return patterns


def _tokens_of_template(tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """Return the special tokens, and other added tokens that the chat template writes."""
    template = str(tokenizer.get_chat_template())
    special = []
    written = []
    for token in tokenizer.added_tokens_decoder.values():
        spelling = str(token)
        if token.special:
            special.append(spelling)
        elif spelling in template and spelling.strip():
            written.append(spelling)
    return special, written


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of these tokens, the longest first; without tokens it never matches."""
    longest_first = sorted(tokens, key=len, reverse=True)
    alternatives = "|".join(re.escape(token) for token in longest_first)
    return re.compile(alternatives or r"(?!)")


def _marked(message: Message, tokens: re.Pattern[str]) -> Message:
    """Return the message with marks around each of these tokens in its texts."""

    def mark(text: str) -> str:
        return tokens.sub(rf"{_START}\g<0>{_END}", unmarked(text))

    return with_strings(message, mark)


def _marked_ids(chat: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a rendered chat; marked parts are read as text.

    (`transformers` >= 5.20 does this itself.) A template that cuts texts may leave an unpaired mark. It is dropped, and
    both sides are tokenized separately.
    """
    tokens = _any_of(list(tokenizer.get_added_vocab())).pattern
    pieces = re.split(f"{_START}({tokens}){_END}|{_MARKS}", chat)
    ids = []
    for number, piece in enumerate(pieces):
        if not piece:
            continue
        is_marked = number % 2 == 1  # re.split puts the marked tokens between the other pieces
        encode = functools.partial(_usual_ids, tokenizer=tokenizer)
        if is_marked:
            encode = functools.partial(_base_ids, tokenizer=tokenizer)
        if number > 0:
            piece_ids = _ids_inside(piece, encode)
        else:
            piece_ids = encode(piece)
        if is_marked and tokenizer.convert_tokens_to_ids(piece) in piece_ids:
            raise ValueError(f"the tokenizer reads {piece!r} in a message as a special token: remove it")
        ids += piece_ids
    return ids


def _usual_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text in which special tokens are tokens; none is added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _base_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text by the base vocabulary alone: added tokens, special or not, are not matched."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = [text]
    if backend.pre_tokenizer is not None:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    ids = []
    for word in words:
        ids += [token.id for token in backend.model.tokenize(word)]
    return ids


def _parts_text(message: Message) -> str:
    """Return the texts of a message's parts, joined without a separator, as a template may render them."""
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return ""
    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "".join(strings(texts))


def _with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return a chat whose calls have their arguments as JSON text instead of objects."""
    changed: list[Message] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or []:
            function = call.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
                text = json.dumps(function["arguments"], ensure_ascii=False)
                call = {**call, "function": {**function, "arguments": text}}
            calls.append(call)
        if calls:
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed


def render(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, **options: object) -> str:
    """Return the text of a chat by the tokenizer's template; raise a ValueError if the template refuses the messages.

    If it refuses them and some have no content (but tool calls), it is asked again with empty contents; and then with
    the arguments of calls as JSON text, to which some templates (DeepSeek's) add other text.
    """
    apply_template: Callable[..., object] = tokenizer.apply_chat_template
    try:
        return str(apply_template(list(messages), tokenize=False, **options))
    except Exception as error:  # a jinja template may raise anything
        if not all("content" in message for message in messages):
            filled: list[Message] = [{"content": "", **message} for message in messages]
            return render(filled, tokenizer, **options)
        with_texts = _with_arguments_as_text(messages)
        if with_texts != list(messages):
            return render(with_texts, tokenizer, **options)
        raise ValueError(f"the tokenizer's chat template refused {messages!r:.300}: {printable(str(error))}") from error
