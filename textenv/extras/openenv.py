"""`OpenEnv`: environments on servers of the package ``openenv``, by its WebSocket protocol (0.4 to 0.10)."""

import json
import logging
import time
import urllib.request
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import gymnasium

from textenv.envs.string_env import FAILED_KEY, StringGames
from textenv.games.dialogue import text_space
from textenv.optional import package

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from websockets.sync.client import ClientConnection

SCHEMA_BYTES = 2**24
"""Maximum bytes of a server's schemas."""
MAX_SESSIONS_AT_ONCE = 32
"""Maximum number of sessions that wait for the server at the same time."""
TOOL_ACTIONS = ("call_tool", "list_tools")
"""Values of the field ``type`` by which MCP environments know their actions."""
_log = logging.getLogger(__name__)
Data = dict[str, Any]
"""What a server answers, of any content: whoever reads it expects errors."""


class OpenEnv(StringGames):
    """Play an environment on an OpenEnv server, in one session per episode.

    Prompt: the first observation, as the text of its only text field, or else as JSON. Actions: any text, which fills
    one field of the environment's action. If the server refuses an action, its error message is the reply. Score: the
    environment's reward of the turn; ``done`` terminates. Environments whose actions call tools (MCP:
    ``CallToolAction``) are refused, because a text alone is no call. If the server or the environment fails, the
    episode is broken off with a warning, and left out of the update.

    Args:
        split: ignored, as the protocol has none.
        tokenizer: the policy's tokenizer.
        url: address of the server, such as ``http://localhost:8000``.
        action_field: field of the action for the text; by default, its only text field.
        timeout: seconds to wait for an answer, and for a server to return.

    Raises:
        ConnectionError: if no OpenEnv server answers at the address.
        ValueError: on a wrong address, or an action that a text cannot fill.
    """

    def __init__(
        self,
        split: str = "train",
        *,
        tokenizer: "PreTrainedTokenizerBase",
        url: str = "",
        action_field: str = "",
        timeout: float = 60.0,
    ) -> None:
        connect = package("websockets.sync.client", "openenv").connect
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ValueError(f"url is {url!r:.200}, expected the address of an OpenEnv server: http://localhost:8000")
        address = f"{parts.netloc}{parts.path.rstrip('/')}"
        http_url = f"http://{address}"
        socket_url = f"ws://{address}/ws"
        if parts.scheme in ("https", "wss"):
            http_url = f"https://{address}"
            socket_url = f"wss://{address}/ws"

        # A server on this machine is reached without a proxy
        proxies: dict[str, str] | None = None
        socket_proxy: bool | None = True
        if parts.hostname in ("localhost", "127.0.0.1", "::1"):
            proxies = {}
            socket_proxy = None

        # The field of the action that takes the text
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        try:
            with opener.open(f"{http_url}/schema", timeout=timeout) as answer:
                action_schema = json.loads(answer.read(SCHEMA_BYTES))["action"]
        except (OSError, HTTPException, LookupError, TypeError, ValueError) as error:
            raise ConnectionError(f"{http_url} is no running OpenEnv server ({error!r}): start it first") from error
        field = _find_field(action_schema, action_field)

        open_socket = partial(connect, socket_url, open_timeout=timeout, close_timeout=5, proxy=socket_proxy)
        super().__init__(partial(_Session, open_socket, field, timeout), tokenizer=tokenizer)
        self._map = ThreadPoolExecutor(MAX_SESSIONS_AT_ONCE).map
        length = min(1024, tokenizer.model_max_length)
        self.limits = {"max_prompt_tokens": length // 2, "max_new_tokens": 32, "max_turns": 20, "max_length": length}


class _Session(gymnasium.Env[str, str]):
    """A session on a server, as an environment of strings.

    Args:
        open_socket: call of ``websockets.sync.client.connect``, whose first argument is the address.
        field: field of the action that takes the text.
        timeout: seconds to wait for an answer, and for a server to return.
    """

    def __init__(self, open_socket: "partial[ClientConnection]", field: str, timeout: float) -> None:
        self.observation_space = text_space(1_000_000)
        self.action_space = self.observation_space
        self._open_socket = open_socket
        self._address = open_socket.args[0]
        self._field = field
        self._timeout = timeout
        self.close: Callable[[], Any] = lambda: None

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, object]]:
        super().reset(seed=seed)
        start = time.monotonic()
        while True:
            try:
                return _text(self._begin_episode(seed)), {}
            except Exception as error:  # the other side may send anything
                waited = time.monotonic() - start
                if waited > self._timeout:
                    hint = "start it again, with a larger max_concurrent_envs if it is full, or use fewer slots"
                    raise ConnectionError(f"{self._address} began no episode ({error}): {hint}") from error
                if waited < 1:
                    _log.warning("%s began no episode, waiting for it: %s", self._address, error)
                time.sleep(1)

    def _begin_episode(self, seed: int | None) -> Data:
        """End the last session and begin another one; return the server's first observation."""
        self.close()
        self._socket = self._open_socket().__enter__()  # `_end` closes it
        finalizer = weakref.finalize(self, _end, self._socket)  # for abandoned episodes too
        finalizer.atexit = False
        self.close = finalizer
        return self._ask("reset", {"seed": seed})

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        try:
            data = self._ask("step", {self._field: action})
            return _text(data), float(data["reward"] or 0), bool(data["done"]), False, {}
        except Exception as error:  # the other side may send anything
            if error.args[:1] == ("VALIDATION_ERROR",):
                message = error.args[1]
                return message, 0.0, False, False, {}
            _log.warning("%s failed, the episode is broken off: %r", self._address, error)
            return "", 0.0, False, True, {FAILED_KEY: True}

    def state(self) -> Data:
        return self._ask("state")

    def _ask(self, kind: str, data: Mapping[str, object] | None = None) -> Data:
        """Send a request and return the data of the answer.

        Raises:
            RuntimeError: with the server's error code and its message, if it answers with an error.
        """
        request: dict[str, object] = {"type": kind}
        if data is not None:
            request["data"] = data
        self._socket.send(json.dumps(request))
        answer = json.loads(self._socket.recv(timeout=self._timeout))
        answer_data = answer["data"]
        if answer["type"] == "error":
            details = [str(each["msg"]) for each in answer_data.get("errors", ())]
            raise RuntimeError(answer_data["code"], "; ".join([str(answer_data["message"]), *details]))
        return answer_data


def _end(socket: "ClientConnection") -> None:
    """End a session, and wait until the server has ended it."""
    with suppress(Exception):
        socket.send('{"type": "close"}')
        socket.recv(timeout=5)  # raises when the server closes
    socket.close()


def _text(data: Data) -> str:
    """Return an observation's text if it has exactly one, else its fields as JSON."""
    fields = {name: x for name, x in data["observation"].items() if name != "metadata"}
    texts = [x for x in fields.values() if isinstance(x, str)]
    if len(texts) == 1:
        return texts[0]
    return json.dumps(fields, ensure_ascii=False)


def _find_field(schema: object, action_field: str) -> str:
    """Return the field of an action that takes the text.

    Args:
        schema: JSON schema of the environment's action.
        action_field: the field that the caller named; empty: the only text field.

    Raises:
        ValueError: if actions call tools (MCP), if no field or several can take the text, if other fields are required,
            or if arguments of another field would always be left out and the caller did not name the field.
    """
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        raise ValueError(f"the action's schema is {schema!r:.300}, expected one kind of action, with named fields")
    named_fields = schema["properties"].items()
    fields = {name: field for name, field in named_fields if name != "metadata" and isinstance(field, dict)}

    # An MCP environment: the text would become the name of a tool, called without arguments.
    calls_tools = any(field.get("const") in TOOL_ACTIONS for field in fields.values())
    if calls_tools or "tool_name" in fields:
        raise ValueError(
            f"the environment's actions call tools ({', '.join(fields)}: an MCP environment), and a text alone "
            "is no call of a tool: this version of textenv cannot play it. Take an environment whose action is a text."
        )

    # The field that takes the text.
    choices = {name: field for name, field in fields.items() if "const" not in field}
    text_fields = [name for name, field in choices.items() if "string" in _types(field)]
    argument_fields = [name for name, field in choices.items() if "object" in _types(field)]
    chosen = action_field
    if not action_field and len(text_fields) == 1:
        chosen = text_fields[0]
    required = schema.get("required", [])
    description = f"the fields {', '.join(choices)} (texts: {', '.join(text_fields)}; required: {', '.join(required)})"
    if chosen not in text_fields or {*required} - {chosen}:
        raise ValueError(
            f"action_field is {action_field!r}, and the action has {description}: expected a text, alone required"
        )
    if argument_fields and not action_field:
        raise ValueError(
            f"the action has {description}, and {', '.join(argument_fields)} would always be left out: if the text "
            f"alone is a complete action, say so by action_field={chosen!r}"
        )
    return chosen


def _types(field: Mapping[str, Any]) -> set[object]:
    """Return the JSON types that a field of a schema may have."""
    return {kind.get("type") for kind in (field, *field.get("anyOf", ()))}
