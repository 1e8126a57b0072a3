"""Chat messages as data sets and requests have them: checked, their parts joined, an answer added."""

from collections.abc import Mapping, Sequence
from typing import Any, Required, TypedDict, TypeGuard, cast

import numpy as np

from textenv.json_files import parse_json

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message that hold its thoughts, by the custom of different models."""
_TEXT_PARTS = (None, "text", "input_text", "output_text")
"""Types of content parts that hold text, in the protocols of OpenAI and others."""


class Message(TypedDict, total=False):
    """A chat message, such as ``{"role": "user", "content": "..."}``; chat templates may read further fields."""

    role: Required[str]
    content: str
    tool_calls: list[dict[str, Any]]
    """Calls of tools by an assistant: ``{"type": "function", "function": {"name": ..., "arguments": {...}}}``."""
    tool_call_id: str
    name: str
    """Name of the tool whose result a message of role ``tool`` holds."""
    reasoning_content: str
    """An assistant's thoughts; also under the names in `THOUGHTS`."""
    reasoning: str
    thinking: str


def is_messages(value: object) -> TypeGuard[Sequence[object]]:
    """Return True for a sequence or array whose first item is a mapping. It is meant as a chat; it may have errors."""
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, (Sequence, np.ndarray)):
        return False
    return len(value) > 0 and isinstance(value[0], Mapping)


def read_messages(messages: Sequence[object], *, where: str, from_data: bool = False) -> list[Message]:
    """Check chat messages; fields without a value are left out, and parts of a content are joined to one text.

    Arguments of calls become objects, as chat templates read them; data sets and requests may have them as JSON text.

    Args:
        messages: mappings with a ``"role"`` and a ``"content"``: a text, or parts such as ``{"type": "text", "text":
            "..."}``. An assistant's message of ``"tool_calls"`` or thoughts needs no content.
        where: name of the chat in errors, such as ``"prompt 3"``.
        from_data: the messages are of a row of data, where tables (Parquet, `datasets`, pandas) give each call the
            arguments of all others, too, with None: these are left out. Null in JSON text stays.

    Raises:
        ValueError: if a message has another form, a part that is no text, such as an image, or arguments of a call that
            are no JSON object.
    """
    return [_read_message(message, where, from_data) for message in messages]


def _read_message(message: object, where: str, from_data: bool) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} has the message {message!r:.200}, expected {{'role': ..., 'content': ...}}")

    # Tables fill the fields that a message lacks with None
    fields = {str(name): value for name, value in message.items() if value is not None}
    for name in ("content", *THOUGHTS):
        if name in fields:
            fields[name] = _read_text(fields[name], name, message, where)
    if "tool_calls" in fields:
        fields["tool_calls"] = _read_calls(fields["tool_calls"], message, where, from_data)

    has_calls_or_thoughts = any(fields.get(name) for name in ("tool_calls", *THOUGHTS))
    may_lack_content = fields["role"] == "assistant" and has_calls_or_thoughts
    if "content" not in fields and not may_lack_content:
        raise ValueError(
            f"{where} has the message {message!r:.200}, expected {{'role': ..., 'content': ...}}: only an assistant's "
            "message of 'tool_calls' or 'reasoning_content' may leave the content out"
        )
    return cast("Message", fields)  # its fields are those of a message, as checked above


def _read_text(content: object, name: str, message: object, where: str) -> str:
    """Return the text of a content, its parts joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple, np.ndarray)):
        raise ValueError(f"{where} has a message with the {name} {content!r:.200}, expected a text or parts of text")
    texts = []
    for part in content:
        text = part
        kind = None
        if isinstance(part, Mapping):
            text = part.get("text")
            kind = part.get("type")
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise ValueError(
                f"{where} has a message with the part {part!r:.100}, expected {{'type': 'text', 'text': ...}}: models "
                "here read text only, so say in words what images or sounds show, or leave the row out"
            )
        texts.append(text)
    return "".join(texts)


def _read_calls(calls: object, message: object, where: str, from_data: bool) -> list[dict[str, Any]]:
    """Return an assistant's calls of tools as a list of mappings, with their arguments as objects."""
    if not isinstance(calls, (list, tuple, np.ndarray)) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(
            f"{where} has a message with the tool_calls {calls!r:.200}, expected a list such as "
            "[{'type': 'function', 'function': {'name': ..., 'arguments': {...}}}]"
        )
    read: list[dict[str, Any]] = []
    for call in calls:
        call = plain_json(call, without_none=from_data)
        # Some have name and arguments by themselves
        if "function" not in call and "name" in call:
            function = {name: call.pop(name) for name in ("name", "arguments") if name in call}
            call = {"type": "function", **call, "function": function}
        if isinstance(call.get("function"), dict):
            call["function"] = _with_arguments_as_object(call["function"], where)
        read.append(call)
    return read


def _with_arguments_as_object(function: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a call's function with its arguments as an object; OpenAI's protocol has them as JSON text."""
    arguments = function.get("arguments")
    if not arguments:  # none, which a table fills with None
        return function | {"arguments": {}}
    if not isinstance(arguments, str):
        return function
    try:
        value = parse_json(arguments)
    except ValueError as error:
        raise ValueError(f"{where} has a call with the arguments {arguments!r:.200}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} has a call with the arguments {arguments!r:.200}, expected a JSON object")
    return function | {"arguments": value}


def plain_json(value: Any, *, without_none: bool) -> Any:
    """Return a value with Python's lists, dicts and numbers, as JSON has them, for arrays, tensors and NumPy's numbers.

    Args:
        value: what a row of data has.
        without_none: leave out the entries of dicts that are None, with which tables fill what a dict lacks.

    Example:
        >>> plain_json({"sizes": np.array([1, 2]), "city": None}, without_none=True)
        {'sizes': [1, 2]}
    """
    if hasattr(value, "tolist"):  # of arrays, tensors and NumPy's numbers
        value = value.tolist()
    if isinstance(value, Mapping):
        entries: dict[str, Any] = {}
        for name, entry in value.items():
            if entry is not None or not without_none:
                entries[str(name)] = plain_json(entry, without_none=without_none)
        return entries
    if isinstance(value, (list, tuple)):
        return [plain_json(entry, without_none=without_none) for entry in value]
    return value


def answer_beginning(messages: Sequence[Message]) -> str | None:
    """Return the beginning of an answer, for a policy to continue, if a chat ends with one; else None.

    Raises:
        ValueError: if the chat ends with an assistant's message that has no text to continue.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return None
    last = messages[-1]
    if last.get("tool_calls") or "content" not in last:
        raise ValueError(
            f"prompt {messages!r:.300} ends with an assistant's message without a text that could be continued: add "
            "the tools' results or what the user says next, or leave that message out"
        )
    return str(last["content"])


def with_answer(prompt: Sequence[Message], answer: Sequence[Message]) -> list[Message]:
    """Add an answer to a chat. If the chat ends with the beginning of an answer, the first message continues it.

    Raises:
        ValueError: as `answer_beginning`.

    Example:
        >>> asked, begun = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}
        >>> with_answer([asked, begun], [{"role": "assistant", "content": " 4."}])[1:]
        [{'role': 'assistant', 'content': 'It is 4.'}]
    """
    begun = answer_beginning(prompt)
    if begun is None or not answer or answer[0]["role"] != "assistant":
        return [*prompt, *answer]
    joined = prompt[-1] | answer[0] | {"content": begun + answer[0].get("content", "")}
    return [*prompt[:-1], joined, *answer[1:]]


def prompt_and_answer(prompt: Sequence[Message], text: str) -> tuple[list[Message], list[Message]]:
    """Return the messages before an answer, and the answer as a message, for rewards (the convention of TRL).

    The beginning of the answer with which the prompt may end is in the answer.
    """
    chat = with_answer(prompt, [{"role": "assistant", "content": text}])
    return chat[:-1], chat[-1:]


def without_prompt(answer: Sequence[Message], prompt: Sequence[Message]) -> list[Message]:
    """Return an answer without the prompt, where the data repeats the prompt before the answer."""
    messages = list(answer)
    length = len(prompt)
    if messages[:length] == list(prompt):
        return messages[length:]
    return messages
