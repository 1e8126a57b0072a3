"""Types and bounds of the fields of a request to ``algos serve``, checked before an answer begins."""

from collections.abc import Mapping

MAX_STOP_TEXTS = 64
"""Largest number of stop texts, which are looked for after every token."""

MAX_STOP_CHARACTERS = 1000
"""Largest length of a stop text."""

TYPES = {
    "model": (str, "a text"),
    "stream": (bool, "true or false"),
    "stream_options": (dict, "an object such as {\"include_usage\": true}"),
    "return_token_ids": (bool, "true or false"),
    "user": (str, "a text"),
    "metadata": (dict, "an object"),
    "store": (bool, "true or false"),
    "parallel_tool_calls": (bool, "true or false"),
}  # fmt: skip
"""Type of each field that has one in both kinds of requests, and what a message says of it."""


def check_fields(body: object, *, chat: bool) -> dict[str, object]:
    """Return a request; refuse one with a field of another type than in OpenAI's protocol, or beyond the bounds above.

    Args:
        body: the request, as parsed from JSON; null is the same as a field that is missing.
        chat: whether it is one for a chat: it has messages, and ``logprobs`` is true or false, not a number.

    Raises:
        ValueError: with the field, what was given and what is expected.
    """
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
        if not isinstance(value, bool):
            raise ValueError(f"stream_options has {name} {value!r:.100}, expected true or false")
    if chat:
        check_messages(body.get("messages"))
    else:
        check_prompt(body.get("prompt"))
    stop_texts(body.get("stop"))
    return body


def check_prompt(prompt: object) -> None:
    """Raise a ValueError if a prompt is neither a text nor a list of token ids."""
    is_list_of_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not is_list_of_ids and not isinstance(prompt, str):
        raise ValueError(f"prompt is {prompt!r:.300}, expected one text or one list of token ids")


def check_messages(messages: object) -> None:
    """Raise a ValueError if messages are no list of objects with a role."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"messages is {messages!r:.300}, expected messages with texts")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise ValueError(f'messages has {message!r:.200}, expected a role, such as "user"')


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


def check_prompt_size(body: Mapping[str, object], *, chat: bool, context: int | None, longest_token: int) -> None:
    """Refuse a text that is too long for the model before it is split into tokens, which takes seconds a megabyte.

    Args:
        body: a request that `check_fields` has passed.
        chat: whether it has messages.
        context: number of the model's positions; None without a limit: then any prompt passes.
        longest_token: characters of the longest token.

    Raises:
        ValueError: with the number of characters, and the largest that fits.
    """
    if context is None:
        return

    # Messages may have contents that are no text; token ids are as many as they are
    contents = [body.get("prompt")]
    messages = body.get("messages")
    if chat and isinstance(messages, list):
        contents = [message.get("content") for message in messages]
    characters = sum(len(content) for content in contents if isinstance(content, str))

    limit = context * longest_token
    if characters > limit:
        raise ValueError(
            f"the prompt has {characters:,} characters, and the model has {context} positions: a text for it has at "
            f"most {limit:,} characters. Give a shorter prompt."
        )
