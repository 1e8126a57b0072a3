"""Reward functions in another process: the client `RewardService`, the server `serve_reward`, and their messages."""

import asyncio
import hmac
import logging
import math
import secrets
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

from textenv.extras.bounded_http import Answer, BoundedClient, OversizedAnswerError
from textenv.optional import package
from textenv.rendering import printable
from textenv.rewards.calling import call_logged, reward_name
from textenv.rewards.scores import RewardError, Rows, Scores, StopTraining, merge, read_scores, shown
from textenv.rewards.training import NOW, Training
from textenv.rewards.transforms import depends_on_batch
from textenv.rewards.workers import ChildError, attempt, run_in_threads
from textenv.state import stateful_objects

package("pydantic", "service")
from pydantic import BaseModel, ValidationError  # noqa: E402

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response
    from starlette.routing import Router

LOCAL_HOSTS = ("127.0.0.1", "localhost")
FAILURES_TO_OPEN = 5
"""Failures in a row that open the circuit: from then on, requests are tried one at a time."""
MAX_KEPT_REPLIES = 1024
"""Maximum number of replies that a server keeps."""
MOST_BYTES = 2**24
"""Maximum bytes of a request."""
REPLY_BYTES = 2**20
"""Maximum bytes of a reply to an empty request."""
REPLY_BYTES_PER_BYTE = 32
"""Further bytes that a reply may have for each byte of the request, because every token may get a score."""
MAX_SHOWN_CHARACTERS = 2000
"""Characters of a server's words that an error shows."""
_log = logging.getLogger(__name__)


class Request(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """A batch to score, and the point in the training at which its scores are needed."""

    version: Literal[1] = 1
    step: int
    progress: float
    evaluating: bool = False
    prompts: list[str | list[dict[str, object]]]
    completions: list[str | list[dict[str, object]]]
    completion_ids: list[list[int]]
    columns: dict[str, list[object]]


class Reply(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """The fields of `Scores`, as JSON; in this version of the protocol ``score`` is called ``earned``."""

    version: Literal[1] = 1
    earned: list[float | list[float] | None]
    parts: dict[str, list[float | None]]
    raw: dict[str, list[float | None]]
    logged: dict[str, list[float | None]]
    failed: frozenset[int]


class ServiceError(StopTraining, RewardError):
    """A server refuses or does not reply. Training ends, even where failing answers are skipped."""


@dataclass(eq=False)
class RewardService:
    """Reward function on the server of a `serve_reward`; needs the extra ``service``.

    A request that fails or times out is repeated with exponential back-off and jitter. It carries a key, a hash of its
    content and a random number, so the server does not compute it twice. When the patience ends, the call fails, and
    the scores received so far are kept for a call with the same answers.

    Args:
        url: address of the server, such as ``http://127.0.0.1:8000``.
        token: the server's token.
        batch_size: maximum number of answers in a request.
        in_flight: maximum number of requests sent at the same time.
        timeout: seconds until a whole reply must have come.
        patience: seconds for which a request is repeated.

    Raises:
        ServiceError: by a call, if the patience ends, or at once if a reply is too large, compressed, or without the
            scores of these answers.
        ChildError: by a call, if the function on the server raised an exception.
        ValueError: on a wrong argument, or by a call whose columns are not JSON.
    """

    __name__ = "reward_service"
    url: str
    _: KW_ONLY
    token: str = field(repr=False)
    batch_size: int = 32
    in_flight: int = 4
    timeout: float = 60.0
    patience: float = 300.0

    def __post_init__(self) -> None:
        self._httpx = package("httpx", "service")
        self._retry = package("tenacity", "service")
        url = self._httpx.URL(self.url)
        smallest = min(self.batch_size, self.in_flight, self.timeout, self.patience)
        is_address = url.scheme[:4] == "http" and url.host
        is_token = self.token.split() == [self.token]
        if not (is_address and is_token and smallest > 0):
            raise ValueError(f"{self} was given, expected http://host:port, a token and numbers above 0")

        # Certificates are read once; without TLS there are none to check.
        verify: bool | ssl.SSLContext = False
        if url.scheme == "https":
            verify = self._httpx.create_ssl_context()
        self._make_client = partial(
            self._httpx.Client,
            base_url=url,
            timeout=self.timeout,
            headers={"Authorization": f"Bearer {self.token}"},
            trust_env=url.host not in LOCAL_HOSTS,
            verify=verify,
        )

        # The circuit breaker: failures in a row, and the lock of the only request while the circuit is open
        self._failures = 0
        self._last_failure = ""
        self._probe = threading.Lock()

        # Keys of requests, and the replies that no call has returned yet
        self._run_key = secrets.token_bytes(16)
        self._uses_of_content = Counter[str]()
        self._replies: dict[str, Reply] = {}

    def __reduce__(self) -> tuple[Callable[[], "RewardService"], tuple[()]]:
        return partial(RewardService, **asdict(self)), ()

    def __call__(self, /, prompts: Sequence[object], completions: Sequence[object], **more: Sequence[object]) -> Scores:
        """Return the scores of a batch; columns are sent as JSON, in which tuples and arrays are lists."""
        rows = Rows({"completion_ids": [[0]] * len(prompts), **more, "prompts": prompts, "completions": completions})

        # One request for each span of rows
        spans = []
        bodies: dict[str, str] = {}
        parts: dict[str, Rows] = {}
        for start in range(0, len(rows), self.batch_size):
            span = range(len(rows))[start : start + self.batch_size]
            part = rows.part(span.start, span.stop)
            key, body = self._body(part.columns)
            spans.append(span)
            bodies[key] = body
            parts[key] = part

        # Threads take the next key from a common iterator
        unsent = [key for key in bodies if key not in self._replies]
        send = partial(self._send, iter(unsent), bodies, parts)
        num_threads = min(self.in_flight, len(unsent))
        try:
            for error in run_in_threads([send] * num_threads, None):
                if error is not None:
                    raise error
        except BaseException:  # Ctrl-C too: in the next call, the same answers have the same keys
            unsent.clear()
            self._uses_of_content.subtract(key.partition("-")[0] for key in bodies)
            raise

        # The replies together
        scores_of_parts = []
        for key in bodies:
            reply = self._replies.pop(key)
            fields = reply.model_dump(exclude={"version"})
            score = fields.pop("earned")
            scores_of_parts.append(Scores(score=score, **fields))
        scores = merge(len(rows), zip(spans, scores_of_parts, strict=True))
        return replace(scores, score=read_scores(scores.score, rows, name=self.__name__).score)

    def _body(self, columns: Mapping[str, Sequence[object]]) -> tuple[str, str]:
        """Return the key and the JSON of a request; ValueError if the columns are not JSON."""
        now = NOW.get()
        unsent = None
        if not now.evaluating:
            unsent = {"evaluating"}  # servers before version 0.10 do not know this field
        try:
            further_columns = dict(columns)
            fields = {
                "step": now.step,
                "progress": now.progress,
                "evaluating": now.evaluating,
                "prompts": further_columns.pop("prompts"),
                "completions": further_columns.pop("completions"),
                "completion_ids": further_columns.pop("completion_ids"),
                "columns": further_columns,
            }
            request = Request.model_validate(fields)
            body = request.model_dump_json(exclude=unsent, fallback=lambda value: value.tolist())
        except ValueError as error:
            raise ValueError(f"a RewardService needs texts or chats, and columns that are JSON: {error}") from error

        # Equal contents in one call, or in later calls, are different requests
        content = blake2b(body.encode(), key=self._run_key, digest_size=16).hexdigest()
        self._uses_of_content[content] += 1
        return f"{content}-{self._uses_of_content[content]}", body

    def _send(self, keys: Iterator[str], bodies: dict[str, str], parts: dict[str, Rows]) -> None:
        """Send the requests of these keys, and keep their replies; runs in a thread."""
        client = BoundedClient(self._make_client, seconds=self.timeout)
        try:
            for key in keys:
                answer = self._answer(client, key, bodies[key])
                if answer.status == 422:
                    raise ChildError(_excerpt(answer.text))
                if answer.status != 200:
                    raise ServiceError(f"{self.url} answers {answer.status}: {_excerpt(answer.text)}")
                self._replies[key] = self._read(answer, parts[key])
        finally:
            client.close()

    def _answer(self, client: BoundedClient, key: str, body: str) -> Answer:
        """Send a request until it is answered; raise a ServiceError if the patience ends, or on a large answer."""
        retry = self._retry
        retrying = retry.Retrying(
            retry=retry.retry_if_exception_type(self._httpx.HTTPError),
            wait=retry.wait_random_exponential(multiplier=0.2, max=10),
            stop=retry.stop_before_delay(self.patience),
        )
        try:
            return retrying(self._try, client, key, body)
        except retry.RetryError as error:
            num_scored = sum(len(reply.earned) for reply in list(self._replies.values()))
            raise ServiceError(
                f"no reply from {self.url} for {self.patience:g} s ({self._last_failure}); in this process, "
                f"{num_scored} answers are scored and kept: start it again with the same token"
            ) from error
        except OversizedAnswerError as error:
            raise ServiceError(f"{self.url} gives no scores: {error}. Is it a serve_reward?") from error

    def _try(self, client: BoundedClient, key: str, body: str) -> Answer:
        """Send a request once; raise httpx.HTTPError, which is tried again, if the server is down or overloaded."""
        most_bytes = REPLY_BYTES + REPLY_BYTES_PER_BYTE * len(body)
        headers = {"Idempotency-Key": key}
        turn: AbstractContextManager[object] = nullcontext()
        if self._failures >= FAILURES_TO_OPEN:
            turn = self._probe  # one at a time while the circuit is open
        with turn:
            try:
                answer = client.post("v1/score", content=body, headers=headers, most_bytes=most_bytes)
                if answer.status >= 500 or answer.status == 429:
                    raise self._httpx.HTTPError(f"status {answer.status}")
            except self._httpx.HTTPError as error:
                failures = self._failures + 1
                self._failures = failures
                self._last_failure = f"{type(error).__name__}: {shown(error)}"
                if failures == FAILURES_TO_OPEN:  # once, whatever other threads add
                    _log.warning("%s fails (%s): trying for %g s", self.url, self._last_failure, self.patience)
                raise
            self._failures = 0
            return answer

    def _read(self, answer: Answer, rows: Rows) -> Reply:
        """Return the scores of these rows from an answer; raise a ServiceError if it has others, or none."""
        try:
            reply = Reply.model_validate_json(answer.content)
            check_reply(reply, rows)
        except ValueError as error:
            raise ServiceError(
                f"{self.url} gives no scores of {len(rows)} answers ({_excerpt(str(error))}): is it a serve_reward, "
                "and is its textenv another version?"
            ) from error
        return reply


def _excerpt(text: str) -> str:
    """Return the beginning of a server's words, printable, for an error."""
    return printable(text[:MAX_SHOWN_CHARACTERS])


def finite(column: Sequence[float | list[float] | None]) -> bool:
    """Return True if all numbers of a column are finite."""
    numbers = [entry for entry in column if isinstance(entry, float)]
    for entry in column:
        if isinstance(entry, list):
            numbers.extend(entry)
    return all(map(math.isfinite, numbers))


def check_reply(reply: Reply, rows: Rows) -> None:
    """Raise a ValueError unless a reply fits these rows: one entry per row or token, and failed rows among them."""
    # Numbers of entries
    columns: dict[str, Sequence[float | list[float] | None]] = {"earned": reply.earned}
    for kind in ("parts", "raw", "logged"):
        for name, column in getattr(reply, kind).items():
            columns[f"{kind} {name!r:.100}"] = column
    for name, column in columns.items():
        if len(column) != len(rows):
            raise ValueError(f"{name} has {len(column)} entries")
    for row, entry in enumerate(reply.earned):
        if isinstance(entry, list) and len(entry) != rows.tokens(row):
            raise ValueError(f"earned has {len(entry)} numbers for the {rows.tokens(row)} tokens of answer {row}")

    # If `earned` itself is not finite, that is the function's fault, and `read_scores` says so with its name
    if finite(reply.earned):
        for name, column in columns.items():
            if not finite(column):
                raise ValueError(f"{name} has numbers that are not finite")

    missing = sorted(row for row in reply.failed if not 0 <= row < len(rows))
    if missing:
        raise ValueError(f"failed has {missing[0]}, but the answers are 0 to {len(rows) - 1}")


def serve_reward(
    function: Callable, *, host: str = LOCAL_HOSTS[0], port: int = 8000, token: str = "", workers: int = 1
) -> None:
    """Compute a reward function for `textenv.RewardService` in other processes, until Ctrl-C.

    Args:
        function: the reward function; each row's score must depend on this row alone.
        host: address to listen at; one that other machines can reach needs a token.
        port: port to listen at.
        token: secret text that requests must have; by default a new one, which is printed.
        workers: maximum number of calls of the function at the same time.

    Raises:
        ValueError: if the host, the port or the function is refused.
    """
    if not (0 < port < 2**16 and (token or host in LOCAL_HOSTS)):
        raise ValueError(f"host is {host!r}, port {port}: if others may reach the host, give token=, a secret text")
    secret = token or secrets.token_urlsafe(24)
    app = reward_app(function, token=secret, workers=workers)
    uvicorn = package("uvicorn", "service")
    shown_token = repr(secret)
    if token:
        shown_token = "..."
    print(f"RewardService('http://{host}:{port}', token={shown_token})", flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning", lifespan="off", ws="none")


def reward_app(function: Callable[..., object], *, token: str, workers: int = 1) -> "Router":
    """ASGI application of `serve_reward`, which computes the request of each key once."""
    if not callable(function) or depends_on_batch(function):
        raise ValueError(f"function is {function!r:.200}, expected one that scores rows apart: normalize in the client")
    states = stateful_objects(function)
    if states:
        message = "%s has a state (%s), which stays in this server: checkpoints of a training do not have it"
        _log.warning(message, reward_name(function), ", ".join(path or "its own" for path in states))
    response = package("starlette.responses", "service").Response
    routing = package("starlette.routing", "service")
    pool = ThreadPoolExecutor(workers)
    replies: dict[str, Future[Reply | Exception]] = {}

    def reply_to(key: str, batch: Request) -> Future[Reply | Exception]:
        """Return the reply of a key, which is computed if there is none yet, or if the last one failed."""
        is_new = key not in replies
        if is_new or (replies[key].done() and isinstance(replies[key].result(), Exception)):
            replies[key] = pool.submit(attempt, partial(_compute, function, batch))
        if len(replies) > MAX_KEPT_REPLIES:
            oldest = next(iter(replies))
            del replies[oldest]
        return replies[key]

    async def score(request: "HTTPRequest") -> "Response":
        # Refuse requests without the token, and large ones before they are read
        authorization = request.headers.get("Authorization", "")
        if not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            return response("wrong token: without token=, each start of serve_reward makes and prints a new one", 401)
        if int(request.headers.get("Content-Length", MOST_BYTES + 1)) > MOST_BYTES:
            return response(f"a request may have {MOST_BYTES:,} bytes: give RewardService a lower batch_size=", 413)
        key = request.headers.get("Idempotency-Key") or secrets.token_hex()
        try:
            batch = Request.model_validate_json(await request.body())
        except ValidationError as error:
            return response(f"the server expects other requests; is its textenv another version? {error}", 400)

        # Reply; several requests of one key wait for the same scores
        outcome = await asyncio.wrap_future(reply_to(key, batch))
        if not isinstance(outcome, Exception):
            return response(outcome.model_dump_json())
        error_message = f"{type(outcome).__name__}: {shown(outcome)}"
        _log.warning("%s raised %s", reward_name(function), error_message)
        return response(error_message, 422)

    return routing.Router([routing.Route("/v1/score", score, methods=["POST"])])


def _compute(function: Callable[..., object], batch: Request) -> Reply:
    """Call the reward function on a request's batch, at the request's point in the training."""
    columns = batch.columns | batch.model_dump(include={"prompts", "completions", "completion_ids"})
    now = Training(batch.step, batch.progress, batch.evaluating)
    returned, logged = call_logged(function, columns, None, now)
    scores = read_scores(returned, Rows(columns), name=reward_name(function), finite=False)
    earned: list[object] = []
    for entry in scores.score:
        if entry is not None and not isinstance(entry, float):
            entry = entry.tolist()
        earned.append(entry)
    fields = vars(scores) | {"earned": earned, "logged": {**scores.logged, **logged}}
    del fields["score"]
    return Reply(**fields)
