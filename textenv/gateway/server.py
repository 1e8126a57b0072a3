"""`CompletionServer`: OpenAI's protocol on this machine, around whatever writes the answers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import secrets
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from jinja2 import TemplateError

from textenv.gateway.answers import AnswerWriter, Piece
from textenv.gateway.requests import CompletionRequest, read_request
from textenv.gateway.sessions import GoneError
from textenv.json_files import parse_json
from textenv.loopback import ADDRESS, LOCAL_HOSTS
from textenv.optional import package
from textenv.programs.run import LimitReached

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

MAX_REQUEST_BYTES = 2**20
"""Maximum size of a request: more text than a model of 100,000 positions reads."""
MAX_DISCARDED_BYTES = 2**26
"""Maximum size of a refused request that is read to its end, so that the client reads the refusal."""
SECONDS_TO_SEND = 60
"""Time in which a client must send its request."""
SECONDS_TO_KEEP = 600
"""Time for which a connection is kept between two requests: a program may be busy meanwhile."""
MAX_WAITING = 2048
"""Connections that wait to be accepted; the system may allow fewer."""
SESSION_HEADER = "X-Session-ID"
"""Header that names the session of a request, as prime-rl's router and verifiers have it."""
END_SECONDS = 30
"""Time in which the server must have ended."""

STATUS: dict[type[Exception], int] = {
    PermissionError: 401,
    FileNotFoundError: 404,
    GoneError: 410,
    TimeoutError: 503,
    OverflowError: 413,
    ValueError: 400,
    TemplateError: 400,
    LimitReached: 400,
}
"""HTTP status of an error: a template of chats refuses messages by an error of its own."""

Handler = Callable[["Request", bytes], Coroutine[Any, Any, object]]
"""Function that answers a request, whose body is its second argument, with an object, which is sent as JSON."""
_T = TypeVar("_T")


class Answerer(Protocol):
    """What writes the answers of a `CompletionServer`."""

    model: str
    """Name of the model."""

    def answer(self, request: CompletionRequest, session: str | None) -> AsyncGenerator[Piece, None]:
        """Write an answer piece by piece.

        Args:
            request: what is asked.
            session: name of the episode to which it belongs; None if the client names none.

        Raises:
            FileNotFoundError, GoneError, LimitReached, TimeoutError, ValueError: before the first piece, if it cannot
                be answered; they become the statuses in `STATUS`, all others 500.
        """


class CompletionServer:
    """Server on 127.0.0.1, in a thread of its own, for the policy's answers and for further addresses.

    It answers only requests with the key, and with this machine as their host. Requests are answered at the same time.
    A request may name its session by its path, ``/sessions/ID/v1``, by its key, ``TOKEN:ID``, or by the header
    ``X-Session-ID``.

    Args:
        answerer: writes the answers.
        token: key that requests must bring; None makes one.
        port: port of 127.0.0.1; 0 takes a free one.
        routes: further addresses: method, path and function (see `Handler`).

    Raises:
        ValueError: if the token is empty or has a colon.
        OSError: if the port cannot be used.
    """

    def __init__(
        self,
        answerer: Answerer,
        *,
        token: str | None = None,
        port: int = 0,
        routes: Sequence[tuple[str, str, Handler]] = (),
    ) -> None:
        if token is None:
            token = secrets.token_urlsafe(24)
        if not token or ":" in token:
            raise ValueError(f"the token is {token!r}, expected a text without a colon")
        self.answerer = answerer
        self.token = token
        self._responses = package("starlette.responses", "service")
        uvicorn = package("uvicorn", "service")

        # The addresses
        self._addresses = ["POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"]
        self._addresses += [f"{method} {path}" for method, path, _ in routes]
        make_route = package("starlette.routing", "service").Route
        all_routes: list[Route] = []
        for prefix in ("", "/sessions/{session}"):
            all_routes.append(make_route(f"{prefix}/v1/models", self._guarded(self._models), methods=["GET"]))
            for path, chat in (("/v1/chat/completions", True), ("/v1/completions", False)):
                all_routes.append(make_route(prefix + path, self._completion(chat=chat), methods=["POST"]))
        for method, path, handler in routes:
            all_routes.append(make_route(path, self._guarded(handler), methods=[method]))
        missing = self._guarded(self._missing)
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        all_routes.append(make_route("/{path:path}", missing, methods=methods))

        # Listen from now on, so that clients which come before `start` wait
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((ADDRESS, port))
            self._socket.listen(MAX_WAITING)
        except (OSError, OverflowError) as error:
            self._socket.close()
            hint = "choose another port, or 0 for a free one"
            raise OSError(f"cannot listen on port {port} ({error}): {hint}") from error
        self.port = int(self._socket.getsockname()[1])
        self.address = f"http://{ADDRESS}:{self.port}"
        self.url = f"{self.address}/v1"
        """Base address for OpenAI's clients."""
        application = package("starlette.applications", "service").Starlette(routes=all_routes)
        options: dict[str, Any] = dict(
            log_config=None, log_level="critical", access_log=False, lifespan="off", ws="none", backlog=MAX_WAITING
        )
        options |= dict(timeout_graceful_shutdown=1, timeout_keep_alive=SECONDS_TO_KEEP)
        self._uvicorn = uvicorn.Server(uvicorn.Config(application, **options))
        self._thread = threading.Thread(target=self._serve, name="completions", daemon=True)

    def start(self) -> Self:
        """Serve in a thread, from now on."""
        self._thread.start()
        return self

    def wait(self) -> None:
        """Wait until the server has ended."""
        while self._thread.is_alive():
            self._thread.join(0.5)  # without a limit, Ctrl-C would not be seen

    def close(self) -> None:
        """End the server; requests that are being answered have a second."""
        self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join(END_SECONDS)
        self._socket.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        self._uvicorn.run(sockets=[self._socket])

    # --- the addresses -------------------------------------------------------------------------------------------

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that checks who asks, and sends what the other one returns, or its error."""

        async def respond(request: Request) -> Response:
            try:
                content = await read_body(request)
                self._check_access(request)
                answer = await _unless_left(request, handler(request, content))
                return self._response(answer)
            except Exception as error:  # foreign code may raise anything; the server goes on
                return self._refusal(error)

        return respond

    async def _models(self, request: Request, content: bytes) -> object:
        return {"object": "list", "data": [{"id": self.answerer.model, "object": "model", "owned_by": "textenv"}]}

    async def _missing(self, request: Request, content: bytes) -> object:
        raise FileNotFoundError(
            f"there is no {request.method} {request.url.path:.100}, but {', '.join(self._addresses)}"
        )

    def _completion(self, *, chat: bool) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of requests for answers."""

        async def respond(http_request: Request) -> Response:
            try:
                content = await read_body(http_request)
                self._check_access(http_request)
                request = read_request(parse_json(content), chat=chat)
                pieces = self.answerer.answer(request, self._session(http_request))
                if not request.stream:
                    return await self._whole(http_request, request, pieces)

                # Nothing is sent before the first piece, so that an error is no event
                first = await _unless_left(http_request, anext(pieces))
            except Exception as error:  # a model may raise anything; the server goes on
                return self._refusal(error)
            events = self._events(request, first, pieces)
            return self._responses.StreamingResponse(events, media_type="text/event-stream")

        return respond

    async def _whole(
        self, http_request: Request, request: CompletionRequest, pieces: AsyncGenerator[Piece, None]
    ) -> Response:
        """Return a whole answer; if the client goes away meanwhile, it is given up."""
        writer = AnswerWriter(request, self.answerer.model)

        async def write() -> None:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    writer.add(piece)

        await _unless_left(http_request, write())
        return self._response(writer.end())

    async def _events(
        self, request: CompletionRequest, first: Piece, pieces: AsyncGenerator[Piece, None]
    ) -> AsyncIterator[str]:
        """Write the events of an answer."""
        writer = AnswerWriter(request, self.answerer.model)
        event = writer.add(first)
        if event is not None:
            yield _event(event)
        async with contextlib.aclosing(pieces):
            try:
                async for piece in pieces:
                    event = writer.add(piece)
                    if event is not None:
                        yield _event(event)
            except Exception as error:  # as above; the headers are already sent
                yield _event(_error(error))
                return
        last = writer.end()
        if last is not None:
            yield _event(last)
        yield "data: [DONE]\n\n"

    def _check_access(self, request: Request) -> None:
        """Raise a PermissionError unless the request has the key, and the name of this machine as its host."""
        host, _, _ = request.headers.get("Host", "").rpartition(":")
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        key, _, _ = credentials.partition(":")
        is_right_key = hmac.compare_digest(key.encode(), self.token.encode())
        if host not in LOCAL_HOSTS or scheme != "Bearer" or not is_right_key:
            raise PermissionError(
                f"wrong key or host: ask {ADDRESS} with the header 'Authorization: Bearer KEY'. The key is in "
                "OPENAI_API_KEY of a program that a Gateway starts; else Gateway.token, or what 'algos serve' prints"
            )

    def _session(self, request: Request) -> str | None:
        """Return the name of a request's session; None if it has none."""
        _, _, session_in_key = request.headers.get("Authorization", "").partition(":")
        header = request.headers.get(SESSION_HEADER)
        name = request.path_params.get("session") or session_in_key or header
        if name and not re.fullmatch(r"[\w.:~-]{1,200}", name, re.ASCII):
            raise ValueError(f"the session is named {name!r:.200}, expected up to 200 letters, digits and -._~:")
        return name or None

    def _response(self, content: object, status: int = 200) -> Response:
        """Return an object as a response."""
        text = json.dumps(content, allow_nan=False)
        return self._responses.Response(text, status_code=status, media_type="application/json")

    def _refusal(self, error: Exception) -> Response:
        """Return an error as a response."""
        return self._response(_error(error), _status(error))


async def read_body(request: Request) -> bytes:
    """Return what a request sends.

    Raises:
        OverflowError: if it has more than `MAX_REQUEST_BYTES`.
        TimeoutError: if it is not sent in time.
    """
    content = bytearray()
    size = 0
    try:
        async with asyncio.timeout(SECONDS_TO_SEND):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= MAX_REQUEST_BYTES:
                    content += chunk
                elif size > MAX_DISCARDED_BYTES:
                    break
    except TimeoutError as error:
        raise TimeoutError(f"the request was not sent within {SECONDS_TO_SEND} seconds") from error
    if size > MAX_REQUEST_BYTES:
        declared = request.headers.get("Content-Length", f"{size}")
        raise OverflowError(
            f"the request has {int(declared):,} bytes, expected at most {MAX_REQUEST_BYTES:,}: give a shorter prompt"
        )
    return bytes(content)


async def _unless_left(request: Request, answering: Awaitable[_T]) -> _T:
    """Wait for an answer; give it up, and raise a ConnectionError, if the client closes the connection meanwhile.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(answering)
    leaving = asyncio.ensure_future(_has_left(request))
    try:
        await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        task.cancel()  # without effect if it is done
    await asyncio.wait([task])
    if task.cancelled():
        raise ConnectionError("the client has gone")
    return task.result()


async def _has_left(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _status(error: Exception) -> int:
    """Return the HTTP status of an error's class; 500 for one of the model."""
    for error_class, status in STATUS.items():
        if isinstance(error, error_class):
            return status
    return 500


def _error(error: Exception) -> object:
    """Return an error as the protocol has it."""
    kind = "invalid_request_error"
    if isinstance(error, LimitReached):
        kind = "limit_reached"
    elif _status(error) == 500:
        kind = "server_error"
    return {"error": {"message": str(error), "type": kind, "code": _status(error)}}


def _event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"
