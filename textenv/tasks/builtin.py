"""Built-in one-turn tasks, each with a definition of prompt, score and best score."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from textenv.embedded.grammar import accepts, openings
from textenv.envs.limits import check_at_least
from textenv.envs.task import rows_of
from textenv.envs.turn import Turn
from textenv.games import Calculator, GuessNumber, TwentyQuestions
from textenv.games.dialogue import Game
from textenv.prompts.prompts import SPLITS, PromptList, split_prompts
from textenv.tasks.own_prompts import Prompts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from textenv.rewards.reward_model import RewardModel


class Periods(PromptList):
    """Write full stops.

    Prompt: the opening of a review. Score: ``min(full stops in the completion, k) / k``. Best score: 1.

    Args:
        split: ``"train"`` or ``"test"``.
        k: number of full stops for the best score.
    """

    LIMITS = {"max_prompt_tokens": 24, "max_new_tokens": 16}

    def __init__(self, split: str = "train", *, k: int = 8) -> None:
        super().__init__(split_prompts(openings(), split))
        check_at_least("k", k, 1)
        self.k = k

    def score(self, turns: Sequence[Turn]) -> list[float]:
        """See `Task.score`."""
        return [min(turn.completion.count("."), self.k) / self.k for turn in turns]


class Reviews(PromptList):
    """Write positive movie reviews.

    Prompt: the neutral opening of a review. Score: the probability, by a classifier, that opening and completion
    together have positive sentiment. Best score: approaches 1.

    Args:
        split: ``"train"`` or ``"test"``.
        classifier: sentiment classifier: ``"embedded"``, a folder, or a hub name.
    """

    LIMITS = {"max_prompt_tokens": 24, "max_new_tokens": 48}

    def __init__(self, split: str = "train", *, classifier: str | Path = "embedded") -> None:
        super().__init__(split_prompts(openings(), split))
        self._name = classifier

    @functools.cached_property
    def classifier(self) -> RewardModel:
        """Sentiment classifier, loaded at first use."""
        from textenv.rewards.reward_model import RewardModel

        return RewardModel.load(self._name, label="positive")

    def score(self, turns: Sequence[Turn]) -> list[float]:
        """See `Task.score`."""
        rows = rows_of(turns)
        return self.classifier(tokenizer=rows.tokenizer, **rows.columns)

    def to(self, device: torch.device) -> None:
        """Move the classifier to a device."""
        self.classifier.to(device)

    @staticmethod
    def accepts(turn: Turn) -> bool:
        """Return True if the grammar of reviews accepts opening and completion together."""
        return turn.terminated and accepts(turn.prompt_text + turn.completion)


class _Digits(PromptList):
    """Answer a list of digits with another list; scored by position."""

    LIMITS = {"max_prompt_tokens": 24, "max_new_tokens": 12}
    VERB = ""

    def __init__(self, split: str = "train", *, length: int = 4) -> None:
        if not 1 <= length <= 8:
            raise ValueError(f"length is {length}, expected 1 to 8 digits")
        lists = np.random.default_rng(0).integers(0, 10, size=(4000, length))
        texts = sorted({f"{self.VERB} " + " ".join(map(str, digits)) + " =" for digits in lists.tolist()})
        super().__init__(split_prompts(texts, split))

    @staticmethod
    def answer(digits: list[str]) -> list[str]:
        """Return the right answer to a list of digits: the same digits, unless a subclass changes that."""
        return digits

    def score(self, turns: Sequence[Turn]) -> list[float]:
        """See `Task.score`."""
        scores = []
        for turn in turns:
            right, given = self.answer(turn.prompt_text.split()[1:-1]), turn.completion.split()
            hits = sum(a == b for a, b in zip(right, given, strict=False))
            scores.append(hits / max(len(right), len(given)))
        return scores


class Copy(_Digits):
    """Copy digits.

    Prompt: ``copy 3 1 2 0 =``. Score: number of correct positions, divided by the number of words in the correct
    answer or in the completion, whichever is larger. Best score: 1, for ``3 1 2 0``.

    Args:
        split: ``"train"`` or ``"test"``.
        length: number of digits in a prompt, 1 to 8.
    """

    VERB = "copy"


class Sort(_Digits):
    """Sort digits.

    Prompt: ``sort 3 1 2 0 =``. Best score: 1, for ``0 1 2 3``. Scoring and arguments as in `Copy`.
    """

    VERB = "sort"

    @staticmethod
    def answer(digits: list[str]) -> list[str]:
        """Return the digits in ascending order."""
        return sorted(digits)


TASKS: dict[str, Any] = {task.__name__: task for task in (Periods, Reviews, Copy, Sort, Prompts)}
GAMES: dict[str, tuple[Callable[..., Game], dict[str, int]]] = {
    "GuessNumber": (GuessNumber, {"max_prompt_tokens": 80, "max_new_tokens": 8, "max_turns": 50, "max_length": 128}),
    "Calculator": (Calculator, {"max_prompt_tokens": 96, "max_new_tokens": 16, "max_turns": 50, "max_length": 128}),
    "TwentyQuestions": (
        TwentyQuestions,
        {"max_prompt_tokens": 256, "max_new_tokens": 16, "max_turns": 50, "max_length": 1024},
    ),
}
"""Constructor and limits of each game; by default, the games end after fewer turns."""
WORLDS = {"TextWorld": "textenv.extras.textworld:TextWorld", "OpenEnv": "textenv.extras.openenv:OpenEnv"}
"""Class of each task that plays an environment of another package; imported at first use."""
REASONING_GYM = {"max_prompt_tokens": 512, "max_new_tokens": 256}


def make_task(
    name: str, *, tokenizer: PreTrainedTokenizerBase, split: str = "train", **arguments: Any
) -> tuple[Any, dict[str, int], dict[str, Any]]:
    """Make a built-in task from its name.

    Args:
        name: a name in `TASKS`, `GAMES` or `WORLDS`, or ``"ReasoningGym"``.
        tokenizer: the policy's tokenizer.
        split: ``"train"`` or ``"test"``; games have no splits, as each episode is drawn at random.
        arguments: of the task and of the environment.

    Returns:
        The task, its default limits, and the environment's arguments.

    Raises:
        ValueError: if there is no such task or split.
        TypeError: if neither task nor environment accepts an argument.
    """
    from textenv.envs.vector_env import TextVectorEnv

    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {sorted(SPLITS)}")
    of_task = inspect.signature(TASKS[name]).parameters.keys() if name in TASKS else set()
    ours = inspect.signature(TextVectorEnv).parameters.keys() - of_task
    rest = {key: x for key, x in arguments.items() if key in ours}
    own = {key: x for key, x in arguments.items() if key not in ours}
    if name in TASKS:
        task, limits = TASKS[name](split, **own), dict(TASKS[name].LIMITS)
        if isinstance(task, Prompts):
            longest = rest.get("max_prompt_tokens") or task.longest_prompt(tokenizer)
            room = max(1, tokenizer.model_max_length - longest)  # of a small model; its documents say so
            limits |= {"max_prompt_tokens": longest, "max_new_tokens": min(limits["max_new_tokens"], room)}
        return task, limits, rest
    if name in GAMES:
        from textenv.envs.string_env import StringGames

        pay = {"pay_at": own.pop("pay_at")} if "pay_at" in own else {}
        make, of_game = GAMES[name]
        game = functools.partial(make, **own)
        game()  # raises now on a wrong argument
        return StringGames(game, tokenizer=tokenizer, **pay), dict(of_game), rest
    if name == "ReasoningGym":
        from textenv.extras.reasoning_gym import ReasoningGym

        return ReasoningGym(split=split, **own), dict(REASONING_GYM), rest
    if name in WORLDS:
        world = resolve_name(WORLDS[name])(split, tokenizer=tokenizer, **own)
        return world, world.limits, rest
    known = ", ".join([*TASKS, *GAMES, *WORLDS, "ReasoningGym"])
    raise ValueError(f"unknown task {name!r}, expected one of {known}")
