"""Questions for a person, and the protocol of an annotator (such as a terminal or a web page)."""

import json
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypedDict, Unpack, runtime_checkable

Scale = Literal["thumbs", "0-5", "pairs"]
"""Scale of the answers: a thumb per response, a mark per response, or a choice between two responses."""

SCORES: dict[str, dict[str, float]] = {
    "thumbs": {"up": 1.0, "down": 0.0},
    "0-5": {str(mark): mark / 5 for mark in range(6)},
    "pairs": {"first": 1.0, "second": 0.0, "tie": 0.5},
}
"""For each scale its answers and their scores; for a pair, the score of the response shown first."""

SKIP = "skip"
UNDO = "undo"
QUIT = "quit"
INSTRUCTIONS = {
    "thumbs": "Is this response good?",
    "0-5": "How good is this response, from 0 (useless) to 5 (could not be better)?",
    "pairs": "Which response is better?",
}
"""For each scale the sentence that asks for an answer."""


class Remarks(TypedDict, total=False):
    """What a person has added to an answer."""

    ratings: list[int | None]
    """Marks from 0 to 5 of both responses of a pair."""
    comment: str


class Answer(str):
    """An answer with further remarks of the person."""

    more: Remarks

    def __new__(cls, answer: str, **more: Unpack[Remarks]) -> Self:
        """Create an answer from its text and the remarks."""
        instance = super().__new__(cls, answer)
        instance.more = more
        return instance


@dataclass(frozen=True)
class Question:
    """A prompt and responses to show to a person; all their text is untrusted."""

    prompt: object
    """A text, or the messages of a chat."""
    responses: tuple[object, ...]
    """One response to score or two to compare, in display order; texts, or messages if the prompt is a chat."""
    scale: Scale
    number: int = 1
    """Index of the question in this batch, from 1."""
    total: int = 1
    """Number of questions in this batch."""
    can_undo: bool = False
    """True if the previous answer can be undone."""

    @property
    def answers(self) -> tuple[str, ...]:
        """All allowed answers: those of the scale, ``"skip"``, ``"undo"`` if possible, and ``"quit"``."""
        if self.can_undo:
            return (*SCORES[self.scale], SKIP, UNDO, QUIT)
        return (*SCORES[self.scale], SKIP, QUIT)


@runtime_checkable
class Annotator(Protocol):
    """Interface that shows a question and waits for the answer."""

    name: str
    """Name of the annotator, saved with each answer in the file."""

    def ask(self, question: Question) -> str:
        """Return one of ``question.answers``, as a text or as an `Answer` with further remarks."""


def content_text(content: object) -> str:
    """Return a text, or the content of a single message, unchanged; anything else as JSON."""
    if isinstance(content, list) and len(content) == 1 and set(content[0]) <= {"role", "content"}:
        content = content[0].get("content")
    if isinstance(content, str):
        return content
    return json.dumps(content, ensure_ascii=False)
