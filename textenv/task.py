"""What happens at the end of a turn: the task. It deals prompts, answers and scores, in batches."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from textenv.chat import is_chat
from textenv.prompts import Prompt, PromptList

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RewardFunction = Callable[..., Sequence[float]]
"""``f(prompts, completions, completion_ids=..., **columns) -> list[float]``, as in TRL's GRPO and RLOO trainers."""


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
        if not self.stop:
            return self.said
        # Only what the last token completed: an earlier one was passed over, because the turn was too short.
        earlier = len(dataclasses.replace(self, completion_ids=self.completion_ids[:-1]).said)
        found = [self.said.find(text, max(0, earlier + 1 - len(text))) for text in self.stop]
        ends = [at for at in found if at >= 0]
        return self.said[: min(ends)] if ends else self.said

    @functools.cached_property
    def said(self) -> str:
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


class Task(Protocol):
    """Where prompts come from and what an answer earns."""

    def deal(self, numbers: Sequence[int], *, seed: int) -> list[Prompt]:
        """The prompts that stand at these places of the endless order that the seed means.

        A function of seed and number and nothing else: so an order is resumed by two integers, two environments can
        share a task, and a group is one number several times.
        """
        ...

    def score(self, turns: Sequence[Turn]) -> Sequence[float]:
        """One finite number for each turn."""
        ...


class Conversation(Task, Protocol):
    """A task that answers."""

    def reply(self, turns: Sequence[Turn]) -> Sequence[str | Literal[Cut.TRUNCATED] | None]:
        """What the environment says after each turn; None ends the episode, `TRUNCATED` does by a limit.

        Called once for each turn, in order, before the turn is scored.
        """
        ...


class FunctionTask(PromptList):
    """One turn: a prompt from a sequence, an answer, a score by a plain function.

    For a chat prompt the function is given the messages, and the answer as ``[{"role": "assistant", "content": ...}]``
    (TRL's convention).

    Args:
        prompts: see `PromptList`.
        reward: see `RewardFunction`; called once for a batch of finished turns.
    """

    def __init__(self, prompts: Sequence[Any], reward: RewardFunction) -> None:
        super().__init__(prompts)
        if not callable(reward):
            raise TypeError(f"reward is {reward!r}, expected a function f(prompts, completions, **columns)")
        self.reward = reward

    def score(self, turns: Sequence[Turn]) -> Sequence[float]:
        """See `Task.score`."""
        names = {name for turn in turns for name in turn.prompt.columns}
        columns = {name: [turn.prompt.columns.get(name) for turn in turns] for name in sorted(names)}
        asked = [list(turn.prompt.content) if is_chat(turn.prompt) else turn.prompt_text for turn in turns]
        return self.reward(
            prompts=asked,
            completions=[_answer(turn) for turn in turns],
            completion_ids=[turn.completion_ids for turn in turns],
            **columns,
        )


def _answer(turn: Turn) -> Any:
    return [{"role": "assistant", "content": turn.completion}] if is_chat(turn.prompt) else turn.completion


def score_turns(task: Task, turns: Sequence[Turn]) -> list[float]:
    """Score the turns in one call of the task and check what comes back.

    Raises:
        ValueError: if the count is wrong or a score is not a finite number; names the function, row and prompt.
    """
    scores = task.score(turns)
    name = getattr(getattr(task, "reward", None), "__name__", type(task).__name__)
    check_count(scores, len(turns), name=f"reward {name!r}", item="number")
    for row, (score, turn) in enumerate(zip(scores, turns, strict=True)):
        if not _is_finite_number(score):
            raise ValueError(
                f"reward {name!r} returned {score!r} in row {row} (prompt {turn.prompt_text!r}, "
                f"completion {turn.completion!r}): expected a finite number"
            )
    return [float(score) for score in scores]


def check_count(returned: Any, expected: int, *, name: str, item: str) -> None:
    """Raise a ValueError unless there is one item for each turn."""
    if not hasattr(returned, "__len__") or len(returned) != expected:
        given = f"{len(returned)} values" if hasattr(returned, "__len__") else repr(returned)
        raise ValueError(f"{name} returned {given} for {expected} completions: return a list with one {item} for each")


def _is_finite_number(score: Any) -> bool:
    try:
        return not isinstance(score, str) and math.isfinite(score)
    except (TypeError, ValueError, RuntimeError):  # None, a list, a tensor of several numbers
        return False
