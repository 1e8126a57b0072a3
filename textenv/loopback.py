"""`LoopbackServer`: pages for browsers on this machine, guarded by a token and by the Host header."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from textenv.json_files import parse_json

LOCAL, MOST_BYTES, SECONDS = ("127.0.0.1", "localhost"), 2**20, 60
"""Names of this machine; maximum size of a request; and seconds until a silent connection is closed."""

Respond = Callable[[str, dict[str, str], Any], Any]
"""From path, query and posted JSON (None for a GET) to a page (a text) or an answer (anything else, sent as JSON).

A FileNotFoundError becomes status 404, a ValueError 400.
"""


class LoopbackServer(ThreadingHTTPServer):
    """Server on 127.0.0.1; a request is answered only with the token in its query, and this machine as its host.

    Another machine cannot connect; a page of the browser that names this machine otherwise (DNS rebinding) is refused
    by its Host header, and one that guesses the port by the token.

    Args:
        respond: answers requests, several at once in threads of their own.
        port: port to listen on; 0 takes a free one.

    Raises:
        OSError: if the port is in use or not allowed.
    """

    daemon_threads = True

    def __init__(self, respond: Respond, *, port: int = 0) -> None:
        try:
            super().__init__((LOCAL[0], port), _Handler)
        except (OSError, OverflowError) as error:
            raise OSError(f"cannot listen on port {port} ({error}): choose another one, or 0 for a free one") from error
        self.respond, self.token = respond, secrets.token_urlsafe(24)
        self.url = f"http://{LOCAL[0]}:{self.server_address[1]}/?token={self.token}"
        """Address to open, token included."""

    def start(self) -> Self:
        """Serve in a background thread."""
        threading.Thread(target=self.serve_forever, daemon=True, name="pages").start()
        return self


class _Handler(BaseHTTPRequestHandler):
    server: LoopbackServer
    timeout = SECONDS

    def do_GET(self) -> None:  # noqa: N802
        try:
            status, answer = 200, self._answer()
        except (ConnectionError, TimeoutError):
            return  # the browser has gone
        except PermissionError as error:
            status, answer = 403, {"error": str(error)}
        except (FileNotFoundError, ValueError) as error:
            status, answer = (404 if isinstance(error, FileNotFoundError) else 400), {"error": str(error)}
        body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        kind = "text/html; charset=utf-8" if isinstance(answer, str) else "application/json"
        headers = {"Content-Type": kind, "Content-Length": str(len(body))}
        with suppress(ConnectionError, TimeoutError):  # the page was closed, or loaded again
            self.send_response(status)
            for name, value in (headers | {"Cache-Control": "no-store", "X-Frame-Options": "DENY"}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def _answer(self) -> Any:
        size = int(self.headers.get("Content-Length") or 0)
        if not 0 <= size <= MOST_BYTES:
            raise ValueError(f"the request has {size} bytes, expected at most {MOST_BYTES}")
        content = self.rfile.read(size)
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        token, host = query.pop("token", ""), self.headers.get("Host", "").partition(":")[0].lower()
        if host not in LOCAL or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            raise PermissionError(f"wrong token or host: open the address that was printed, http://{LOCAL[0]}:…")
        return self.server.respond(url.path, query, parse_json(content) if self.command == "POST" else None)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing: the token would be in the log."""
