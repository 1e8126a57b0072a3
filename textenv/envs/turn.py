"""`Turn`: one completion by the policy, with its context."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from textenv.prompts.plain_text import plain_text
from textenv.prompts.prompts import Prompt
from textenv.prompts.special_tokens import first_special_token, special_tokens
from textenv.prompts.tokenize import is_chat
from textenv.rewards.scores import Scores, total

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(eq=False)
class Turn:
    """One completion by the policy, with its context; text is decoded from the ids, never the reverse."""

    prompt: Prompt
    prompt_ids: list[int]
    """Token ids of the episode's prompt."""
    context_ids: list[int]
    """Token ids before this turn: the prompt, and in a conversation the turns and replies since."""
    completion_ids: list[int]
    """The tokens that the policy chose, the one that ended the turn included."""
    terminated: bool
    """True if the policy ended its turn (by one of its ends, or a stop sequence), False if a limit did."""
    tokenizer: PreTrainedTokenizerBase
    stop: tuple[str, ...] = ()
    """Stop texts: `completion` excludes the one that the last token completed, if it completed one."""
    index: int = 0
    """Number of the turn in its episode, from 0."""
    last: bool = True
    """False if the conversation continues; set after the task has replied."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls of tools in the episode so far: ``name``, ``arguments``, ``result`` (a text) and ``error`` (a bool)."""

    @functools.cached_property
    def prompt_text(self) -> str:
        """Prompt as given, or decoded if it was given as ids or as a chat."""
        content = self.prompt.content
        return content if isinstance(content, str) else self._decode(self.prompt_ids)

    @functools.cached_property
    def completion(self) -> str:
        """Text of this turn without context, special tokens (but with tags, see `plain_text`) and stop text."""
        return self.text[: self.completed(self.stop)] if self.stop else self.text

    def completed(self, texts: Sequence[str]) -> int | None:
        """Position in `text` of the first of these texts that the last token completed; None if it completed none.

        A stop text completed by an earlier token is ignored: the turn was still too short to end. A special token in a
        stop text stands for the token, which `text` does not show.
        """
        earlier = self._up_to(len(self.completion_ids) - 1)
        stable = len(earlier.rstrip("\N{REPLACEMENT CHARACTER}"))  # an incomplete character
        positions = []
        for text in texts:
            token = first_special_token(text, self.tokenizer)
            if token:
                positions.append(self._completed_around(token, *text.split(token, 1)))
            else:
                positions.append(self.text.find(text, max(0, stable + 1 - len(text))))
        return min((position for position in positions if position >= 0), default=None)

    def _completed_around(self, token: str, head: str, rest: str) -> int:
        """Position in `text` where ``head``, this special token and ``rest`` begin, if now complete; else -1."""
        last = len(self.completion_ids) - 1
        for index, token_id in enumerate(self.completion_ids):
            if token_id != special_tokens(self.tokenizer)[token]:
                continue
            before = str(self.tokenizer.decode(self.completion_ids[:index]))
            after = str(self.tokenizer.decode(self.completion_ids[index + 1 :]))
            earlier = str(self.tokenizer.decode(self.completion_ids[index + 1 : last]))
            is_new = index == last or not earlier.startswith(rest)
            if before.endswith(head) and after.startswith(rest) and is_new:
                return len(self._up_to(index)) - len(head)
        return -1

    def _up_to(self, count: int) -> str:
        """Text of the first tokens of this turn."""
        return dataclasses.replace(self, completion_ids=self.completion_ids[:count]).text

    @functools.cached_property
    def text(self) -> str:
        """Text of `completion` including the stop text.

        It is decoded together with the context, because some tokenizers drop a leading space.
        """
        before, whole = self._decode(self.context_ids), self._decode(self.context_ids + self.completion_ids)
        return whole[len(before) :] if whole.startswith(before) else self._decode(self.completion_ids)

    @property
    def conversation(self) -> str:
        """Text of the episode after its prompt, this turn included; the same as `completion` in a first turn."""
        start = len(self.prompt_ids)
        return self._decode(self.context_ids[start:]) + self.completion

    def _decode(self, ids: list[int]) -> str:
        return plain_text(ids, self.tokenizer)


def messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Messages of a conversation after its prompt: the policy's turns are the assistant's, replies the user's."""
    found = [{"role": "assistant", "content": turns[0].completion}]
    for before, turn in itertools.pairwise(turns):
        reply = turn.context_ids[len(before.context_ids) + len(before.completion_ids) :]
        found.append({"role": "user", "content": turn._decode(reply)})
        found.append({"role": "assistant", "content": turn.completion})
    return found


def samples(rows: Sequence[int], turns: Sequence[Turn], of_row: Sequence[int], scores: Scores) -> list[dict[str, Any]]:
    """Return texts of episodes, by row, as `EpisodeEnv.samples`: from their turns, the row of each, and its score."""
    found: list[dict[str, Any]] = []
    for row in rows:
        own = [i for i, other in enumerate(of_row) if other == row]
        earned = [scores.earned[i] for i in own]
        columns = {name: [column[i] for i in own] for name, column in scores.parts.items()}
        found.append(
            {
                "prompt": turns[own[0]].prompt_text,
                "completion": turns[own[-1]].conversation,
                "score": _sum(map(total, earned)),
                "parts": {name: _sum(column) for name, column in columns.items()},
            }
        )
        if is_chat(turns[own[0]].prompt):
            found[-1]["chat"] = [_role_and_text(message) for message in turns[own[0]].prompt.content]
        if scores.logged:  # of the last turn
            found[-1]["logged"] = {name: column[own[-1]] for name, column in scores.logged.items()}
        if len(own) > 1:
            found[-1]["turns"] = messages([turns[i] for i in own])
    return found


def _role_and_text(message: Any) -> dict[str, str]:
    content = message.get("content")
    return {"role": str(message["role"]), "content": content if isinstance(content, str) else str(content)}


def _sum(values: Iterable[float | None]) -> float | None:
    """Sum of the numbers; None if there is none."""
    given = [value for value in values if value is not None]
    return sum(given) if given else None


class Cut(enum.Enum):
    """Type of `TRUNCATED`, the reply of a task that ends an episode by its own limit."""

    TRUNCATED = "truncated"


TRUNCATED: Literal[Cut.TRUNCATED] = Cut.TRUNCATED
