"""`LoopbackServer`: pages for browsers on this machine, guarded by a token and by the Host header."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, urlsplit

from textenv.json_files import parse_json

ADDRESS = "127.0.0.1"
"""Address of this machine that other machines cannot reach."""
LOCAL_HOSTS = (ADDRESS, "localhost")
"""Names by which a browser on this machine may call it."""
MAX_REQUEST_BYTES = 2**20
"""Maximum size of what a request sends."""
TIMEOUT_SECONDS = 60
"""Time after which a silent connection is closed."""

Respond = Callable[[str, dict[str, str], object], object]
"""Function that gets path, query and posted JSON (None for a GET), and returns a page (a text) or an answer (anything
else, which is sent as JSON). A FileNotFoundError becomes status 404, a ValueError 400.
"""


class LoopbackServer(ThreadingHTTPServer):
    """Server on 127.0.0.1 that answers only requests with the token in their query and this machine as their host.

    Another machine cannot connect. Another page in the browser can, but it is refused: by the Host header if it gave
    this machine a name of its own (DNS rebinding), by the token if it guessed the port.

    Args:
        respond: answers requests, several at once in threads of their own.
        port: port to listen on; 0 takes a free one.

    Raises:
        OSError: if the port is in use or not allowed.
    """

    daemon_threads = True

    def __init__(self, respond: Respond, *, port: int = 0) -> None:
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise OSError(f"cannot listen on port {port} ({error}): choose another one, or 0 for a free one") from error
        self.respond = respond
        self.token = secrets.token_urlsafe(24)
        actual_port = self.server_address[1]
        self.url = f"http://{ADDRESS}:{actual_port}/?token={self.token}"
        """Address to open, token included."""

    def start(self) -> Self:
        """Serve in a background thread."""
        threading.Thread(target=self.serve_forever, daemon=True, name="pages").start()
        return self


class _Handler(BaseHTTPRequestHandler):
    server: LoopbackServer
    timeout = TIMEOUT_SECONDS

    def do_GET(self) -> None:  # noqa: N802
        status = 200
        try:
            answer = self._answer()
        except (ConnectionError, TimeoutError):
            return  # the browser has gone
        except PermissionError as error:
            status = 403
            answer = {"error": str(error)}
        except FileNotFoundError as error:
            status = 404
            answer = {"error": str(error)}
        except ValueError as error:
            status = 400
            answer = {"error": str(error)}

        # A page, or JSON
        if isinstance(answer, str):
            content_type = "text/html; charset=utf-8"
            body = answer.encode()
        else:
            content_type = "application/json"
            body = json.dumps(answer).encode()

        headers = {
            "Content-Type": content_type,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Frame-Options": "DENY",
        }
        with suppress(ConnectionError, TimeoutError):  # the page was closed, or loaded again
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def _answer(self) -> object:
        """Read the request, check token and host, and return what `respond` makes of it."""
        size = int(self.headers.get("Content-Length") or 0)
        if not 0 <= size <= MAX_REQUEST_BYTES:
            raise ValueError(f"the request has {size} bytes, expected at most {MAX_REQUEST_BYTES}")
        content = self.rfile.read(size)
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}

        # Only pages of this server know the token
        token = query.pop("token", "")
        host, _, _ = self.headers.get("Host", "").partition(":")
        is_right_token = hmac.compare_digest(token.encode(), self.server.token.encode())
        if host.lower() not in LOCAL_HOSTS or not is_right_token:
            raise PermissionError(f"wrong token or host: open the address that was printed, http://{ADDRESS}:…")

        posted = None
        if self.command == "POST":
            posted = parse_json(content)
        return self.server.respond(url.path, query, posted)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing: the token would be in the log."""
