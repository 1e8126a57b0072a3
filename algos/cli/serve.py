"""``algos serve``: a language model behind OpenAI's protocol, for evaluation harnesses and other programs."""

import contextlib
import hmac
import json
import secrets
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import tyro
from jinja2 import TemplateError

from algos.cli.arguments import ModelCommand, one_thread
from algos.cli.request_fields import check_fields, check_prompt_size
from algos.cli.sample import load_policy
from textenv.json_files import parse_json
from textenv.rendering import printable

LOCAL = ("127.0.0.1", "localhost")
MOST_BYTES = 2**20
"""Maximum size of a request: more text than a model of 100,000 positions reads."""
MOST_DISCARDED = 2**26
"""Maximum size of a refused request that is read to its end, so that the client reads the refusal."""
COLDEST = 1e-3
"""Lowest temperature above 0: logits divided by it stay far below float32's largest number."""
FIELDS = {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "n", "seed", "stop",
          "stream", "stream_options", "logprobs", "return_token_ids",  # and those that change no answer:
          "user", "metadata", "store", "parallel_tool_calls", "tool_choice"}  # fmt: skip
STATUS: dict[type[Exception], int] = {
    PermissionError: 401,
    FileNotFoundError: 404,
    OverflowError: 413,
    ValueError: 400,
    TemplateError: 400,
}
"""HTTP status of an error: a template of chats refuses messages by an error of its own."""


@dataclass(frozen=True, kw_only=True)
class Serve(ModelCommand):
    """Answer other programs on this machine with a language model, by OpenAI's protocol, until Ctrl-C."""

    prints: ClassVar[bool] = True
    announces: ClassVar[bool] = True
    folder: tyro.conf.Positional[str]
    """Run folder of a trained language model, the folder ``best`` in it, or a model's folder or name."""
    port: int = 8000
    """Port of 127.0.0.1 to listen on; 0 takes a free one."""
    token: str | None = None
    """Key that requests must bring; by default a new one, which is printed."""
    max_new_tokens: int = 512
    """Maximum length of an answer, in tokens; a request may ask for a shorter one."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text or special token that ends an answer, in addition to what ended turns in training and to a request's
    ``stop``; may be repeated."""

    def run(self) -> dict[str, Any]:
        """Load the model, and serve."""
        one_thread()
        token = secrets.token_urlsafe(24) if self.token is None else self.token
        policy, limit = load_policy(self.folder), self.max_new_tokens
        policy.lm.stop = (*policy.lm.stop, *self.stop)
        with PolicyServer(policy, self.folder, token=token, limit=limit, port=self.port) as server:
            print(f"model: {server.name}\nOPENAI_BASE_URL={server.url}\nOPENAI_API_KEY={token}", flush=True)
            print(f"answers end with {printable(str(policy.ends))}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
        return {"served": server.name}


class PolicyServer(ThreadingHTTPServer):
    """Server of an `LMPolicy` by a name; it generates for one request at a time, and the others wait."""

    request_queue_size = 1024
    """Connections that wait to be accepted; the system may allow fewer."""

    def __init__(self, policy: Any, name: str, *, token: str, limit: int = 512, port: int = 0) -> None:
        if not token or limit < 1:
            raise ValueError(f"--token is {token!r}, --max-new-tokens {limit}: expected a text, and at least 1")
        try:
            super().__init__((LOCAL[0], port), _Handler)
        except (OSError, OverflowError) as error:
            hint = "choose another --port, or 0 for a free one"
            raise OSError(f"cannot listen on port {port} ({error}): {hint}") from error
        self.policy, self.name, self.token, self.limit, self.lock = policy, name, token, limit, threading.Lock()
        self.url = f"http://{LOCAL[0]}:{self.server_address[1]}/v1"
        self.longest_token = 0 if policy is None else max(map(len, policy.tokenizer.get_vocab()))
        """Characters of the longest token."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a client that has gone; report any other error as the base class does."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def generate(self, body: Any, *, chat: bool) -> Generator[tuple[int, Any, list[float], str | None], None, None]:
        """Generate what a request asks for: after each token a choice's index, turn, log-probabilities and finish."""
        import numpy as np

        from textenv.envs.limits import StopConditions
        from textenv.envs.turn import Turn
        from textenv.prompts.prompts import as_prompt
        from textenv.prompts.tokenize import prompt_ids

        lm, tokenizer, name = self.policy.lm, self.policy.tokenizer, "messages" if chat else "prompt"
        given = body.get(name) if isinstance(body, dict) else None
        are_messages = isinstance(given, list) and all(type(item) is dict for item in given)
        if not given or chat != are_messages:
            raise ValueError(f"{name} is {given!r:.300}, expected {'messages with texts' if chat else 'a text or ids'}")
        if other := [x for x in body if body[x] and (x not in FIELDS or (x == "logprobs" and not chat))]:
            raise ValueError(f"this server does not support {', '.join(other)}: leave it out, or give 0")
        if body.get("model") != self.name:
            raise FileNotFoundError(f"there is no model {body.get('model')!r:.200}: this server has {self.name!r}")
        stop = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
        length = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
        most, n = _number(body, length, self.limit, 1, self.limit), _number(body, "n", 1, 1, 64)
        temperature = _number(body, "temperature", lm.temperature, 0, 100, (int, float))
        if 0 < temperature < COLDEST:
            raise ValueError(
                f"temperature is {temperature}, expected 0 (the most probable token) or at least {COLDEST}"
            )
        order = np.random.SeedSequence(_number(body, "seed", secrets.randbits(62), 0, 2**63))
        prompt = as_prompt(0, given)
        ends = StopConditions(tokenizer, [*lm.stop, *stop], lm.turn_ends)
        ids = prompt_ids(prompt, tokenizer)
        if not 0 <= min(ids) <= max(ids) < lm.num_tokens:
            raise ValueError(f"prompt is {ids!r:.300}, expected token ids from 0 to {lm.num_tokens - 1}")
        lm.check_length(len(ids) + 1)
        width = min(len(ids) + most, lm.context or len(ids) + most)
        tokens, at, running = np.zeros((n, width), dtype=np.int64), len(ids), np.ones(n, dtype=bool)
        tokens[:, :at], scores = ids, [list[float]() for _ in range(n)]
        with self.lock:
            player, own = self.policy.fork(), lm.temperature
            player.decoder, lm.temperature = None, temperature or own
            player.reset(seeds=order.generate_state(n).astype(np.int64))
            try:
                while running.any():
                    observation = {"tokens": tokens, "length": (running * at)[:, None]}
                    chosen, log_probs, _ = player.act(observation, deterministic=temperature == 0)
                    tokens[:, at], at = chosen.cpu(), at + 1
                    for row in running.nonzero()[0].tolist():
                        after = tokens[row, len(ids) : at].tolist()
                        turn = Turn(prompt, ids, ids, after, False, tokenizer, ends.stop_texts)
                        ended = ends.token[after[-1]] or turn.completed(ends.texts) is not None
                        running[row] = not ended and at < width
                        scores[row].append(float(log_probs[row]))
                        yield row, turn, scores[row], "stop" if ended else None if running[row] else "length"
            finally:
                lm.temperature = own


class _Handler(BaseHTTPRequestHandler):
    server: PolicyServer
    timeout = 60
    begun = events = False

    def do_POST(self) -> None:  # noqa: N802
        try:
            content = self._read()
            host, key = self.headers.get("Host", "").rpartition(":")[0], self.headers.get("Authorization", "").encode()
            if host not in LOCAL or not hmac.compare_digest(key, f"Bearer {self.server.token}".encode()):
                raise PermissionError(f"wrong key or host: ask {LOCAL[0]} with the key that 'algos serve' has printed")
            if (self.command, self.path) == ("GET", "/v1/models"):
                self._send({"object": "list", "data": [{"id": self.server.name, "object": "model"}]})
            elif self.command == "POST" and self.path in ("/v1/chat/completions", "/v1/completions"):
                self._complete(parse_json(content), chat="chat" in self.path)
            else:
                raise FileNotFoundError(f"there is no {self.command} {self.path:.100}, but POST /v1/chat/completions")
        except (ConnectionError, TimeoutError):
            pass  # the client has gone
        except Exception as error:  # a model may raise anything; the server goes on
            status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)
            kind = "server_error" if status == 500 else "invalid_request_error"
            self._send({"error": {"message": str(error), "type": kind, "code": status}}, status)

    do_GET = do_POST  # noqa: N815

    def _read(self) -> bytes:
        """Return the body of the request; an OverflowError if it has more than `MOST_BYTES`."""
        length = self.headers.get("Content-Length") or "0"
        if not (length.isascii() and length.isdigit()):
            raise ValueError(f"Content-Length is {length!r:.100}, expected the number of bytes of the request")
        size = int(length[:20])
        if size <= MOST_BYTES:
            return self.rfile.read(size)
        left = min(size, MOST_DISCARDED)
        while left > 0:
            chunk = self.rfile.read(min(left, 2**16))
            if not chunk:
                break
            left -= len(chunk)
        raise OverflowError(f"the request has {size:,} bytes, expected at most {MOST_BYTES:,}: give a shorter prompt")

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        if not self.begun:
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if self.events else "application/json")
            self.end_headers()
        self.begun, text = True, json.dumps(answer)
        self.wfile.write((f"data: {text}\n\n" if self.events else text).encode())

    def _complete(self, body: Any, *, chat: bool) -> None:
        """Send an answer whole, or as events, one for each token; nothing is sent before all fields are checked."""
        check_fields(body, chat=chat)
        context = self.server.policy.lm.context
        check_prompt_size(body, chat=chat, context=context, longest_token=self.server.longest_token)
        found, shown, decode = list[dict[str, Any]](), dict[int, int](), self.server.policy.tokenizer.decode
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.server.name}
        with contextlib.closing(self.server.generate(body, chat=chat)) as steps:
            for count, (row, turn, scores, finish) in enumerate(steps, 1):
                usage = {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": count}
                self.events, ids, text = bool(body.get("stream")), turn.completion_ids, turn.completion
                head["object"] = ("chat.completion" + ".chunk" * self.events) if chat else "text_completion"
                if self.events:
                    ids, scores = ids[-1:], scores[-1:]
                elif not finish:
                    continue
                if not finish:  # a stop text, or the rest of a character, may still change the end
                    text = text[: len(text) + 1 - max(map(len, turn.stop), default=1)].rstrip("\ufffd")
                role, before = {} if row in shown else {"role": "assistant"}, shown.get(row, 0)
                shown[row], text = max(before, len(text)), text[before:]
                choice: dict[str, Any] = {"index": row, "finish_reason": finish, "logprobs": None}
                choice |= {"delta" if self.events else "message": role | {"content": text}} if chat else {"text": text}
                if body.get("logprobs") or type(body.get("logprobs")) is int:
                    words = [decode([token]) for token in ids]
                    each = [{"token": x, "logprob": y, "top_logprobs": []} for x, y in zip(words, scores, strict=True)]
                    choice["logprobs"] = {"content": each} if chat else {"tokens": words, "token_logprobs": scores}
                if body.get("return_token_ids"):
                    head["prompt_token_ids"], choice["token_ids"] = turn.prompt_ids, ids
                found.append(choice)
                if self.events:
                    self._send(head | {"choices": found[-1:]})
        if not self.events or (body.get("stream_options") or {}).get("include_usage"):
            choices = [] if self.events else sorted(found, key=lambda choice: choice["index"])
            self._send(head | {"choices": choices, "usage": usage | {"total_tokens": sum(usage.values())}})
        if self.events:
            self.wfile.write(b"data: [DONE]\n\n")


def _number(body: dict[str, Any], name: str, default: Any, low: float, high: float, kinds: Any = int) -> Any:
    value = default if body.get(name) is None else body[name]
    if type(value) is bool or not isinstance(value, kinds) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r:.100}, expected a number from {low} to {high}, as 'algos serve' allows")
    return value
