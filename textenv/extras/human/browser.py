"""`BrowserAnnotator`: asks a person in a browser on this machine, by mouse or keys; several people answer at once."""

from __future__ import annotations

import base64
import sys
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

from textenv.extras.human.annotator import QUIT, WANTED, Answer, Question, content_text
from textenv.loopback import LoopbackServer
from textenv.rendering import printable

WAIT = 20.0
"""Seconds that a page waits for the next question before it asks again."""
LONGEST = 5_000
"""Maximum number of characters of a comment."""


class BrowserAnnotator:
    """Show questions on a page, whose address is printed to stderr with the first one.

    A question waits until it is answered; a page that is closed or loaded again goes on where it was. With a pair, the
    person may also rate both responses from 0 to 5; with every question, leave a comment. Both are kept in the file.

    Args:
        name: name of the annotator, saved with each answer in the file; different for each of several people.
        port: port of 127.0.0.1; 0 takes a free one.

    Raises:
        OSError: if the port is in use or not allowed.

    Example:
        >>> people = [BrowserAnnotator("ann"), BrowserAnnotator("bob")]  # doctest: +SKIP
        >>> human = HumanReward("runs/pairs.jsonl", scale="pairs", annotator=people)  # doctest: +SKIP
    """

    def __init__(self, name: str = "browser", *, port: int = 0) -> None:
        self.name, self._server = name, LoopbackServer(self._respond, port=port).start()
        self.url = self._server.url
        """Address to open, token included."""
        self._changed = threading.Condition()
        self._question: Question | None = None
        self._answer: Answer | None = None
        self._number, self._announced = 0, False

    def ask(self, question: Question) -> str:
        """See `Annotator.ask`."""
        if not self._announced:
            self._announced = True
            print(f"{self.name}: open {self.url} to answer", file=sys.stderr, flush=True)
        with self._changed:
            self._question, self._answer, self._number = question, None, self._number + 1
            self._changed.notify_all()
            while self._answer is None:
                self._changed.wait()
            self._question = None
            return self._answer

    def cancel(self) -> None:
        """Answer a question that waits by "quit"."""
        with self._changed:
            self._answer = self._answer or Answer(QUIT)
            self._changed.notify_all()

    def _respond(self, path: str, query: dict[str, str], posted: Any) -> Any:
        if path == "/" and posted is None:
            return _page()
        if path == "/question" and posted is None:
            with self._changed:
                self._changed.wait_for(lambda: self._question and str(self._number) != query.get("seen"), WAIT)
                return self._shown()
        if path == "/answer" and isinstance(posted, dict):
            with self._changed:
                question = self._question
                if question is None or posted.get("number") != self._number or self._answer is not None:
                    raise ValueError("this question is answered already: the page shows the next one")
                self._answer = _read(posted, question)
                self._changed.notify_all()
                return {}
        raise FileNotFoundError(f"there is no {path:.100}")

    def _shown(self) -> dict[str, Any]:
        """The question, with printable texts; without one, only its number."""
        if self._question is None:
            return {"number": self._number, "name": printable(self.name)}
        question = self._question
        prompt = question.prompt if isinstance(question.prompt, list) else [{"content": question.prompt}]
        messages = [[printable(str(each.get("role", "prompt"))), printable(content_text([each]))] for each in prompt]
        return {
            "number": self._number, "name": printable(self.name), "messages": messages, "scale": question.scale,
            "responses": [printable(content_text(each)) for each in question.responses],
            "place": question.number, "total": question.total, "answers": question.answers,
            "wanted": WANTED[question.scale],
        }  # fmt: skip


def _read(posted: dict[str, Any], question: Question) -> Answer:
    """Answer that a page has sent; raise a ValueError if it is not one of this question's."""
    answer, ratings, comment = posted.get("answer"), posted.get("ratings") or [], posted.get("comment") or ""
    if answer not in question.answers:
        raise ValueError(f"answer is {answer!r:.100}, expected one of {', '.join(question.answers)}")
    marks = isinstance(ratings, list) and all(x is None or (type(x) is int and 0 <= x <= 5) for x in ratings)
    if not marks or len(ratings) not in (0, len(question.responses)):
        raise ValueError(f"ratings are {ratings!r:.100}, expected numbers from 0 to 5, or null, one for each response")
    if not isinstance(comment, str) or len(comment) > LONGEST:
        raise ValueError(f"the comment is {str(comment)[:50]!r}…, expected a text of at most {LONGEST} characters")
    more = {"ratings": ratings} if any(x is not None for x in ratings) else {}
    return Answer(str(answer), **more | ({"comment": comment.strip()} if comment.strip() else {}))


def _page() -> str:
    folder = Path(__file__).parent
    script = (folder / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    return (folder / "page.html").read_text(encoding="utf-8").replace("DIGEST", digest).replace("SCRIPT", script)
