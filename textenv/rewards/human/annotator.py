"""What a person is asked, and who asks: a terminal (`textenv.rewards.human.terminal`), or a web page in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

Scale = Literal["thumbs", "0-5", "pairs"]
"""How a person answers: a thumb for one response, a mark for one response, or a choice between two."""

SCORES: dict[str, dict[str, float]] = {
    "thumbs": {"up": 1.0, "down": 0.0},
    "0-5": {str(mark): mark / 5 for mark in range(6)},
    "pairs": {"first": 1.0, "second": 0.0, "tie": 0.5},
}
"""For each scale its answers and the score that each means; of a pair, that of the response shown first."""

SKIP, UNDO, QUIT = "skip", "undo", "quit"


@dataclass(frozen=True)
class Question:
    """One thing to show to a person; everything in it is untrusted text."""

    prompt: Any
    """A text, or the messages of a chat."""
    responses: tuple[Any, ...]
    """One to score, or two to choose from, in the order to show them; texts, or messages where the prompt is a chat."""
    scale: Scale
    number: int = 1
    """Its place among the questions of this batch, from 1."""
    total: int = 1
    """Questions of this batch that the person has to answer."""
    can_undo: bool = False
    """Whether there is a last answer of this batch to take back."""

    @property
    def answers(self) -> tuple[str, ...]:
        """All that may be answered: those of the scale, ``"skip"``, ``"undo"`` if there is anything, ``"quit"``."""
        return (*SCORES[self.scale], SKIP, *([UNDO] if self.can_undo else []), QUIT)


class Annotator(Protocol):
    """Shows a question and waits for the answer."""

    name: str
    """Who or what asks; stands beside each answer in the file."""

    def ask(self, question: Question) -> str:
        """One of ``question.answers``."""
        ...
