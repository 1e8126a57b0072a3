"""`BrowserAnnotator`: asks a person in a browser on this machine, by mouse or keys; several people answer at once."""

from __future__ import annotations

import base64
import sys
import threading
from hashlib import sha256
from pathlib import Path

from textenv.extras.human.annotator import INSTRUCTIONS, QUIT, Answer, Question, Remarks, content_text
from textenv.loopback import LoopbackServer
from textenv.rendering import printable

WAIT_SECONDS = 20.0
"""Time that a page waits for the next question before it asks again."""
MAX_COMMENT_CHARACTERS = 5_000
"""Maximum length of a comment."""


class BrowserAnnotator:
    """Show questions on a page; the first question prints the page's address to stderr.

    A question waits until it is answered; a page that is closed or loaded again goes on where it was. The person may
    also leave a comment and, with a pair, rate both responses from 0 to 5. Both are kept in the file.

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
        self.name = name
        self._server = LoopbackServer(self._respond, port=port).start()
        self.url = self._server.url
        """Address to open, token included."""
        self._is_announced = False

        # The present question; `ask` waits in one thread, the server's threads show it and set the answer
        self._changed = threading.Condition()
        self._question: Question | None = None
        self._answer: Answer | None = None
        self._number = 0  # of the question, from 1

    def ask(self, question: Question) -> str:
        """See `Annotator.ask`."""
        if not self._is_announced:
            self._is_announced = True
            print(f"{self.name}: open {self.url} to answer", file=sys.stderr, flush=True)
        with self._changed:
            self._question = question
            self._answer = None
            self._number += 1
            self._changed.notify_all()
            while self._answer is None:
                self._changed.wait()
            self._question = None
            return self._answer

    def cancel(self) -> None:
        """Answer "quit" to a question that waits."""
        with self._changed:
            self._answer = self._answer or Answer(QUIT)
            self._changed.notify_all()

    def _respond(self, path: str, query: dict[str, str], posted: object) -> object:
        """Answer a request of the page; ``posted`` is its JSON, or None.

        Raises:
            FileNotFoundError: on an unknown path.
            ValueError: on an answer that does not fit the present question.
        """
        if path == "/" and posted is None:
            return _page()
        if path == "/question" and posted is None:
            return self._wait_for_question(query.get("seen"))
        if path == "/answer" and isinstance(posted, dict):
            self._take_answer(posted)
            return {}
        raise FileNotFoundError(f"there is no {path:.100}")

    def _wait_for_question(self, seen: str | None) -> dict[str, object]:
        """Return the present question, as soon as it is not the one that the page has seen, or after `WAIT_SECONDS`."""

        def is_new() -> bool:
            return self._question is not None and str(self._number) != seen

        with self._changed:
            self._changed.wait_for(is_new, WAIT_SECONDS)
            return self._present()

    def _take_answer(self, posted: dict[str, object]) -> None:
        """Give an answer that the page has sent to `ask`."""
        with self._changed:
            question = self._question
            if question is None or posted.get("number") != self._number or self._answer is not None:
                raise ValueError("this question is answered already: the page shows the next one")
            self._answer = _read(posted, question)
            self._changed.notify_all()

    def _present(self) -> dict[str, object]:
        """Return the present question with printable texts; without a question, only a number and a name."""
        question = self._question
        if question is None:
            return {"number": self._number, "name": printable(self.name)}

        # A prompt is a chat, or one message without a role
        prompt = question.prompt
        if not isinstance(prompt, list):
            prompt = [{"content": prompt}]
        messages = []
        for message in prompt:
            role = str(message.get("role", "prompt"))
            messages.append([printable(role), printable(content_text([message]))])
        return {
            "number": self._number,
            "name": printable(self.name),
            "messages": messages,
            "scale": question.scale,
            "responses": [printable(content_text(response)) for response in question.responses],
            "place": question.number,
            "total": question.total,
            "answers": question.answers,
            "wanted": INSTRUCTIONS[question.scale],
        }


def _read(posted: dict[str, object], question: Question) -> Answer:
    """Return the answer that a page has sent; raise a ValueError if it is not one of this question's."""
    answer = posted.get("answer")
    if answer not in question.answers:
        raise ValueError(f"answer is {answer!r:.100}, expected one of {', '.join(question.answers)}")

    # Ratings: none, or one for each response, which may be null
    ratings = posted.get("ratings") or []
    expected_counts = (0, len(question.responses))
    if (
        not isinstance(ratings, list)
        or not all(rating is None or _is_mark(rating) for rating in ratings)
        or len(ratings) not in expected_counts
    ):
        raise ValueError(f"ratings are {ratings!r:.100}, expected numbers from 0 to 5, or null, one for each response")

    comment = posted.get("comment") or ""
    if not isinstance(comment, str) or len(comment) > MAX_COMMENT_CHARACTERS:
        raise ValueError(
            f"the comment is {str(comment)[:50]!r}…, expected a text of at most {MAX_COMMENT_CHARACTERS} characters"
        )

    # Only what the person said
    more: Remarks = {}
    if any(rating is not None for rating in ratings):
        more["ratings"] = ratings
    if comment.strip():
        more["comment"] = comment.strip()
    return Answer(str(answer), **more)


def _is_mark(value: object) -> bool:
    return type(value) is int and 0 <= value <= 5


def _page() -> str:
    """Return the page with its script, and the script's hash, the only script that the page may run."""
    folder = Path(__file__).parent
    script = (folder / "page.js").read_text(encoding="utf-8")
    page = (folder / "page.html").read_text(encoding="utf-8")
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    return page.replace("DIGEST", digest).replace("SCRIPT", script)
