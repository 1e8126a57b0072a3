"""Sessions: the episodes of programs that ask over HTTP."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from textenv.programs.run import ProgramRun, ProgramStopped
from textenv.prompts.special_tokens import check_unicode

CLAIM_SECONDS = 600
"""Time for which a client waits until an episode begins, as long as OpenAI's client waits for an answer."""
MAX_REWARD = 1e38
"""Largest reward: rollouts hold float32."""
MAX_ENDED = 10_000
"""Number of sessions that are remembered after their end."""


class GoneError(RuntimeError):
    """The session has ended: it has its reward, or was given up."""


@dataclass(eq=False)
class Session:
    """An episode whose program asks over HTTP."""

    run: ProgramRun
    task: object
    seed: int
    """Seed for the program's random numbers."""
    name: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    reward: Future[object] = field(default_factory=Future)
    """What the program has sent as its reward; the error if it has failed."""
    is_claimed: threading.Event = field(default_factory=threading.Event)
    """Set once it has a client."""

    def set_reward(self, reward: object) -> None:
        """Set the reward, which ends the session.

        Raises:
            ValueError: if it is no number, object of numbers or null.
            GoneError: if the session has ended.
        """
        _check_reward(reward)
        try:
            self.reward.set_result(reward)
        except InvalidStateError as error:
            raise GoneError(f"session {self.name} has ended: it has its reward, or was given up") from error

    def wait_for_reward(self) -> object:
        """Wait until the program has sent its reward, and return it; raise the error if it has failed."""
        self.run.on_stop(lambda: self.fail(ProgramStopped("the episode has been given up")))
        return self.reward.result()

    def fail(self, error: BaseException) -> None:
        """End the session by an error, unless it has ended."""
        with suppress(InvalidStateError):
            self.reward.set_exception(error)


class Sessions:
    """All sessions of a server, by name; safe in threads.

    Args:
        may_join: whether a client that brings a name of its own gets an episode that has no client yet.
    """

    def __init__(self, *, may_join: bool) -> None:
        self._may_join = may_join
        self._lock = threading.Lock()
        self._running: dict[str, Session] = {}
        self._unclaimed: deque[Session] = deque()
        self._claims: dict[str, list[Future[Session]]] = {}
        """Requests that wait for an episode, by the name that they bring."""
        self._ended: dict[str, None] = {}
        """Names of sessions that have ended, from the oldest."""
        self._is_closed = False

    def begin(self, session: Session) -> None:
        """Add a session; without a client yet, it gets the client that waits longest."""
        with self._lock:
            if not self._may_join:
                self._claim(session, session.name)
                return
            while self._claims:
                name = next(iter(self._claims))
                claims = [claim for claim in self._claims.pop(name) if claim.set_running_or_notify_cancel()]
                if claims:  # else the client has gone
                    self._claim(session, name)
                    for claim in claims:
                        claim.set_result(session)
                    return
            self._unclaimed.append(session)

    def end(self, session: Session) -> None:
        """Remove a session."""
        with self._lock:
            if session in self._unclaimed:
                self._unclaimed.remove(session)
                return
            self._running.pop(session.name, None)
            self._ended[session.name] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    def close(self) -> None:
        """Tell all clients that wait, and that come from now on, that there are no more episodes."""
        with self._lock:
            self._is_closed = True
            claims = list(chain.from_iterable(self._claims.values()))
            self._claims.clear()
            sessions = [*self._running.values(), *self._unclaimed]
        for session in sessions:
            session.fail(ProgramStopped("the environment is closed"))
        for claim in claims:
            if claim.set_running_or_notify_cancel():
                claim.set_exception(_closed())

    def is_first_unclaimed(self, session: Session) -> bool:
        """Return True for the session that waits longest for a client."""
        with self._lock:
            return bool(self._unclaimed) and self._unclaimed[0] is session

    @property
    def num_unclaimed(self) -> int:
        """Number of episodes that have no client yet."""
        return len(self._unclaimed)

    def running(self, name: str) -> Session:
        """Return a session that has a client; raises as `find`."""
        with self._lock:
            if self._is_running(name):
                return self._running[name]
            raise self._not_running(name)

    def _is_running(self, name: str) -> bool:
        """Return whether a session has a client, and no reward yet; with its reward it ends, and is removed later."""
        return name in self._running and not self._running[name].reward.done()

    def _has_ended(self, name: str) -> bool:
        return name in self._ended or (name in self._running and not self._is_running(name))

    def _not_running(self, name: str) -> Exception:
        """Return the error for a name that has no session."""
        if self._is_closed:
            return _closed()
        if self._has_ended(name):
            return GoneError(f"session {name:.100} has ended: it has its reward, or was given up")
        return FileNotFoundError(
            f"there is no session {name:.100}: a program that was started has its address in TEXTENV_SESSION, one that "
            "connects gets an episode by its first question"
        )

    async def find(self, name: str | None) -> Session:
        """Return the session of this name; of a new name, the next episode that has no client.

        Raises:
            ValueError: without a name.
            GoneError: if the session has ended.
            FileNotFoundError: if there is no such session, and clients cannot join.
            TimeoutError: if no episode has begun in time.
        """
        claim = self._find_or_claim(name)
        if isinstance(claim, Session):
            return claim
        try:
            return await asyncio.wait_for(asyncio.wrap_future(claim), CLAIM_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"no episode has begun for {CLAIM_SECONDS} seconds: is the training over?") from error

    def _find_or_claim(self, name: str | None) -> Session | Future[Session]:
        """Return a session, or the claim of a request that must wait for one."""
        if name is None:
            raise ValueError(
                "the request names no session: ask at /sessions/NAME/v1, with the key KEY:NAME, or with the header "
                "X-Session-ID, where NAME is the same in all requests of an episode"
            )
        with self._lock:
            # Names that are known
            if self._is_running(name):
                return self._running[name]
            if self._is_closed or self._has_ended(name) or not self._may_join:
                raise self._not_running(name)

            # New names
            if self._unclaimed:
                session = self._unclaimed.popleft()
                self._claim(session, name)
                return session
            claim = Future[Session]()
            self._claims.setdefault(name, []).append(claim)
            return claim

    def _claim(self, session: Session, name: str) -> None:
        """Give a session to the client of this name."""
        session.name = name
        self._running[name] = session
        session.run.is_present = True
        session.is_claimed.set()


def _closed() -> GoneError:
    return GoneError("the training has ended, and its environment is closed")


def _check_reward(reward: object) -> None:
    """Raise a ValueError unless a reward is a finite number, numbers by name, or None."""
    parts = [reward]
    if isinstance(reward, Mapping) and reward:
        parts = list(reward.values())
        for name in reward:
            check_unicode(name)
    for part in parts:
        is_number = isinstance(part, (int, float)) and not isinstance(part, bool) and abs(part) <= MAX_REWARD
        if part is not None and not is_number:
            raise ValueError(
                f"the reward is {reward!r:.200}, expected {{'reward': R}}, where R is a number, an object of numbers "
                "by name, or null, which leaves the episode out"
            )
