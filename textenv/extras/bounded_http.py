"""HTTP requests whose whole answers are bounded in time and bytes, whatever the server sends."""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from textenv.rewards.workers import run_in_threads

if TYPE_CHECKING:
    import httpx

GRACE_SECONDS = 1.0
"""Seconds beyond its limit after which a request's thread is abandoned.

The client's own time limit ends a request first, unless the server goes on sending headers.
"""


class Answer(NamedTuple):
    """Answer of a server."""

    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The content as UTF-8; other bytes are replaced."""
        return self.content.decode("utf-8", errors="replace")


class OversizedAnswerError(ValueError):
    """An answer has more bytes than allowed, or is compressed, so that its size is unknown."""


class BoundedClient:
    """HTTP client for one thread.

    Args:
        make_client: makes a client of httpx, whose time limits hold for single readings of the socket only.
        seconds: time limit of a whole answer.
    """

    def __init__(self, make_client: Callable[[], "httpx.Client"], *, seconds: float) -> None:
        self._make_client = make_client
        self._client = make_client()
        self._seconds = seconds

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def post(self, path: str, *, content: str, headers: dict[str, str], most_bytes: int) -> Answer:
        """Send a request and return the whole answer.

        Args:
            path: path at the client's address.
            content: body of the request.
            headers: headers of the request.
            most_bytes: maximum size of the answer.

        Raises:
            httpx.HTTPError: if no whole answer came in time.
            OversizedAnswerError: if the answer has more than ``most_bytes``, or is compressed.
        """
        import httpx

        # In a thread, which can be abandoned
        request = self._client.build_request("POST", path, content=content, headers=headers)
        request.headers["Accept-Encoding"] = "identity"
        exchange = partial(self._exchange, self._client, request, most_bytes)
        (result,) = run_in_threads([exchange], self._seconds + GRACE_SECONDS)
        if isinstance(result, TimeoutError):
            # The thread ends when its connection is closed; the next request gets another one.
            self._client.close()
            self._client = self._make_client()
            raise httpx.ReadTimeout(f"no whole answer in {self._seconds:g} s")
        if isinstance(result, BaseException):
            raise result
        return result

    def _exchange(self, client: "httpx.Client", request: "httpx.Request", most_bytes: int) -> Answer:
        """Send a request and read the answer; raises as `post` does."""
        import httpx

        deadline = time.monotonic() + self._seconds
        response = client.send(request, stream=True)
        try:
            # Of a compressed answer, a few bytes may be many
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise OversizedAnswerError(f"the answer is compressed ({encoding!r:.50}), expected one that is not")

            # Read chunk by chunk, within the limits
            content = bytearray()
            for chunk in response.iter_raw():
                content += chunk
                if len(content) > most_bytes:
                    raise OversizedAnswerError(f"the answer has more than {most_bytes:,} bytes")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"no whole answer in {self._seconds:g} s, only {len(content):,} bytes")
            return Answer(response.status_code, bytes(content))
        finally:
            response.close()
