"""Requests for completions, as OpenAI's protocol has them: checked, and read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from textenv.programs.run import FunctionSchemas, read_tools
from textenv.prompts.messages import Message, read_messages
from textenv.prompts.special_tokens import strings

MAX_STOP_TEXTS = 64
"""Largest number of stop texts, which are looked for after every token."""
MAX_STOP_CHARACTERS = 1000
"""Largest length of a stop text."""
MAX_CHOICES = 64
"""Maximum number of answers to one request (``n``)."""
LOWEST_TEMPERATURE = 1e-3
"""Lowest temperature above 0: logits divided by it stay far below float32's largest number."""
MAX_TEMPERATURE = 100

FIELDS = {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "n", "seed", "stop",
          "stream", "stream_options", "logprobs", "return_token_ids", "tools",
          "chat_template_kwargs", "user", "metadata", "store"}  # fmt: skip
"""Fields that are read; the last ones change no answer."""
CHAT_FIELDS = {"messages", "max_completion_tokens", "tools", "chat_template_kwargs"}
"""Fields of chats only."""

NEUTRAL: dict[str, object] = {
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "best_of": 1,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
"""Values of fields with which they change nothing; so does null."""
NEUTRAL_IF_EMPTY = {"bad_words", "echo", "functions", "ignore_eos", "logit_bias", "logprobs", "min_tokens",
                    "stop_token_ids", "suffix", "tools", "top_k", "top_logprobs", "use_beam_search"}  # fmt: skip
"""Fields that change nothing if they are false, 0 or empty. In others, such as ``enable_thinking``, false may mean
something."""
STREAM_OPTIONS = {"include_usage", "include_obfuscation"}

TYPES = {
    "model": (str, "a text"),
    "stream": (bool, "true or false"),
    "stream_options": (dict, "an object such as {\"include_usage\": true}"),
    "return_token_ids": (bool, "true or false"),
    "chat_template_kwargs": (dict, "an object such as {\"enable_thinking\": false}"),
    "user": (str, "a text"),
    "metadata": (dict, "an object"),
    "store": (bool, "true or false"),
    "parallel_tool_calls": (bool, "true or false"),
}  # fmt: skip
"""Type of each field that has one in both kinds of requests, and what a message says of it."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request for answers, checked."""

    chat: bool
    """Whether it has messages, and is answered by one; else a text is completed."""
    content: str | list[int] | list[Message]
    """What the model is to read: a text, token ids or messages."""
    tools: FunctionSchemas
    """Schemas of functions that the model may call."""
    chat_template_kwargs: Mapping[str, object]
    """Variables of the chat template."""
    model: str | None
    max_tokens: int | None
    stop: tuple[str, ...]
    num_choices: int
    temperature: float | None
    """None: the policy's own; 0: the most probable tokens."""
    seed: int | None
    stream: bool
    """Whether the answer comes as events."""
    include_usage: bool
    """Whether the last event has the numbers of tokens."""
    logprobs: bool
    return_token_ids: bool


def read_request(body: object, *, chat: bool) -> CompletionRequest:
    """Read a request; null is the same as a field that is missing.

    Args:
        body: the request, as parsed from JSON.
        chat: whether it is one for a chat: it has messages, and ``logprobs`` is true or false, not a number.

    Raises:
        ValueError: if a field has another type than in OpenAI's protocol, is beyond the bounds above, or would change
            the answer and is not supported; with the field, what was given and what is expected.
    """
    fields = _check_fields(body, chat=chat)
    _check_supported(fields, chat=chat)

    # What the model reads
    content: Any
    if chat:
        content = _read_chat(fields.get("messages"))
    else:
        content = _read_prompt(fields.get("prompt"))

    # How long, how many and how they are drawn
    limit = fields.get("max_tokens")
    limit_name = "max_tokens"
    if fields.get("max_completion_tokens") is not None:
        limit = fields["max_completion_tokens"]
        limit_name = "max_completion_tokens"
    max_tokens = _integer(limit_name, limit, low=1, high=2**31)
    num_choices = _integer("n", fields.get("n"), low=1, high=MAX_CHOICES)
    if num_choices is None:
        num_choices = 1
    temperature = _number("temperature", fields.get("temperature"), low=0, high=MAX_TEMPERATURE)
    if temperature is not None and 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"temperature is {temperature}, expected 0 (the most probable token) or at least {LOWEST_TEMPERATURE}"
        )

    # What is returned besides the text
    stream_options = cast("dict[str, object]", fields.get("stream_options") or {})
    asks_log_probs = fields.get("logprobs")
    return CompletionRequest(
        chat=chat,
        content=content,
        tools=read_tools(fields.get("tools") or ()),
        chat_template_kwargs=cast("dict[str, object]", fields.get("chat_template_kwargs") or {}),
        model=cast("str | None", fields.get("model")),
        max_tokens=max_tokens,
        stop=tuple(stop_texts(fields.get("stop"))),
        num_choices=num_choices,
        temperature=temperature,
        seed=_integer("seed", fields.get("seed"), low=0, high=2**63),
        stream=bool(fields.get("stream")),
        include_usage=bool(stream_options.get("include_usage")),
        logprobs=bool(asks_log_probs) or type(asks_log_probs) is int,  # 0 asks for those of the tokens themselves
        return_token_ids=bool(fields.get("return_token_ids")),
    )


def check_size(request: CompletionRequest, *, context: int | None, longest_token: int) -> None:
    """Refuse a text that is too long for the model before it is split into tokens, which takes seconds a megabyte.

    Args:
        request: the request.
        context: number of the model's positions; None without a limit: then any prompt passes.
        longest_token: characters of the longest token.

    Raises:
        ValueError: with the number of characters, and the largest that fits.
    """
    if context is None:
        return

    # Token ids are as many as they are
    texts: list[str] = []
    if isinstance(request.content, str):
        texts = [request.content]
    elif request.chat:
        texts = [str(message.get("content", "")) for message in cast("list[Message]", request.content)]
    texts += strings(request.chat_template_kwargs)
    characters = sum(map(len, texts))

    limit = context * longest_token
    if characters > limit:
        raise ValueError(
            f"the prompt has {characters:,} characters, and the model has {context} positions: a text for it has at "
            f"most {limit:,} characters. Give a shorter prompt."
        )


def stop_texts(stop: object) -> list[str]:
    """Return the stop texts of a request; a ValueError if they are no texts, empty, too many or too long."""
    texts = stop
    if stop is None:
        texts = []
    elif isinstance(stop, str):
        texts = [stop]
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop is {stop!r:.200}, expected a text or a list of texts, none of them empty")
    longest = max(map(len, texts), default=0)
    if len(texts) > MAX_STOP_TEXTS or longest > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"stop has {len(texts)} texts of up to {longest} characters, expected at most {MAX_STOP_TEXTS} of at most "
            f"{MAX_STOP_CHARACTERS}"
        )
    return texts


def _check_fields(body: object, *, chat: bool) -> dict[str, object]:
    """Return the fields of a request; a ValueError if one has another type than in OpenAI's protocol."""
    if not isinstance(body, dict):
        raise ValueError(f"the request is {body!r:.100}, expected a JSON object")

    # Types
    types = dict(TYPES)
    if chat:
        types["logprobs"] = (bool, "true or false")
    for name, (kind, description) in types.items():
        value = body.get(name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r:.100}, expected {description}")
    if not chat and type(body.get("logprobs")) not in (type(None), bool, int):
        raise ValueError(f"logprobs is {body['logprobs']!r:.100}, expected 0, which adds those of the tokens")

    # What is inside
    stream_options = body.get("stream_options") or {}
    for name, value in stream_options.items():
        if name not in STREAM_OPTIONS:
            raise ValueError(f"stream_options has {name!r:.100}, expected one of {', '.join(sorted(STREAM_OPTIONS))}")
        if not isinstance(value, bool):
            raise ValueError(f"stream_options has {name} {value!r:.100}, expected true or false")
    return body


def _check_supported(fields: Mapping[str, object], *, chat: bool) -> None:
    """Raise a ValueError if there are fields that would change the answer and are not supported."""
    unsupported = []
    for name, value in fields.items():
        belongs = name in FIELDS and (chat or name not in CHAT_FIELDS)
        if name == "logprobs" and not chat and value:
            belongs = False  # a number of other tokens
        changes_nothing = not value and name in NEUTRAL_IF_EMPTY
        if value is None or (name in NEUTRAL and _is_equal(value, NEUTRAL[name])):
            changes_nothing = True
        if not belongs and not changes_nothing:
            unsupported.append(name)
    if unsupported:
        advice = "leave it out"
        if chat:
            advice += ", or if it is a variable of the chat template, give it in chat_template_kwargs"
        raise ValueError(f"this server does not support {', '.join(unsupported)}: {advice}")


def _is_equal(value: object, expected: object) -> bool:
    """Return True for equal values of JSON, in which true is not 1."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def _read_prompt(prompt: object) -> str | list[int]:
    """Return a prompt; a ValueError if it is neither a text nor a list of token ids, or empty."""
    is_list_of_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not is_list_of_ids and not isinstance(prompt, str):
        raise ValueError(f"prompt is {prompt!r:.300}, expected one text or one list of token ids")
    if not prompt:
        raise ValueError(f"prompt is {prompt!r:.300}, expected a text or ids")
    return cast("str | list[int]", prompt)


def _read_chat(messages: object) -> list[Message]:
    """Return messages as chat templates read them: the arguments of calls are objects, a developer is the system.

    Raises:
        ValueError: if they are no list of objects with roles and texts.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"messages is {messages!r:.300}, expected messages with texts")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise ValueError(f'messages has {message!r:.200}, expected a role, such as "user"')
    chat = read_messages(messages, where="messages")
    for message in chat:
        if message["role"] == "developer":  # the name of newer clients, which most templates do not know
            message["role"] = "system"
        for call in message.get("tool_calls", ()):
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(
                    f"messages has a call of {function!r:.200}, expected {{'name': ..., 'arguments': ...}}"
                )
    return chat


def _number(name: str, value: object, *, low: float, high: float) -> float | None:
    """Return the number of a field, None if it has none; a ValueError if it is of another type, or out of bounds."""
    if value is None:
        return None
    if type(value) is bool or not isinstance(value, (int, float)) or not low <= value <= high:
        raise not_within(name, value, low, high)
    return value


def _integer(name: str, value: object, *, low: int, high: int) -> int | None:
    """Return the integer of a field; see `_number`."""
    number = _number(name, value, low=low, high=high)
    if number is not None and not isinstance(number, int):
        raise not_within(name, value, low, high)
    return number


def not_within(name: str, value: object, low: float, high: float) -> ValueError:
    """Return the error of a number that is out of bounds."""
    return ValueError(f"{name} is {value!r:.100}, expected a number from {low} to {high}")
