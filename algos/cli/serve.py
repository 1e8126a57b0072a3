"""``algos serve``: a language model behind OpenAI's protocol, for evaluation harnesses and other programs."""

import contextlib
import hmac
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypedDict

import tyro
from jinja2 import TemplateError

from algos.cli.arguments import ModelCommand, one_thread
from algos.cli.request_fields import check_fields, check_prompt_size, stop_texts
from algos.cli.sample import check_model_name, load_policy
from textenv.json_files import parse_json
from textenv.rendering import printable

if TYPE_CHECKING:
    import numpy as np

    from algos.policies.lm import LMPolicy
    from textenv.envs.limits import StopConditions
    from textenv.envs.turn import Turn
    from textenv.prompts.prompts import Prompt

LOCAL_HOSTS = ("127.0.0.1", "localhost")
"""Names by which clients may call this machine; the server listens on the first."""

MAX_REQUEST_BYTES = 2**20
"""Maximum size of a request: more text than a model of 100,000 positions reads."""

MAX_DISCARDED_BYTES = 2**26
"""Maximum size of a refused request that is read to its end, so that the client reads the refusal."""

LOWEST_TEMPERATURE = 1e-3
"""Lowest temperature above 0: logits divided by it stay far below float32's largest number."""

MAX_CHOICES = 64
"""Maximum number of answers to one request (``n``)."""

COMPLETION_PATHS = ("/v1/chat/completions", "/v1/completions")
"""Paths of requests for answers."""

FIELDS = {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "n", "seed", "stop",
          "stream", "stream_options", "logprobs", "return_token_ids",  # and those that change no answer:
          "user", "metadata", "store", "parallel_tool_calls", "tool_choice"}  # fmt: skip
"""Fields of a request that this server supports."""

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
    """Run folder of a trained language model, the folder ``best`` in it, a model's folder, or its name on the hub:
    owner/name."""
    port: int = 8000
    """Port of 127.0.0.1 to listen on; 0 takes a free one."""
    token: str | None = None
    """Key that requests must bring; by default a new one, which is printed."""
    max_new_tokens: int = 512
    """Maximum length of an answer, in tokens; a request may ask for a shorter one."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text or special token that ends an answer, in addition to what ended turns in training and to a request's
    ``stop``; may be repeated."""

    def run(self) -> dict[str, object]:
        """Load the model, and serve."""
        one_thread()
        token = self.token
        if token is None:
            token = secrets.token_urlsafe(24)
        check_model_name(self.folder)
        policy = load_policy(self.folder)
        policy.lm.stop = (*policy.lm.stop, *self.stop)
        with PolicyServer(policy, self.folder, token=token, limit=self.max_new_tokens, port=self.port) as server:
            print(f"model: {server.name}\nOPENAI_BASE_URL={server.url}\nOPENAI_API_KEY={token}", flush=True)
            print(f"answers end with {printable(str(policy.ends))}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
        return {"served": server.name}


class Choice(TypedDict, total=False):
    """A choice of an answer, as the protocol has it."""

    index: int
    finish_reason: str | None
    logprobs: dict[str, object] | None
    text: str
    """Of a completion."""
    message: dict[str, str]
    """Of a chat; in an event ``delta``, what is new in it."""
    delta: dict[str, str]
    token_ids: list[int]


class GeneratedToken(NamedTuple):
    """One more token of a choice, and the choice so far."""

    choice: int
    """Index of the choice, from 0."""
    turn: "Turn"
    """Prompt and answer, up to this token."""
    log_probs: list[float]
    """Log-probability of each token of the answer."""
    finish: str | None
    """``"stop"`` or ``"length"`` if this is the last token."""


@dataclass(frozen=True, kw_only=True)
class _GenerationRequest:
    """What a request asks for, checked."""

    prompt: "Prompt"
    prompt_ids: list[int]
    ends: "StopConditions"
    length: int
    """Maximum number of tokens of prompt and answer together."""
    num_choices: int
    temperature: float
    """0: the most probable tokens."""
    seeds: "np.ndarray"
    """Seed of each choice, int64 ``[num_choices]``."""

    def finish(self, turn: "Turn") -> str | None:
        """Return why an answer ends with its last token, ``"stop"`` or ``"length"``; None if it goes on."""
        last_token = turn.completion_ids[-1]
        if self.ends.is_end[last_token] or turn.find_completed(self.ends.texts) is not None:
            return "stop"
        if len(self.prompt_ids) + len(turn.completion_ids) >= self.length:
            return "length"
        return None


class PolicyServer(ThreadingHTTPServer):
    """Server of an `LMPolicy`; it generates for one request at a time, and the others wait.

    Args:
        policy: the policy to serve.
        name: name of the model in the protocol.
        token: key that requests must bring.
        limit: maximum length of an answer, in tokens.
        port: port of 127.0.0.1; 0 takes a free one.

    Raises:
        ValueError: if the token is empty or the limit below 1.
        OSError: if the port cannot be used.
    """

    request_queue_size = 1024
    """Connections that wait to be accepted; the system may allow fewer."""

    def __init__(self, policy: "LMPolicy", name: str, *, token: str, limit: int = 512, port: int = 0) -> None:
        if not token or limit < 1:
            raise ValueError(f"--token is {token!r}, --max-new-tokens {limit}: expected a text, and at least 1")
        try:
            super().__init__((LOCAL_HOSTS[0], port), _Handler)
        except (OSError, OverflowError) as error:
            hint = "choose another --port, or 0 for a free one"
            raise OSError(f"cannot listen on port {port} ({error}): {hint}") from error
        self.policy = policy
        self.name = name
        self.token = token
        self.limit = limit
        self.lock = threading.Lock()
        """Held by the request that generates."""
        self.url = f"http://{LOCAL_HOSTS[0]}:{self.server_address[1]}/v1"
        self.longest_token = max(map(len, policy.tokenizer.get_vocab()))
        """Characters of the longest token."""
        self.temperature = policy.lm.temperature
        """The policy's own, of requests without one; while a request generates, the model has that of the request."""

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Say nothing about a client that has gone; report any other error as the base class does."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def generate(self, body: Mapping[str, object], *, chat: bool) -> Generator[GeneratedToken, None, None]:
        """Generate what a request asks for, token by token, the choices in turn.

        Args:
            body: a request that `check_fields` has passed.
            chat: whether it has messages instead of a prompt.

        Raises:
            ValueError: before the first token, if a field is wrong or not supported.
            FileNotFoundError: if it asks for another model.
        """
        import numpy as np

        from textenv.envs.turn import Turn

        request = self._read_request(body, chat=chat)
        lm = self.policy.lm

        # Tokens of the choices, [num_choices, length], and the position of the next one, equal in all
        prompt_length = len(request.prompt_ids)
        tokens = np.zeros((request.num_choices, request.length), dtype=np.int64)
        tokens[:, :prompt_length] = request.prompt_ids
        position = prompt_length
        running = np.ones(request.num_choices, dtype=bool)
        log_probs_of_choices = [list[float]() for _ in range(request.num_choices)]

        with self.lock:
            player = self.policy.fork()
            player.decoder = None
            player.reset(seeds=request.seeds)
            original_temperature = lm.temperature
            lm.temperature = request.temperature or original_temperature
            try:
                while running.any():
                    # One token for each choice; a choice that has ended has length 0, and its token is ignored
                    lengths = running * position
                    observation = {"tokens": tokens, "length": lengths[:, None]}
                    step = player.act(observation, deterministic=request.temperature == 0)
                    tokens[:, position] = step.action.cpu()
                    position += 1

                    for choice in running.nonzero()[0].tolist():
                        completion_ids = tokens[choice, prompt_length:position].tolist()
                        turn = Turn(
                            prompt=request.prompt,
                            prompt_ids=request.prompt_ids,
                            context_ids=request.prompt_ids,
                            completion_ids=completion_ids,
                            terminated=False,
                            tokenizer=self.policy.tokenizer,
                            stop=request.ends.stop_texts,
                        )
                        finish = request.finish(turn)
                        running[choice] = finish is None
                        log_probs = log_probs_of_choices[choice]
                        log_probs.append(float(step.log_prob[choice]))
                        yield GeneratedToken(choice, turn, log_probs, finish)
            finally:
                lm.temperature = original_temperature

    def _read_request(self, body: Mapping[str, object], *, chat: bool) -> _GenerationRequest:
        """Check the values of a request, and convert them to those of the model."""
        import numpy as np

        from textenv.envs.limits import StopConditions
        from textenv.prompts.prompts import as_prompt
        from textenv.prompts.tokenize import prompt_ids

        content = _content(body, chat=chat)
        unsupported = [name for name in body if body[name] and not _supports(name, chat=chat)]
        if unsupported:
            raise ValueError(f"this server does not support {', '.join(unsupported)}: leave it out, or give 0")
        if body.get("model") != self.name:
            raise FileNotFoundError(f"there is no model {body.get('model')!r:.200}: this server has {self.name!r}")

        # What ends an answer
        stop = stop_texts(body.get("stop"))
        limit_name = "max_tokens"
        if body.get("max_completion_tokens"):
            limit_name = "max_completion_tokens"
        max_new_tokens = _integer(body, limit_name, default=self.limit, low=1, high=self.limit)

        # How it is sampled
        lm = self.policy.lm
        num_choices = _integer(body, "n", default=1, low=1, high=MAX_CHOICES)
        temperature = _number(body, "temperature", default=self.temperature, low=0, high=100)
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature is {temperature}, expected 0 (the most probable token) or at least {LOWEST_TEMPERATURE}"
            )
        seed = _integer(body, "seed", default=secrets.randbits(62), low=0, high=2**63)
        seeds = np.random.SeedSequence(seed).generate_state(num_choices)

        # Token ids of the prompt
        prompt = as_prompt(0, content)
        ends = StopConditions(self.policy.tokenizer, [*lm.stop, *stop], lm.turn_ends)
        ids = prompt_ids(prompt, self.policy.tokenizer)
        if not 0 <= min(ids) <= max(ids) < lm.num_tokens:
            raise ValueError(f"prompt is {ids!r:.300}, expected token ids from 0 to {lm.num_tokens - 1}")
        lm.check_length(len(ids) + 1)
        length = len(ids) + max_new_tokens
        if lm.context:
            length = min(length, lm.context)

        return _GenerationRequest(
            prompt=prompt,
            prompt_ids=ids,
            ends=ends,
            length=length,
            num_choices=num_choices,
            temperature=temperature,
            seeds=seeds.astype(np.int64),
        )


class _Handler(BaseHTTPRequestHandler):
    """One request, and its answer: one JSON object, or events of server-sent events."""

    server: PolicyServer
    timeout = 60
    begun = False
    """True once the headers of the answer are sent."""
    events = False
    """True if the answer is sent as events."""

    def do_POST(self) -> None:  # noqa: N802
        try:
            content = self._read()
            self._check_access()
            if (self.command, self.path) == ("GET", "/v1/models"):
                self._send({"object": "list", "data": [{"id": self.server.name, "object": "model"}]})
            elif self.command == "POST" and self.path in COMPLETION_PATHS:
                self._complete(parse_json(content), chat="chat" in self.path)
            else:
                raise FileNotFoundError(f"there is no {self.command} {self.path:.100}, but POST /v1/chat/completions")
        except (ConnectionError, TimeoutError):
            pass  # the client has gone
        except Exception as error:  # a model may raise anything; the server goes on
            self._send_error(error)

    do_GET = do_POST  # noqa: N815

    def _read(self) -> bytes:
        """Return the body of the request; an OverflowError if it has more than `MAX_REQUEST_BYTES`."""
        length = self.headers.get("Content-Length") or "0"
        if not (length.isascii() and length.isdigit()):
            raise ValueError(f"Content-Length is {length!r:.100}, expected the number of bytes of the request")
        size = int(length[:20])
        if size <= MAX_REQUEST_BYTES:
            return self.rfile.read(size)

        # Read it all the same: a client that still sends would not read the error
        bytes_left = min(size, MAX_DISCARDED_BYTES)
        while bytes_left > 0:
            chunk = self.rfile.read(min(bytes_left, 2**16))
            if not chunk:
                break
            bytes_left -= len(chunk)
        raise OverflowError(
            f"the request has {size:,} bytes, expected at most {MAX_REQUEST_BYTES:,}: give a shorter prompt"
        )

    def _check_access(self) -> None:
        """Raise a PermissionError unless the request has the key, and the name of this machine as its host."""
        host, _, _ = self.headers.get("Host", "").rpartition(":")
        key = self.headers.get("Authorization", "").encode()
        expected_key = f"Bearer {self.server.token}".encode()
        if host not in LOCAL_HOSTS or not hmac.compare_digest(key, expected_key):
            raise PermissionError(
                f"wrong key or host: ask {LOCAL_HOSTS[0]} with the key that 'algos serve' has printed"
            )

    def _send(self, answer: dict[str, object], status: int = 200) -> None:
        """Send an object, with headers if it is the first."""
        content_type = "application/json"
        text = json.dumps(answer)
        if self.events:
            content_type = "text/event-stream"
            text = f"data: {text}\n\n"
        if not self.begun:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.end_headers()
        self.begun = True
        self.wfile.write(text.encode())

    def _send_error(self, error: Exception) -> None:
        """Send an error, with the status of its class; 500 for one of the model."""
        status = 500
        for error_class, class_status in STATUS.items():
            if isinstance(error, error_class):
                status = class_status
                break
        kind = "invalid_request_error"
        if status == 500:
            kind = "server_error"
        self._send({"error": {"message": str(error), "type": kind, "code": status}}, status)

    def _complete(self, content: object, *, chat: bool) -> None:
        """Send an answer whole, or as events, one for each token; nothing is sent before all fields are checked."""
        body = check_fields(content, chat=chat)
        context = self.server.policy.lm.context
        check_prompt_size(body, chat=chat, context=context, longest_token=self.server.longest_token)

        # What every object of the answer holds
        streams = bool(body.get("stream"))
        kind = "text_completion"
        if chat:
            kind = "chat.completion"
            if streams:
                kind = "chat.completion.chunk"
        answer: dict[str, object] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.server.name,
            "object": kind,
        }

        choices: list[Choice] = []
        sent_characters: dict[int, int] = {}  # by choice
        with contextlib.closing(self.server.generate(body, chat=chat)) as generated:
            for count, token in enumerate(generated, 1):
                self.events = streams  # an error before the first token is no event
                usage = {"prompt_tokens": len(token.turn.prompt_ids), "completion_tokens": count}
                if not (streams or token.finish):
                    continue
                choice = self._choice(token, body, sent_characters, chat=chat)
                if body.get("return_token_ids"):
                    answer["prompt_token_ids"] = token.turn.prompt_ids
                if streams:
                    self._send(answer | {"choices": [choice]})
                else:
                    choices.append(choice)

        # The whole answer, or the last events
        usage["total_tokens"] = sum(usage.values())
        stream_options = body.get("stream_options")
        includes_usage = isinstance(stream_options, dict) and stream_options.get("include_usage")
        if not streams or includes_usage:
            choices.sort(key=lambda choice: choice["index"])
            self._send(answer | {"choices": choices, "usage": usage})
        if streams:
            self.wfile.write(b"data: [DONE]\n\n")

    def _choice(
        self, token: GeneratedToken, body: Mapping[str, object], sent_characters: dict[int, int], *, chat: bool
    ) -> Choice:
        """Return a choice as the protocol has it: what is new in an event, and otherwise all.

        ``sent_characters`` has the length of the text of each choice that was sent so far, and is updated.
        """
        # In an event, tokens and text since the last one
        ids = token.turn.completion_ids
        log_probs = token.log_probs
        if self.events:
            ids = ids[-1:]
            log_probs = log_probs[-1:]
        text = token.turn.completion
        if not token.finish:
            text = _settled_text(token.turn)
        is_first = token.choice not in sent_characters
        sent = sent_characters.get(token.choice, 0)
        sent_characters[token.choice] = max(sent, len(text))
        text = text[sent:]

        # A chat has a message, or what is added to it
        choice: Choice = {"index": token.choice, "finish_reason": token.finish, "logprobs": None}
        message = {"content": text}
        if is_first:
            message = {"role": "assistant", "content": text}
        if not chat:
            choice["text"] = text
        elif self.events:
            choice["delta"] = message
        else:
            choice["message"] = message
        if body.get("logprobs") or type(body.get("logprobs")) is int:  # 0 asks for those of the tokens themselves
            choice["logprobs"] = self._log_probs(ids, log_probs, chat=chat)
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        return choice

    def _log_probs(self, ids: list[int], log_probs: list[float], *, chat: bool) -> dict[str, object]:
        """Return tokens as texts with their log-probabilities, as the protocol has them."""
        texts = [self.server.policy.tokenizer.decode([token_id]) for token_id in ids]
        if not chat:
            return {"tokens": texts, "token_logprobs": log_probs}
        content = []
        for text, log_prob in zip(texts, log_probs, strict=True):
            content.append({"token": text, "logprob": log_prob, "top_logprobs": []})
        return {"content": content}


def _content(body: Mapping[str, object], *, chat: bool) -> object:
    """Return the messages or the prompt of a request; a ValueError if there are none or they are of another type."""
    name = "prompt"
    expected = "a text or ids"
    if chat:
        name = "messages"
        expected = "messages with texts"
    content = body.get(name)
    are_messages = isinstance(content, list) and all(type(item) is dict for item in content)
    if not content or chat != are_messages:
        raise ValueError(f"{name} is {content!r:.300}, expected {expected}")
    return content


def _supports(name: str, *, chat: bool) -> bool:
    """Return True for a field that this server supports; a number of ``logprobs``, as completions have, must be 0."""
    if name == "logprobs":
        return chat
    return name in FIELDS


def _settled_text(turn: "Turn") -> str:
    """Return the text of an unfinished answer without its end, which the next tokens may still change."""
    # The last characters may begin a stop text, and a replacement character stands for one that has begun
    longest_stop = max(map(len, turn.stop), default=1)
    end = max(0, len(turn.completion) + 1 - longest_stop)
    return turn.completion[:end].rstrip("\ufffd")


def _number(body: Mapping[str, object], name: str, *, default: float, low: float, high: float) -> float:
    """Return the number of a field, or the default; a ValueError if it is of another type, or out of bounds."""
    value = body.get(name)
    if value is None:
        value = default
    if type(value) is bool or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _not_within(name, value, low, high)
    return value


def _integer(body: Mapping[str, object], name: str, *, default: int, low: int, high: int) -> int:
    """Return the integer of a field; see `_number`."""
    value = _number(body, name, default=default, low=low, high=high)
    if not isinstance(value, int):
        raise _not_within(name, value, low, high)
    return value


def _not_within(name: str, value: object, low: float, high: float) -> ValueError:
    return ValueError(f"{name} is {value!r:.100}, expected a number from {low} to {high}, as 'algos serve' allows")
