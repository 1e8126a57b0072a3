"""Replies of a model behind OpenAI's protocol to many questions at the same time: retried, bounded, and remembered."""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import os
import re
import sqlite3
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from textenv.optional import package
from textenv.rendering import printable
from textenv.rewards.answer import answer_text
from textenv.rewards.scores import RewardError, StopTraining

if TYPE_CHECKING:
    import httpx

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
HOST = re.compile(r"[^\s%\[\]]+")
"""Host of an address, as httpx returns it: it escapes by % what cannot stand in one."""
MAX_REPLY_BYTES = 2**22
"""Maximum size of a server's answer."""
MAX_SHOWN_CHARACTERS = 500
"""Characters of a server's words that an error shows."""
BUSY = (408, 425, 429)
"""Statuses, besides those from 500, after which a request is repeated."""
REFUSED = (400, 413, 422)
"""Statuses of a request that the server does not take, such as one whose text is too long for the model."""
_log = logging.getLogger(__name__)


class JudgeError(StopTraining, RewardError):
    """The server of a judge refuses all questions or does not reply, or the bound on calls is reached.

    Training ends, even where failing answers are skipped.
    """


@dataclass(frozen=True)
class Question:
    """What the model is asked."""

    messages: Sequence[Mapping[str, str]]
    """The chat that it replies to."""
    schema: Mapping[str, Any] = field(repr=False)
    """JSON schema of the reply, for servers that can write by one."""
    sample: int = 0
    """Number of this sample, from 0, if the same is asked several times."""


class Reply(NamedTuple):
    """What the model replied."""

    reply_text: str | None
    """None if there is no whole reply."""
    problem: str = ""
    """Why there is none."""
    calls: int = 0
    """1 if it was asked for, and 0 if it was remembered, or if the server refused the question."""


class _Busy(Exception):  # noqa: N818  (caught where it is raised)
    """A request that is to be repeated, and after how many seconds, if the server says so."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


class ChatReplies:
    """Asks a model behind OpenAI's protocol (``/chat/completions``); needs the extra ``service``.

    The questions of a batch are asked at the same time. A request is repeated with exponential
    back-off and jitter after a failure of the network, a timeout, and the statuses 408, 425, 429 and 500 to 599. If the
    server says when (``Retry-After``), all requests wait until then. A server that refuses ``response_format`` is asked
    without it from then on.

    Args:
        base_url: address of the server, such as ``http://127.0.0.1:8000/v1``.
        model: name of the model.
        api_key: key of the server; by default the environment variable ``OPENAI_API_KEY``, if there is one. The empty
            text sends none.
        options: further fields of each request, such as ``temperature``. A ``seed`` is that of the first sample.
        concurrency: maximum number of requests at the same time.
        timeout: seconds until the whole answer to a request must have come.
        patience: seconds for which a request is repeated.
        max_calls: maximum number of calls; None for no limit.
        cache: SQLite file with all replies by the content of their requests; equal questions are then asked once. None
            keeps none, and asks equal questions again.

    Raises:
        ValueError: if an argument is not as described.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None,
        options: Mapping[str, object],
        concurrency: int,
        timeout: float,
        patience: float,
        max_calls: int | None,
        cache: str | Path | None,
    ) -> None:
        self._httpx = package("httpx", "service")
        self._tenacity = package("tenacity", "service")

        # Whom to ask, and how
        url = self._httpx.URL(str(base_url))
        is_address = HOST.fullmatch(url.host) and (url.port is None or 0 < url.port < 65536)
        if url.scheme not in ("http", "https") or not is_address:
            raise ValueError(f"base_url is {base_url!r}, expected an address such as http://127.0.0.1:8000/v1")
        if not isinstance(model, str) or not model:
            raise ValueError(f"model is {model!r}, expected the name of the server's model")
        try:
            json.dumps(dict(options), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"options is {options!r:.200}, expected fields of JSON by their names: {error}") from error
        reserved = sorted({"model", "messages", "n", "stream", "response_format"} & set(options))
        if reserved:
            raise ValueError(
                f"options has {', '.join(reserved)}, expected other fields of a request: they are set here"
            )
        key = api_key
        if key is None:
            key = os.environ.get("OPENAI_API_KEY", "")
        if key.split() != [key] * bool(key) or not key.isascii():
            raise ValueError("api_key, or OPENAI_API_KEY, has spaces or other than ASCII characters: expected one word")

        # Limits
        are_seconds = all(isinstance(seconds, (int, float)) and seconds > 0 for seconds in (timeout, patience))
        if not (isinstance(concurrency, int) and concurrency > 0 and are_seconds):
            raise ValueError(
                f"concurrency is {concurrency!r}, timeout {timeout!r}, patience {patience!r}, expected a whole number, "
                "and seconds, above 0"
            )
        if max_calls is not None and not (isinstance(max_calls, int) and max_calls > 0):
            raise ValueError(f"max_calls is {max_calls!r}, expected a whole number above 0, or None for no limit")
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.options = dict(options)
        self.concurrency = concurrency
        self.timeout = timeout
        self.patience = patience
        self.max_calls = max_calls
        self.cache = None
        if cache is not None:
            self.cache = ReplyCache(Path(cache))
        self.calls = 0
        """Requests so far that the server may have charged for: all but those that it refused, or that never reached
        it."""
        self._key = key
        self._is_local = url.host in LOCAL_HOSTS
        self._is_structured = True
        """Whether requests ask for JSON by a schema."""
        self._has_replied = False
        """Whether the server has ever replied to a question."""
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        state = dict(vars(self))
        del state["_lock"], state["_httpx"], state["_tenacity"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._httpx = package("httpx", "service")
        self._tenacity = package("tenacity", "service")
        self._lock = threading.Lock()

    async def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """Return the reply to each question.

        Raises:
            JudgeError: if the patience ends; if the server refuses the key or the model, or every question; or if this
                takes more calls than are left.
        """
        # With a cache, what it has is not asked, and equal questions are asked once
        keys = [self._key_of(question) for question in questions]
        remembered: dict[str, Reply] = {}
        asked = list(range(len(questions)))
        if self.cache is not None:
            remembered = self.cache.read(keys)
            first_by_key: dict[str, int] = {}
            for index, key in enumerate(keys):
                if key not in remembered:
                    first_by_key.setdefault(key, index)
            asked = list(first_by_key.values())
        self._check_calls(len(asked))

        # All at once; after an error, none goes on
        slots = asyncio.Semaphore(self.concurrency)
        pause = _Pause()
        async with self._make_client() as client:
            tasks = []
            for index in asked:
                reply = self._ask_one(client, slots, pause, keys[index], questions[index])
                tasks.append(asyncio.create_task(reply))
            try:
                new_replies = await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise

        # A server that has never replied is another one than was meant
        problems = [reply.problem for reply in new_replies if reply.reply_text is None]
        self._has_replied = self._has_replied or len(problems) < len(new_replies)
        if problems and not self._has_replied:
            raise JudgeError(
                f"{self.base_url} replies to none of {len(problems)} questions; to the first: {problems[0]}"
            )

        # In the order of the questions
        new_by_index = dict(zip(asked, new_replies, strict=True))
        replies: list[Reply] = []
        for index, key in enumerate(keys):
            if index in new_by_index:
                remembered[key] = new_by_index[index]._replace(calls=0)
                replies.append(new_by_index[index])
            else:
                replies.append(remembered[key])
        return replies

    def _key_of(self, question: Question) -> str:
        """Return the key of a question in the cache: a hash of model, messages, options and the sample's number."""
        content = [self.model, question.messages, self.options, question.sample]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _check_calls(self, num_needed: int) -> None:
        """Raise a JudgeError if there may not be this many calls more."""
        if self.max_calls is not None and self.calls + num_needed > self.max_calls:
            raise JudgeError(
                f"the judge has made {self.calls} of max_calls={self.max_calls} calls, and needs {num_needed} more for "
                "these answers: resume with a larger max_calls, or stop here (the agent and the answers are saved)"
            )

    def _make_client(self) -> httpx.AsyncClient:
        """Return a client for one batch: it belongs to this event loop."""
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        verify: bool | ssl.SSLContext = False
        if self.base_url.startswith("https"):
            verify = self._httpx.create_ssl_context()
        return self._httpx.AsyncClient(
            headers=headers, timeout=self.timeout, trust_env=not self._is_local, verify=verify,
            limits=self._httpx.Limits(max_connections=self.concurrency),
        )  # fmt: skip

    async def _ask_one(
        self, client: httpx.AsyncClient, slots: asyncio.Semaphore, pause: _Pause, key: str, question: Question
    ) -> Reply:
        """Ask a question until it is answered, and remember the reply."""
        tenacity = self._tenacity
        backoff = tenacity.wait_random_exponential(multiplier=0.5, max=20)

        def seconds_to_wait(state: Any) -> float:
            error = state.outcome.exception()
            if error.seconds is not None:
                return error.seconds
            return backoff(state)

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_Busy),
            wait=seconds_to_wait,
            stop=tenacity.stop_before_delay(self.patience),
        )
        async with slots:
            try:
                reply, is_lasting = await retrying(self._try, client, pause, question)
            except tenacity.RetryError as error:
                reason = error.last_attempt.exception()
                raise JudgeError(
                    f"no reply from {self.base_url} for patience={self.patience:g} s ({reason}): when it is up again, "
                    "resume the run; with cache= the replies so far are not paid for again"
                ) from error
        if self.cache is not None and is_lasting:
            self.cache.write(key, reply)
        return reply

    async def _try(self, client: httpx.AsyncClient, pause: _Pause, question: Question) -> tuple[Reply, bool]:
        """Ask a question once, or a second time without ``response_format``.

        Returns:
            The reply, and whether the model has given it, so that it may be remembered.

        Raises:
            _Busy: if the request is to be repeated.
            JudgeError: if every request would be refused.
        """
        await pause.end()
        is_structured = self._is_structured
        status, content = await self._post(client, pause, question, is_structured=is_structured)
        if status in REFUSED and is_structured:
            status, content = await self._post(client, pause, question, is_structured=False)
            if status == 200 and self._is_structured:
                self._is_structured = False
                _log.info("%s takes no response_format: verdicts are read from its texts", self.base_url)
        if status == 200:
            return _read_completion(content)
        words = f"status {status}: {_excerpt(content)}"
        if status in REFUSED:
            return Reply(None, words), False
        raise JudgeError(f"{self.base_url}/chat/completions refuses the question ({words}). {_hint(status)}")

    async def _post(
        self, client: httpx.AsyncClient, pause: _Pause, question: Question, *, is_structured: bool
    ) -> tuple[int, bytes]:
        """Send a request and return its status and whole answer; `_Busy` if it is to be repeated."""
        body: dict[str, object] = {"model": self.model, "messages": question.messages, **self.options}
        if isinstance(body.get("seed"), int):
            body["seed"] = self.options["seed"] + question.sample  # type: ignore[operator]
        if is_structured:
            schema = {"name": "verdict", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}

        # A call counts from its beginning, so that concurrent ones do not exceed the limit
        with self._lock:
            self._check_calls(1)
            self.calls += 1
        is_charged = True
        try:
            async with asyncio.timeout(self.timeout):
                status, content, retry_after = await self._exchange(client, body)
        except (self._httpx.ConnectError, self._httpx.ConnectTimeout) as error:
            is_charged = False
            raise _Busy(f"{type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise _Busy(f"no whole answer in timeout={self.timeout:g} s") from error
        except self._httpx.HTTPError as error:
            raise _Busy(f"{type(error).__name__}: {error}") from error
        else:
            is_charged = status == 200
        finally:
            if not is_charged:
                with self._lock:
                    self.calls -= 1

        if status in BUSY or status >= 500:
            seconds = seconds_of(retry_after)
            pause.begin(seconds)
            raise _Busy(f"status {status}: {_excerpt(content)}", seconds)
        return status, content

    async def _exchange(self, client: httpx.AsyncClient, body: Mapping[str, object]) -> tuple[int, bytes, str | None]:
        """Send a request and read its answer up to the limit of bytes; return status, content and Retry-After."""
        content = bytearray()
        request = json.dumps(body).encode()  # ASCII, so that half a surrogate pair in a text can be sent, too
        async with client.stream("POST", f"{self.base_url}/chat/completions", content=request) as response:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":  # a few bytes may be many
                raise JudgeError(
                    f"{self.base_url} sends a compressed answer ({encoding!r:.50}), though none was asked for"
                )
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > MAX_REPLY_BYTES:
                    raise JudgeError(f"{self.base_url} sends more than {MAX_REPLY_BYTES:,} bytes: is it a chat model?")
            return response.status_code, bytes(content), response.headers.get("Retry-After")


class _Pause:
    """Time until which all requests of a batch wait, because the server has asked for it."""

    def __init__(self) -> None:
        self._until = 0.0

    def begin(self, seconds: float | None) -> None:
        """Let all requests wait."""
        if seconds is not None:
            self._until = max(self._until, time.monotonic() + seconds)

    async def end(self) -> None:
        """Wait for the end of the pause."""
        while time.monotonic() < self._until:  # another request may prolong it meanwhile
            await asyncio.sleep(self._until - time.monotonic())


class ReplyCache:
    """Replies by the key of their request, in a file that several processes may use at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with closing(self._connection()) as connection, connection:
                connection.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, text TEXT, problem TEXT)")
        except sqlite3.Error as error:
            raise ValueError(
                f"cache is {str(path)!r}, expected the path of an SQLite file, new or old: {error}"
            ) from error

    def read(self, keys: Sequence[str]) -> dict[str, Reply]:
        """Return the replies of those of these keys that have one."""
        replies = {}
        with closing(self._connection()) as connection:
            for key in keys:
                row = connection.execute("SELECT text, problem FROM replies WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    replies[key] = Reply(*row)
        return replies

    def write(self, key: str, reply: Reply) -> None:
        """Remember a reply."""
        with closing(self._connection()) as connection, connection:
            connection.execute(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", (key, reply.reply_text, reply.problem)
            )

    def _connection(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=60)


def seconds_of(retry_after: str | None) -> float | None:
    """Return the seconds that a header Retry-After asks to wait: a number, or a date; None if it cannot be read.

    Example:
        >>> seconds_of("7"), seconds_of("Fri, 31 Dec 1999 23:59:59 GMT"), seconds_of("soon"), seconds_of(None)
        (7.0, 0.0, None, None)
    """
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return None
    if not seconds < float("inf"):  # NaN too
        return None
    return max(0.0, seconds)


def _read_completion(content: bytes) -> tuple[Reply, bool]:
    """Read the answer to a request: its first choice, and whether it is a completion at all."""
    try:
        choice = json.loads(content)["choices"][0]
        text = _whole(answer_text([choice["message"]]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return Reply(None, f"no chat completion, but {_excerpt(content)}", 1), False
    if choice.get("finish_reason") == "length":
        return Reply(None, "the reply was cut at its longest length: raise max_tokens in options=", 1), True
    if not text.strip():
        refusal = choice["message"].get("refusal")
        return Reply(None, _whole(f"an empty reply ({refusal or choice.get('finish_reason')})"), 1), True
    return Reply(text, calls=1), True


def _whole(text: str) -> str:
    """Return a text with ``?`` for halves of surrogate pairs, which JSON may spell and no file can hold."""
    return text.encode(errors="replace").decode()


def _excerpt(content: bytes) -> str:
    """Return the beginning of a server's words, printable, for an error."""
    return printable(content[:MAX_SHOWN_CHARACTERS].decode("utf-8", errors="replace")) or "nothing"


def _hint(status: int) -> str:
    """Say what to do after a status of refusal."""
    if status in (401, 403):
        return "Give api_key=, or set the environment variable OPENAI_API_KEY"
    if status == 404:
        return "base_url= ends in /v1 with most servers; model= must be one that it has"
    if 300 <= status < 400:
        return "Give the address to which it redirects as base_url="
    return "See the server's documentation"
