"""`Turn`: what the policy said in one go."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from textenv.prompts.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(eq=False)
class Turn:
    """What the policy said in one go, and what it was said to; text is decoded from the ids, never the reverse."""

    prompt: Prompt
    prompt_ids: list[int]
    """The episode's prompt."""
    context_ids: list[int]
    """Everything before this turn: the prompt, and in a conversation the turns and answers since."""
    completion_ids: list[int]
    """The tokens that the policy chose, EOS included."""
    terminated: bool
    """True if the policy ended its turn (EOS or a stop sequence), False if a limit did."""
    tokenizer: PreTrainedTokenizerBase
    stop: tuple[str, ...] = ()
    """The stop texts, if one of them ended the turn; `completion` ends before it."""
    index: int = 0
    """Number of the turn in its episode, from 0."""
    last: bool = True
    """False while the conversation may go on; settled when the task has answered."""

    @functools.cached_property
    def prompt_text(self) -> str:
        """The prompt as it was given, or decoded if it was given as ids or as a chat."""
        content = self.prompt.content
        return content if isinstance(content, str) else self._decode(self.prompt_ids)

    @property
    def completion(self) -> str:
        """The answer without special tokens, without what came before it, and without its stop text."""
        return self.text[: self.completed(self.stop)] if self.stop else self.text

    def completed(self, texts: Sequence[str]) -> int | None:
        """Place in `said` of the first of these texts that the last token completed; None if it completed none.

        One that was complete before was passed over, because the turn was too short to end.
        """
        earlier = dataclasses.replace(self, completion_ids=self.completion_ids[:-1]).text
        stable = len(earlier.rstrip("\N{REPLACEMENT CHARACTER}"))  # a character that was incomplete
        found = [self.text.find(text, max(0, stable + 1 - len(text))) for text in texts]
        return min((at for at in found if at >= 0), default=None)

    @functools.cached_property
    def text(self) -> str:
        """`completion` with the stop text.

        Decoded together with the context, because some tokenizers drop the space that a text begins with.
        """
        before, whole = self._decode(self.context_ids), self._decode(self.context_ids + self.completion_ids)
        return whole[len(before) :] if whole.startswith(before) else self._decode(self.completion_ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class Cut(enum.Enum):
    """How a task ends an episode by a limit of its own."""

    TRUNCATED = "truncated"


TRUNCATED: Literal[Cut.TRUNCATED] = Cut.TRUNCATED
