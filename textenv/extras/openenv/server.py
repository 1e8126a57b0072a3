"""`Server` and `Session`: OpenEnv's WebSocket protocol (0.4 to 0.10)."""

from __future__ import annotations

import json
import logging
import time
import urllib.request
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from textenv.optional import package

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

SCHEMA_BYTES = 2**24
"""Maximum bytes of a server's schemas."""
REFUSED = "VALIDATION_ERROR"
"""Code with which a server refuses an action."""
_log = logging.getLogger(__name__)
Data = dict[str, Any]
"""What a server answers, of any content: whoever reads it expects errors."""


class Server:
    """A running OpenEnv server.

    Args:
        url: its address, such as ``http://localhost:8000``.
        timeout: seconds to wait for an answer, and for a server to return.

    Raises:
        ConnectionError: if no OpenEnv server answers at the address.
        ValueError: on a wrong address.
    """

    def __init__(self, url: str, *, timeout: float) -> None:
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

        # The schema of its actions
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        try:
            with opener.open(f"{http_url}/schema", timeout=timeout) as answer:
                self.action_schema: object = json.loads(answer.read(SCHEMA_BYTES))["action"]
        except (OSError, HTTPException, LookupError, TypeError, ValueError) as error:
            raise ConnectionError(f"{http_url} is no running OpenEnv server ({error!r}): start it first") from error

        self._open_socket = partial(connect, socket_url, open_timeout=timeout, close_timeout=5, proxy=socket_proxy)
        self._timeout = timeout

    def session(self) -> Session:
        """Make a session, which is not open yet."""
        return Session(self._open_socket, self._timeout)


class Session:
    """A session on a server: one episode after another.

    Args:
        open_socket: call of ``websockets.sync.client.connect``, whose first argument is the address.
        timeout: seconds to wait for an answer, and for a server to return.
    """

    def __init__(self, open_socket: partial[ClientConnection], timeout: float) -> None:
        self._open_socket = open_socket
        self.address = open_socket.args[0]
        """Address of the server's socket."""
        self._timeout = timeout
        self.close: Callable[[], Any] = lambda: None
        """Ends the session."""

    def reset(self, seed: int | None) -> Data:
        """Begin an episode; wait for the server if it is full or away.

        Returns:
            The server's first observation.

        Raises:
            ConnectionError: if it has not answered in time.
        """
        start = time.monotonic()
        while True:
            try:
                return self._begin_episode(seed)
            except Exception as error:  # the other side may send anything
                waited = time.monotonic() - start
                if waited > self._timeout:
                    hint = "start it again, with a larger max_concurrent_envs if it is full, or use fewer slots"
                    raise ConnectionError(f"{self.address} began no episode ({error}): {hint}") from error
                if waited < 1:
                    _log.warning("%s began no episode, waiting for it: %s", self.address, error)
                time.sleep(1)

    def step(self, action: Mapping[str, object]) -> Data:
        """Take an action; return the server's observation, reward and end.

        Raises:
            ActionRefusedError: if the server refuses the action, with its words.
            Exception: of any kind, if the server or the environment fails.
        """
        return self._ask("step", action)

    def state(self) -> Data:
        """Return the environment's state."""
        return self._ask("state")

    def _begin_episode(self, seed: int | None) -> Data:
        """End the last session and begin another one; return the server's first observation."""
        self.close()
        self._socket = self._open_socket().__enter__()  # `_end` closes it
        finalizer = weakref.finalize(self, _end, self._socket)  # for abandoned episodes too
        finalizer.atexit = False
        self.close = finalizer
        return self._ask("reset", {"seed": seed})

    def _ask(self, kind: str, data: Mapping[str, object] | None = None) -> Data:
        """Send a request and return the data of the answer.

        Raises:
            ActionRefusedError: if it refuses the data.
            RuntimeError: with the server's error code and its message, if it answers with another error.
        """
        request: dict[str, object] = {"type": kind}
        if data is not None:
            request["data"] = data
        self._socket.send(json.dumps(request))
        answer = json.loads(self._socket.recv(timeout=self._timeout))
        answer_data = answer["data"]
        if answer["type"] == "error":
            details = [str(each["msg"]) for each in answer_data.get("errors", ())]
            message = "; ".join([str(answer_data["message"]), *details])
            if answer_data["code"] == REFUSED:
                raise ActionRefusedError(message)
            raise RuntimeError(answer_data["code"], message)
        return answer_data


def observation_fields(data: Data) -> dict[str, Any]:
    """Return the fields of the observation in a server's answer, without that of the protocol."""
    return {name: value for name, value in data["observation"].items() if name != "metadata"}


class ActionRefusedError(ValueError):
    """The environment cannot take this action; the text says why, for the model."""


def _end(socket: ClientConnection) -> None:
    """End a session, and wait until the server has ended it."""
    with suppress(Exception):
        socket.send('{"type": "close"}')
        socket.recv(timeout=5)  # raises when the server closes
    socket.close()
