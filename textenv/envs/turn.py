"""`Turn`: one completion by the policy, with its context."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

from textenv.prompts.messages import Message
from textenv.prompts.plain_text import plain_text
from textenv.prompts.prompts import Prompt, TurnLimits
from textenv.prompts.special_tokens import first_special_token, special_tokens
from textenv.prompts.tokenize import begins_message, is_chat, starts_answers_anew
from textenv.rewards.scores import Scores, total

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from textenv.rollout import Sample


class ToolCall(TypedDict):
    """A call of a tool, and what came of it."""

    name: str
    arguments: object
    """As the model wrote them: JSON."""
    result: str
    error: bool


@dataclass(eq=False)
class Turn:
    """One completion by the policy, with its context; text is decoded from the ids, never the reverse."""

    prompt: Prompt
    """The episode's prompt; with another content where the task has given the model a new context."""
    prompt_ids: list[int]
    """Token ids of the prompt."""
    context_ids: list[int]
    """Token ids before this turn: the prompt, and in a conversation the earlier turns and replies after it."""
    completion_ids: list[int]
    """Token ids that the policy chose, with the one that ended the turn."""
    terminated: bool
    """True if the policy ended the turn (by an end of its own, or a stop sequence), False if a limit did."""
    tokenizer: PreTrainedTokenizerBase
    stop: tuple[str, ...] = ()
    """Stop texts: `completion` excludes the one that the last token completed, if it completed one."""
    index: int = 0
    """Number of the turn in its episode, from 0."""
    last: bool = True
    """False if the conversation continues; set after the task has replied."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls of tools in the episode so far."""

    @functools.cached_property
    def prompt_text(self) -> str:
        """Prompt as given, or decoded if it was given as ids or as a chat."""
        content = self.prompt.content
        if isinstance(content, str):
            return content
        return self._decode(self.prompt_ids)

    @functools.cached_property
    def completion(self) -> str:
        """Text of this turn without context, special tokens (but with tags, see `plain_text`) and stop text."""
        if not self.stop:
            return self.text
        return self.text[: self.find_completed(self.stop)]

    def find_completed(self, texts: Sequence[str]) -> int | None:
        """Return the position in `text` of the first of these texts that the last token completed; None if none.

        A stop text that an earlier token completed is ignored: the turn was still too short to end. A special token
        inside a stop text is matched by its id, because `text` does not show it.
        """
        earlier_text = self._text_of_first(len(self.completion_ids) - 1)
        # A character with missing bytes is decoded as the replacement character: do not count it as complete
        num_complete = len(earlier_text.rstrip("\N{REPLACEMENT CHARACTER}"))

        positions = []
        for text in texts:
            token = first_special_token(text, self.tokenizer)
            if token:
                head, tail = text.split(token, 1)
                position = self._completed_around(token, head, tail)
            else:
                search_from = max(0, num_complete + 1 - len(text))  # earlier, it was complete without the last token
                position = self.text.find(text, search_from)
            if position >= 0:
                positions.append(position)
        return min(positions, default=None)

    def _completed_around(self, token: str, head: str, tail: str) -> int:
        """Return where in `text` a stop text with a special token begins; -1 unless the last token completed it.

        Args:
            token: the special token.
            head: the stop text before it.
            tail: the stop text after it.
        """
        last = len(self.completion_ids) - 1
        token_id = special_tokens(self.tokenizer)[token]
        for index, chosen_id in enumerate(self.completion_ids):
            if chosen_id != token_id:
                continue
            text_before = str(self.tokenizer.decode(self.completion_ids[:index]))
            text_after = str(self.tokenizer.decode(self.completion_ids[index + 1 :]))
            earlier_text_after = str(self.tokenizer.decode(self.completion_ids[index + 1 : last]))
            is_complete = text_before.endswith(head) and text_after.startswith(tail)
            was_complete = index < last and earlier_text_after.startswith(tail)  # without the last token
            if is_complete and not was_complete:
                return len(self._text_of_first(index)) - len(head)
        return -1

    def _text_of_first(self, count: int) -> str:
        """Return the text of the first tokens of this turn."""
        shorter = dataclasses.replace(self, completion_ids=self.completion_ids[:count])
        return shorter.text

    @functools.cached_property
    def text(self) -> str:
        """Text of `completion` including the stop text.

        Some tokenizers drop a leading space. A message of a chat and an answer of an encoder-decoder model are decoded
        by themselves, as `transformers` does it; what continues the prompt's text is decoded together with it.
        """
        is_message = is_chat(self.prompt) and (self.index > 0 or begins_message(self.prompt))
        if is_message or starts_answers_anew(self.tokenizer):
            return self._decode(self.completion_ids)
        context = self._decode(self.context_ids)
        with_context = self._decode(self.context_ids + self.completion_ids)
        if with_context.startswith(context):
            return with_context[len(context) :]
        return self._decode(self.completion_ids)

    @property
    def conversation(self) -> str:
        """Text after the prompt, this turn included; the same as `completion` in a turn right after the prompt."""
        start = len(self.prompt_ids)
        return self._decode(self.context_ids[start:]) + self.completion

    def _decode(self, ids: list[int]) -> str:
        return plain_text(ids, self.tokenizer)

    def _continues(self, previous: Turn) -> bool:
        """Return True if this turn has seen the previous one of the episode; else the task gave a new context."""
        ids = previous.context_ids + previous.completion_ids
        return self.context_ids[: len(ids)] == ids


def messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Return the messages of a conversation after its prompt; turns are the assistant's, replies the user's.

    A new context counts as a reply.
    """
    conversation = [{"role": "assistant", "content": turns[0].completion}]
    for previous, turn in itertools.pairwise(turns):
        reply_start = 0
        if turn._continues(previous):
            reply_start = len(previous.context_ids) + len(previous.completion_ids)
        reply = turn._decode(turn.context_ids[reply_start:])
        conversation.append({"role": "user", "content": reply})
        conversation.append({"role": "assistant", "content": turn.completion})
    return conversation


def _text_after_prompt(turns: Sequence[Turn]) -> str:
    """Return the text of an episode after its prompt: turns and replies, and new contexts between blank lines."""
    text = ""
    for previous, turn in itertools.pairwise(turns):
        if not turn._continues(previous):
            text += f"{previous.conversation}\n\n{turn.prompt_text}\n\n"
    return text + turns[-1].conversation


def samples(
    episodes: Sequence[int], turns: Sequence[Turn], episode_of_turn: Sequence[int], scores: Scores
) -> list[Sample]:
    """Return the texts of episodes for `EpisodeEnv.samples`, one `Sample` for each of ``episodes``.

    Args:
        episodes: indices of episodes.
        turns: turns of all episodes.
        episode_of_turn: the episode of each turn.
        scores: the score of each turn.
    """
    return [_sample(episode, turns, episode_of_turn, scores) for episode in episodes]


def _sample(episode: int, turns: Sequence[Turn], episode_of_turn: Sequence[int], scores: Scores) -> Sample:
    """Return the texts of one episode, with the sums of its turns' scores."""
    indices = [i for i, turn_episode in enumerate(episode_of_turn) if turn_episode == episode]
    # An agent who was never asked has no turn
    if not indices:
        return {"prompt": "", "completion": "", "score": None, "parts": dict.fromkeys(scores.parts)}

    # Texts, and the sums of the scores
    turns_of_episode = [turns[i] for i in indices]
    first = turns_of_episode[0]
    parts = {}
    for name, column in scores.parts.items():
        parts[name] = _sum(column[i] for i in indices)
    sample: Sample = {
        "prompt": first.prompt_text,
        "completion": _text_after_prompt(turns_of_episode),
        "score": _sum(total(scores.score[i]) for i in indices),
        "parts": parts,
    }
    if is_chat(first.prompt):
        sample["chat"] = [_role_and_text(message) for message in first.prompt.messages]
    if scores.logged:  # numbers of the last turn
        sample["logged"] = {name: column[indices[-1]] for name, column in scores.logged.items()}
    if len(indices) > 1:
        sample["turns"] = messages(turns_of_episode)
    return sample


def _role_and_text(message: Message) -> dict[str, str]:
    """Return a chat message with its content as a text."""
    return {"role": str(message["role"]), "content": str(message.get("content"))}


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the numbers; None if there is none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


@dataclass(frozen=True)
class Continuation:
    """Reply of a task that goes on behind another turn than the one that has just ended."""

    after: Turn
    """Last turn of a row of the same game: of the same agent, or of another one."""
    ids: Sequence[int]
    """Token ids to append to that row, as by `textenv.prompts.tokenize.reply_ids`."""
    limits: TurnLimits = TurnLimits()
    """Limits of the next turn."""


class Cut(enum.Enum):
    """Type of `TRUNCATED`, the reply of a task that ends an episode by its own limit."""

    TRUNCATED = "truncated"


TRUNCATED: Literal[Cut.TRUNCATED] = Cut.TRUNCATED
