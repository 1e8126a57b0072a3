"""HTTP requests whose whole answers are bounded in time and bytes, whatever the server sends."""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from textenv.rewards.workers import run_in_threads

if TYPE_CHECKING:
    import httpx

GRACE = 1.0
"""Seconds that a request may take beyond its limit until its thread is abandoned: a time limit of the client's own ends
it first, unless the server goes on sending headers."""


class Answer(NamedTuple):
    """Answer of a server."""

    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The content as UTF-8; other bytes are replaced."""
        return self.content.decode("utf-8", errors="replace")


class OversizedAnswerError(ValueError):
    """An answer has more bytes than allowed, or is compressed, so that nobody knows."""


class BoundedClient:
    """HTTP client for one thread.

    Args:
        make_client: makes a client of httpx; each of its limits counts for one reading of the socket only.
        seconds: limit for a whole answer.
    """

    def __init__(self, make_client: Callable[[], "httpx.Client"], *, seconds: float) -> None:
        self._make_client = make_client
        self._client = make_client()
        self._seconds = seconds

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def post(self, path: str, *, content: str, headers: dict[str, str], most_bytes: int) -> Answer:
        """Send a request and return its whole answer.

        Raises:
            httpx.HTTPError: if no whole answer came in time.
            OversizedAnswerError: if the answer has more than ``most_bytes``, or is compressed.
        """
        import httpx

        request = self._client.build_request("POST", path, content=content, headers=headers)
        request.headers["Accept-Encoding"] = "identity"
        exchange = partial(self._exchange, self._client, request, most_bytes)
        (result,) = run_in_threads([exchange], self._seconds + GRACE)
        if isinstance(result, TimeoutError):
            # The thread ends when its connection is closed; the next request gets another one.
            self._client.close()
            self._client = self._make_client()
            raise httpx.ReadTimeout(f"no whole answer in {self._seconds:g} s")
        if isinstance(result, BaseException):
            raise result
        return result

    def _exchange(self, client: "httpx.Client", request: "httpx.Request", most_bytes: int) -> Answer:
        import httpx

        end = time.monotonic() + self._seconds
        response = client.send(request, stream=True)
        try:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise OversizedAnswerError(f"the answer is compressed ({encoding!r:.50}), expected one that is not")
            content = bytearray()
            for chunk in response.iter_raw():
                content += chunk
                if len(content) > most_bytes:
                    raise OversizedAnswerError(f"the answer has more than {most_bytes:,} bytes")
                if time.monotonic() > end:
                    raise httpx.ReadTimeout(f"no whole answer in {self._seconds:g} s, only {len(content):,} bytes")
            return Answer(response.status_code, bytes(content))
        finally:
            response.close()
