"""Answers to requests, as OpenAI's protocol has them."""

import json
import secrets
import time
from collections.abc import Mapping
from typing import NamedTuple, TypedDict, cast

from textenv.envs.turn import Turn
from textenv.gateway.requests import CompletionRequest
from textenv.prompts.messages import Message

JsonObject = dict[str, object]


class Piece(NamedTuple):
    """An answer as far as it is written."""

    choice: int
    """Which of the ``n`` answers, from 0."""
    turn: Turn
    """Prompt and answer, up to now."""
    text: str
    """Text of the answer."""
    log_probs: list[float] | None
    """Log-probability of each token of the answer, and perhaps of later ones; None if the server does not have them."""
    finish: str | None
    """``"stop"`` or ``"length"`` if this is all; None if more comes."""
    message: Message | None = None
    """The whole answer as a message with calls of tools; None if it has none, or is not finished."""


class Choice(TypedDict, total=False):
    """One of the answers."""

    index: int
    finish_reason: str | None
    logprobs: JsonObject | None
    text: str
    """Of a completion."""
    message: JsonObject
    """Of a chat; in an event ``delta``, what is new in it."""
    delta: JsonObject
    token_ids: list[int]


class AnswerWriter:
    """Writes the pieces of an answer as objects of the protocol.

    Args:
        request: what was asked.
        model: name of the model.
    """

    def __init__(self, request: CompletionRequest, model: str) -> None:
        self._request = request
        kind = "text_completion"
        if request.chat:
            kind = "chat.completion"
            if request.stream:
                kind = "chat.completion.chunk"
        self._head: JsonObject = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "object": kind,
        }
        self._choices: list[Choice] = []
        self._num_prompt_tokens = 0
        self._num_tokens: dict[int, int] = {}  # by choice
        self._num_sent_tokens: dict[int, int] = {}
        self._num_sent_characters: dict[int, int] = {}

    def add(self, piece: Piece) -> JsonObject | None:
        """Add a piece; return the event that tells it, or None if it is told later."""
        self._num_prompt_tokens = len(piece.turn.context_ids)
        self._num_tokens[piece.choice] = len(piece.turn.completion_ids)
        told_at_once = self._request.stream and not self._request.tools
        if not (told_at_once or piece.finish):
            return None
        choice = self._choice(piece)
        if self._request.return_token_ids:
            self._head["prompt_token_ids"] = piece.turn.context_ids
        if self._request.stream:
            return self._head | {"choices": [choice]}
        self._choices.append(choice)
        return None

    def end(self) -> JsonObject | None:
        """Return the answer as a whole, or the last event of a stream; None if there is no such event."""
        if self._request.stream and not self._request.include_usage:
            return None
        self._choices.sort(key=lambda choice: choice["index"])
        num_tokens = sum(self._num_tokens.values())
        usage = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self._num_prompt_tokens + num_tokens,
        }
        return self._head | {"choices": self._choices, "usage": usage}

    def _choice(self, piece: Piece) -> Choice:
        """Return a choice: what is new in an event, and otherwise all."""
        # Text and tokens since the last event
        is_first = piece.choice not in self._num_sent_tokens
        start = self._num_sent_tokens.get(piece.choice, 0)
        ids = piece.turn.completion_ids[start:]
        text = piece.text
        if not piece.finish:
            text = _settled_text(piece.turn)
        sent = self._num_sent_characters.get(piece.choice, 0)
        self._num_sent_tokens[piece.choice] = len(piece.turn.completion_ids)
        self._num_sent_characters[piece.choice] = max(sent, len(text))

        # A chat has a message, or what is added to it
        choice: Choice = {"index": piece.choice, "finish_reason": piece.finish, "logprobs": None}
        message: JsonObject = {"content": text[sent:]}
        if self._request.tools:
            message = self._message_with_calls(piece)
            if message.get("tool_calls"):
                choice["finish_reason"] = "tool_calls"
        if is_first:
            message = {"role": "assistant"} | message
        if not self._request.chat:
            choice["text"] = text[sent:]
        elif self._request.stream:
            choice["delta"] = message
        else:
            choice["message"] = message
        if self._request.logprobs and piece.log_probs is not None:
            choice["logprobs"] = self._log_probs(piece.turn, ids, piece.log_probs[start : start + len(ids)])
        if self._request.return_token_ids:
            choice["token_ids"] = ids
        return choice

    def _message_with_calls(self, piece: Piece) -> JsonObject:
        """Return the message of an answer, which may have calls of tools."""
        if piece.message is None or not piece.message.get("tool_calls"):
            return {"content": piece.text}
        calls = []
        for index, call in enumerate(piece.message["tool_calls"]):
            function = cast("Mapping[str, object]", call["function"])
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            written = call | {"function": {"name": function["name"], "arguments": arguments}}
            if self._request.stream:
                written["index"] = index
            calls.append(written)
        return {"content": piece.message.get("content") or None, "tool_calls": calls}

    def _log_probs(self, turn: Turn, ids: list[int], log_probs: list[float]) -> JsonObject:
        """Return tokens as texts with their log-probabilities."""
        texts = [str(turn.tokenizer.decode([token_id])) for token_id in ids]
        if not self._request.chat:
            return {"tokens": texts, "token_logprobs": log_probs}
        content = []
        for text, log_prob in zip(texts, log_probs, strict=True):
            content.append({"token": text, "logprob": log_prob, "bytes": None, "top_logprobs": []})
        return {"content": content}


def _settled_text(turn: Turn) -> str:
    """Return the text of an unfinished answer without its end, which the next tokens may still change."""
    # The last characters may begin a stop text, and a replacement character stands for one that has begun
    longest_stop = max(map(len, turn.stop), default=1)
    end = max(0, len(turn.completion) + 1 - longest_stop)
    return turn.completion[:end].rstrip("\ufffd")
