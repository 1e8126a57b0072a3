"""Reward functions in another process: the client `RewardService`, the server `serve_reward`, and their messages."""

import asyncio
import hmac
import logging
import math
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

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

LOCAL, BREAK, KEPT, MOST_BYTES = ("127.0.0.1", "localhost"), 5, 1024, 2**24
"""This machine; failures in a row that open the circuit; replies that a server keeps; maximum size of a request."""
REPLY_BYTES = 2**20
REPLY_BYTES_PER_BYTE = 32
"""Maximum size of a reply: the first, and as much for each byte of the request, whose tokens may each get a score."""
SHOWN = 2000
"""Characters of a server's words that an error shows."""
_log = logging.getLogger(__name__)


class Request(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """Batch to score, at a point in the training."""

    version: Literal[1] = 1
    step: int
    progress: float
    evaluating: bool = False
    prompts: list[str | list[dict[str, Any]]]
    completions: list[str | list[dict[str, Any]]]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]


class Reply(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """Fields of `Scores`."""

    version: Literal[1] = 1
    earned: list[float | list[float] | None]
    parts: dict[str, list[float | None]]
    raw: dict[str, list[float | None]]
    logged: dict[str, list[float | None]]
    failed: frozenset[int]


class ServiceError(StopTraining, RewardError):
    """A server refuses, or does not reply: training ends, also where failing answers are skipped."""


@dataclass(eq=False)
class RewardService:
    """Reward function at the URL of a `serve_reward`, which has the token; needs ``textenv[service]``.

    A request has at most ``batch_size`` answers; ``in_flight`` are sent at a time. One that fails, or whose whole reply
    takes more than ``timeout`` seconds, is repeated with exponential back-off and jitter, not computed again: it has a
    key, a hash of its content with a random number. After ``patience`` seconds of it, the call fails with a
    `ServiceError`, and keeps its scores for a call with the same answers. A reply that is too large, compressed, or has
    not the scores of these answers is a `ServiceError` at once. An exception of the function on the server is a
    `ChildError`.
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
        self._httpx, self._retry = package("httpx", "service"), package("tenacity", "service")
        url, numbers = self._httpx.URL(self.url), (self.batch_size, self.in_flight, self.timeout, self.patience)
        if not (url.scheme[:4] == "http" and url.host and min(numbers) > 0 and self.token.split() == [self.token]):
            raise ValueError(f"{self} was given, expected http://host:port, a token and numbers above 0")
        # Certificates are read once; without TLS there are none to check.
        verify = self._httpx.create_ssl_context() if url.scheme == "https" else False
        self._make_client = partial(
            self._httpx.Client,
            base_url=url,
            timeout=self.timeout,
            headers={"Authorization": f"Bearer {self.token}"},
            trust_env=url.host not in LOCAL,
            verify=verify,
        )
        self._probe, self._failures, self._last = threading.Lock(), 0, ""
        self._run, self._used, self._replies = secrets.token_bytes(16), Counter[str](), dict[str, Reply]()

    def __reduce__(self) -> Any:
        return partial(RewardService, **asdict(self)), ()

    def __call__(self, /, prompts: Any, completions: Any, **more: Any) -> Scores:
        """Return the scores of a batch; columns are sent as JSON, in which tuples and arrays are lists."""
        rows = Rows({"completion_ids": [[0]] * len(prompts), **more, "prompts": prompts, "completions": completions})
        spans = [range(len(rows))[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
        bodies = dict(self._body(**rows.part(span.start, span.stop).columns) for span in spans)
        todo = [key for key in bodies if key not in self._replies]
        parts = {key: rows.part(span.start, span.stop) for key, span in zip(bodies, spans, strict=True)}
        work = partial(self._send, iter(todo), bodies, parts)
        try:
            for error in filter(None, run_in_threads([work] * min(self.in_flight, len(todo)), None)):
                raise error
        except BaseException:  # Ctrl-C too: in the next call, the same answers have the same keys
            todo.clear()
            self._used.subtract(key.partition("-")[0] for key in bodies)
            raise
        found = [Scores(**self._replies.pop(key).model_dump(exclude={"version"})) for key in bodies]
        scores = merge(len(rows), zip(spans, found, strict=True))
        return replace(scores, earned=read_scores(scores.earned, rows, name=self.__name__).earned)

    def _body(self, /, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> tuple[str, str]:
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, "columns": columns}
        try:
            now = NOW.get()
            request = Request(step=now.step, progress=now.progress, evaluating=now.evaluating, **given)
            unsent = None if now.evaluating else {"evaluating"}  # which servers before version 0.10 do not know
            body = request.model_dump_json(exclude=unsent, fallback=lambda value: value.tolist())
        except ValueError as error:
            raise ValueError(f"a RewardService needs texts or chats, and columns that are JSON: {error}") from error
        content = blake2b(body.encode(), key=self._run, digest_size=16).hexdigest()
        self._used[content] += 1
        return f"{content}-{self._used[content]}", body

    def _send(self, keys: Iterator[str], bodies: dict[str, str], parts: dict[str, Rows]) -> None:
        """Send the requests of these keys, in a thread of its own, and keep their replies."""
        client = BoundedClient(self._make_client, seconds=self.timeout)
        try:
            for key in keys:
                answer = self._answer(client, key, bodies[key])
                if answer.status == 422:
                    raise ChildError(printable(answer.text[:SHOWN]))
                if answer.status != 200:
                    raise ServiceError(f"{self.url} answers {answer.status}: {printable(answer.text[:SHOWN])}")
                self._replies[key] = self._read(answer, parts[key])
        finally:
            client.close()

    def _answer(self, client: BoundedClient, key: str, body: str) -> Answer:
        """Send a request until it is answered; a ServiceError if that takes too long, or the answer is too large."""
        retry = self._retry
        retrying = retry.Retrying(
            retry=retry.retry_if_exception_type(self._httpx.HTTPError),
            wait=retry.wait_random_exponential(multiplier=0.2, max=10),
            stop=retry.stop_before_delay(self.patience),
        )
        try:
            return retrying(self._try, client, key, body)
        except retry.RetryError as error:
            kept = sum(len(reply.earned) for reply in list(self._replies.values()))
            raise ServiceError(
                f"no reply from {self.url} for {self.patience:g} s ({self._last}); in this process, {kept} answers are "
                "scored and kept: start it again with the same token"
            ) from error
        except OversizedAnswerError as error:
            raise ServiceError(f"{self.url} gives no scores: {error}. Is it a serve_reward?") from error

    def _try(self, client: BoundedClient, key: str, body: str) -> Answer:
        most_bytes = REPLY_BYTES + REPLY_BYTES_PER_BYTE * len(body)
        with self._probe if self._failures >= BREAK else nullcontext():  # one at a time while the circuit is open
            try:
                headers = {"Idempotency-Key": key}
                answer = client.post("v1/score", content=body, headers=headers, most_bytes=most_bytes)
                if answer.status >= 500 or answer.status == 429:
                    raise self._httpx.HTTPError(f"status {answer.status}")
            except self._httpx.HTTPError as error:
                self._failures = failures = self._failures + 1
                self._last = f"{type(error).__name__}: {shown(error)}"
                if failures == BREAK:
                    _log.warning("%s fails (%s): trying for %g s", self.url, self._last, self.patience)
                raise
            self._failures = 0
            return answer

    def _read(self, answer: Answer, rows: Rows) -> Reply:
        """Return the scores of these rows in an answer; a ServiceError if it has others, or none."""
        try:
            reply = Reply.model_validate_json(answer.content)
            check_reply(reply, rows)
        except ValueError as error:
            raise ServiceError(
                f"{self.url} gives no scores of {len(rows)} answers ({printable(str(error)[:SHOWN])}): is it a "
                "serve_reward, and is its textenv another version?"
            ) from error
        return reply


def finite(column: Sequence[float | list[float] | None]) -> bool:
    """Return True if all numbers of a column are finite."""
    numbers = [entry for entry in column if isinstance(entry, float)]
    for entry in column:
        if isinstance(entry, list):
            numbers.extend(entry)
    return all(map(math.isfinite, numbers))


def check_reply(reply: Reply, rows: Rows) -> None:
    """Raise a ValueError unless a reply has one entry for each row and token, and names failed rows that there are."""
    columns = {"earned": reply.earned}
    for kind in ("parts", "raw", "logged"):
        columns |= {f"{kind} {name!r:.100}": column for name, column in getattr(reply, kind).items()}
    for name, column in columns.items():
        if len(column) != len(rows):
            raise ValueError(f"{name} has {len(column)} entries")
    for row, entry in enumerate(reply.earned):
        if isinstance(entry, list) and len(entry) != rows.tokens(row):
            raise ValueError(f"earned has {len(entry)} numbers for the {rows.tokens(row)} tokens of answer {row}")
    if finite(reply.earned):  # numbers that are not finite are the function's, and said with its name
        for name, column in columns.items():
            if not finite(column):
                raise ValueError(f"{name} has numbers that are not finite")
    missing = sorted(row for row in reply.failed if not 0 <= row < len(rows))
    if missing:
        raise ValueError(f"failed has {missing[0]}, but the answers are 0 to {len(rows) - 1}")


def serve_reward(
    function: Callable, *, host: str = LOCAL[0], port: int = 8000, token: str = "", workers: int = 1
) -> None:
    """Compute a reward function for `textenv.RewardService` in other processes, until Ctrl-C.

    Requests need the token; by default it is a new one, which is printed. At most ``workers`` calls run at a time.
    A function whose scores depend on other rows is refused, as is a host that others can reach without a token.
    """
    if not (0 < port < 2**16 and (token or host in LOCAL)):
        raise ValueError(f"host is {host!r}, port {port}: if others may reach the host, give token=, a secret text")
    secret = token or secrets.token_urlsafe(24)
    app, uvicorn = reward_app(function, token=secret, workers=workers), package("uvicorn", "service")
    print(f"RewardService('http://{host}:{port}', token={'...' if token else repr(secret)})", flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning", lifespan="off", ws="none")


def reward_app(function: Callable[..., Any], *, token: str, workers: int = 1) -> Any:
    """ASGI application of `serve_reward`, which computes the request of each key once."""
    if not callable(function) or depends_on_batch(function):
        raise ValueError(f"function is {function!r:.200}, expected one that scores rows apart: normalize in the client")
    states = stateful_objects(function)
    if states:
        said = "%s has a state (%s), which stays in this server: checkpoints of a training do not have it"
        _log.warning(said, reward_name(function), ", ".join(path or "its own" for path in states))
    pool, known = ThreadPoolExecutor(workers), dict[str, Future[Any]]()
    response, routing = package("starlette.responses", "service").Response, package("starlette.routing", "service")

    async def score(request: Any) -> Any:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {token}".encode()):
            return response("wrong token: without token=, each start of serve_reward makes and prints a new one", 401)
        if int(request.headers.get("Content-Length", MOST_BYTES + 1)) > MOST_BYTES:
            return response(f"a request may have {MOST_BYTES:,} bytes: give RewardService a lower batch_size=", 413)
        key = request.headers.get("Idempotency-Key") or secrets.token_hex()
        try:
            batch = Request.model_validate_json(await request.body())
        except ValidationError as error:
            return response(f"the server expects other requests; is its textenv another version? {error}", 400)
        if key not in known or (known[key].done() and isinstance(known[key].result(), Exception)):
            known[key] = pool.submit(attempt, partial(_compute, function, batch))
            known.pop(next(iter(known)) if len(known) > KEPT else "", None)
        outcome = await asyncio.wrap_future(known[key])
        if not isinstance(outcome, Exception):
            return response(outcome.model_dump_json())
        said = f"{type(outcome).__name__}: {shown(outcome)}"
        _log.warning("%s raised %s", reward_name(function), said)
        return response(said, 422)

    return routing.Router([routing.Route("/v1/score", score, methods=["POST"])])


def _compute(function: Callable[..., Any], batch: Request) -> Reply:
    columns = batch.columns | batch.model_dump(include={"prompts", "completions", "completion_ids"})
    returned, logged = call_logged(function, columns, None, Training(batch.step, batch.progress, batch.evaluating))
    scores = read_scores(returned, Rows(columns), name=reward_name(function), finite=False)
    earned = [x if x is None or isinstance(x, float) else x.tolist() for x in scores.earned]
    return Reply(**vars(scores) | {"earned": earned, "logged": {**scores.logged, **logged}})
