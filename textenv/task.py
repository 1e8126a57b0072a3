"""What happens at the end of a turn: the task. It deals prompts and scores what was answered, in batches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RewardFunction = Callable[..., Sequence[float]]
"""``f(prompts, completions, completion_ids=..., **columns) -> list[float]``, as in TRL's GRPO and RLOO trainers."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a policy is asked: text or token ids, the data set's other columns, and the group it was dealt in."""

    content: str | tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    group: int = 0


@dataclass(frozen=True)
class Turn:
    """A prompt and the policy's answer to it; text is decoded from the ids, never the reverse."""

    prompt: Prompt
    prompt_ids: list[int]
    completion_ids: list[int]
    """The tokens that the policy chose, EOS included."""
    terminated: bool
    """True if the policy ended its turn, False if the length limit did."""
    tokenizer: PreTrainedTokenizerBase

    @functools.cached_property
    def prompt_text(self) -> str:
        """The prompt as it was given, or decoded if it was given as ids."""
        content = self.prompt.content
        return content if isinstance(content, str) else self._decode(self.prompt_ids)

    @functools.cached_property
    def completion(self) -> str:
        """The answer without special tokens and without the prompt.

        Decoded together with the prompt, because some tokenizers drop the space that a text begins with.
        """
        prompt, whole = self._decode(self.prompt_ids), self._decode(self.prompt_ids + self.completion_ids)
        return whole[len(prompt) :] if whole.startswith(prompt) else self._decode(self.completion_ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class Task(Protocol):
    """Where prompts come from and what an answer earns."""

    def deal(self, n: int, rng: np.random.Generator, *, group_size: int = 1) -> list[Prompt]:
        """Draw ``n`` prompts; ``group_size`` neighbours share one prompt and its group number."""
        ...

    def score(self, turns: Sequence[Turn]) -> Sequence[float]:
        """One finite number for each turn."""
        ...


class PromptList:
    """Prompts dealt in a shuffled order, each once before any comes again; a new generator starts a new pass.

    Args:
        prompts: texts, token ids, or mappings with a ``"prompt"`` and other columns.

    Raises:
        ValueError: if the list is empty, or a prompt is.
    """

    def __init__(self, prompts: Sequence[str | Sequence[int] | Mapping[str, Any]]) -> None:
        if isinstance(prompts, str) or not len(prompts):
            raise ValueError(f"prompts is {prompts!r}, expected a list of at least one text, id list or mapping")
        self.prompts = [_as_prompt(index, prompt) for index, prompt in enumerate(prompts)]
        self._rng: np.random.Generator | None = None
        self._order: list[int] = []
        self._groups = 0

    def deal(self, n: int, rng: np.random.Generator, *, group_size: int = 1) -> list[Prompt]:
        """See `Task.deal`."""
        if n % group_size:
            raise ValueError(f"{n} episodes do not divide into groups of {group_size}: ask for a multiple of it")
        if rng is not self._rng:
            self._rng, self._order, self._groups = rng, [], 0
        dealt = []
        for _ in range(n // group_size):
            if not self._order:
                self._order = rng.permutation(len(self.prompts)).tolist()
            prompt = self.prompts[self._order.pop()]
            dealt += [Prompt(prompt.content, prompt.columns, self._groups)] * group_size
            self._groups += 1
        return dealt


class FunctionTask(PromptList):
    """One turn: a prompt from a list, an answer, a score by a plain function.

    Args:
        prompts: see `PromptList`.
        reward: see `RewardFunction`; called once for a batch of finished turns.
    """

    def __init__(self, prompts: Sequence[str | Sequence[int] | Mapping[str, Any]], reward: RewardFunction) -> None:
        super().__init__(prompts)
        if not callable(reward):
            raise TypeError(f"reward is {reward!r}, expected a function f(prompts, completions, **columns)")
        self.reward = reward

    def score(self, turns: Sequence[Turn]) -> Sequence[float]:
        """See `Task.score`."""
        names = {name for turn in turns for name in turn.prompt.columns}
        columns = {name: [turn.prompt.columns.get(name) for turn in turns] for name in sorted(names)}
        return self.reward(
            prompts=[turn.prompt_text for turn in turns],
            completions=[turn.completion for turn in turns],
            completion_ids=[turn.completion_ids for turn in turns],
            **columns,
        )


def score_turns(task: Task, turns: Sequence[Turn]) -> list[float]:
    """Score the turns in one call of the task and check what comes back.

    Raises:
        ValueError: if the count is wrong or a score is not a finite number; names the function, row and prompt.
    """
    scores = task.score(turns)
    name = getattr(getattr(task, "reward", None), "__name__", type(task).__name__)
    if not hasattr(scores, "__len__") or len(scores) != len(turns):
        given = f"{len(scores)} values" if hasattr(scores, "__len__") else repr(scores)
        raise ValueError(
            f"reward {name!r} returned {given} for {len(turns)} completions: return a list with one number for each"
        )
    for row, (score, turn) in enumerate(zip(scores, turns, strict=True)):
        if not _is_finite_number(score):
            raise ValueError(
                f"reward {name!r} returned {score!r} in row {row} (prompt {turn.prompt_text!r}, "
                f"completion {turn.completion!r}): expected a finite number"
            )
    return [float(score) for score in scores]


def _is_finite_number(score: Any) -> bool:
    try:
        return not isinstance(score, str) and math.isfinite(score)
    except (TypeError, ValueError, RuntimeError):  # None, a list, a tensor of several numbers
        return False


def _as_prompt(index: int, prompt: str | Sequence[int] | Mapping[str, Any]) -> Prompt:
    columns: Mapping[str, Any] = {}
    if isinstance(prompt, Mapping):
        if "prompt" not in prompt:
            raise ValueError(f"prompt {index} has the columns {sorted(prompt)}, expected one named 'prompt'")
        columns = {name: value for name, value in prompt.items() if name != "prompt"}
        prompt = prompt["prompt"]
    content = prompt if isinstance(prompt, str) else tuple(int(token) for token in prompt)
    if not content:
        raise ValueError(f"prompt {index} is empty: a policy needs at least one token to start from")
    return Prompt(content, columns)
