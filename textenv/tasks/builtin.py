"""Built-in one-turn tasks, each with a definition of prompt, score and best score."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from textenv.embedded.grammar import accepts, openings
from textenv.envs.limits import check_at_least
from textenv.envs.task import Task, rows_of
from textenv.envs.turn import Turn
from textenv.games import Calculator, GuessNumber, TwentyQuestions
from textenv.prompts.prompts import SPLITS, PromptList, split_prompts
from textenv.tasks.own_prompts import Prompts
from textenv.tasks.words import make_words

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from textenv.envs.string_env import StringGames
    from textenv.envs.tool_schemas import ToolSchemas
    from textenv.rewards.reward_model import RewardModel

FEW_NEW_TOKENS = 32
"""Number of tokens below which the room for an answer to the longest of the `Prompts` is warned of."""
_warn_once = functools.cache(logging.getLogger(__name__).warning)
"""Logs a warning once, though training and evaluation both make the task."""


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
        scores = []
        for turn in turns:
            full_stops = turn.completion.count(".")
            scores.append(min(full_stops, self.k) / self.k)
        return scores


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
        self._classifier_name = classifier

    @functools.cached_property
    def classifier(self) -> RewardModel:
        """Sentiment classifier, loaded at first use."""
        from textenv.rewards.reward_model import RewardModel

        return RewardModel.load(self._classifier_name, label="positive")

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
        texts = set()
        for digits in lists.tolist():
            spaced_digits = " ".join(map(str, digits))
            texts.add(f"{self.VERB} {spaced_digits} =")
        super().__init__(split_prompts(sorted(texts), split))

    @staticmethod
    def answer(digits: list[str]) -> list[str]:
        """Return the right answer to a list of digits: the same digits, unless a subclass changes that."""
        return digits

    def score(self, turns: Sequence[Turn]) -> list[float]:
        """See `Task.score`."""
        scores = []
        for turn in turns:
            digits = turn.prompt_text.split()[1:-1]  # between the verb and the equals sign
            expected = self.answer(digits)
            words = turn.completion.split()
            num_correct = sum(a == b for a, b in zip(expected, words, strict=False))
            scores.append(num_correct / max(len(expected), len(words)))
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

    Prompt: ``sort 3 1 2 0 =``. Best score: 1, for ``0 1 2 3``. Scoring and arguments are those of `Copy`.
    """

    VERB = "sort"

    @staticmethod
    def answer(digits: list[str]) -> list[str]:
        """Return the digits in ascending order."""
        return sorted(digits)


TASKS: dict[str, Callable[..., Periods | Reviews | _Digits | Prompts]] = {
    task.__name__: task for task in (Periods, Reviews, Copy, Sort, Prompts)
}
"""Class of each task of one turn."""
GAMES: dict[str, tuple[Callable[..., gymnasium.Env[str, str]], dict[str, int]]] = {
    "GuessNumber": (GuessNumber, {"max_prompt_tokens": 80, "max_new_tokens": 8, "max_turns": 50}),
    "Calculator": (Calculator, {"max_prompt_tokens": 96, "max_new_tokens": 16, "max_turns": 50}),
    "TwentyQuestions": (
        TwentyQuestions,
        {"max_prompt_tokens": 256, "max_new_tokens": 16, "max_turns": 50, "max_length": 1024},
    ),
}
"""Constructor and limits of each game; by default the games end before ``max_turns``."""
MAX_GAME_LENGTH = 1024
"""Maximum length of a game's text if the model may read so much: chat templates make the turns longer."""
WORLDS = {"TextWorld": "textenv.extras.textworld:TextWorld", "OpenEnv": "textenv.extras.openenv.games:OpenEnv"}
"""Class of each task that plays an environment of another package; imported at first use."""
REASONING_GYM = {"max_prompt_tokens": 512, "max_new_tokens": 256}
"""Limits of ``"ReasoningGym"``."""


def make_task(
    name: str, *, tokenizer: PreTrainedTokenizerBase, split: str = "train", **arguments: Any
) -> tuple[Task, dict[str, Any], dict[str, Any]]:
    """Make a built-in task from its name.

    Args:
        name: a name in `TASKS`, `GAMES` or `WORLDS`, ``"ReasoningGym"`` or ``"Words"``.
        tokenizer: the policy's tokenizer.
        split: ``"train"`` or ``"test"``; games have no splits, as each episode is drawn at random.
        arguments: arguments of the task and of the environment.

    Returns:
        The task, its default limits (for ``"Words"`` also the rule ``allowed``), and those of the arguments that are
        the environment's.

    Raises:
        ValueError: if there is no such task or split.
        TypeError: if neither task nor environment accepts an argument.
    """
    from textenv.envs.vector_env import TextVectorEnv

    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {sorted(SPLITS)}")

    # Divide the arguments; a name that both have is the task's
    env_parameters = set(inspect.signature(TextVectorEnv).parameters)
    if name in TASKS:
        env_parameters -= inspect.signature(TASKS[name]).parameters.keys()
    env_arguments = {}
    task_arguments = {}
    for argument, value in arguments.items():
        if argument in env_parameters:
            env_arguments[argument] = value
        else:
            task_arguments[argument] = value

    if name in TASKS:
        task = TASKS[name](split, **task_arguments)
        limits = dict(task.LIMITS)
        if isinstance(task, Prompts):
            limits |= _limits_of_prompts(task, tokenizer, env_arguments)
        return task, limits, env_arguments
    if name in GAMES:
        games, limits = _make_games(name, tokenizer, task_arguments)
        return games, limits, env_arguments
    if name == "ReasoningGym":
        from textenv.extras.reasoning_gym import ReasoningGym

        return ReasoningGym(split=split, **task_arguments), dict(REASONING_GYM), env_arguments
    if name == "Words":
        games, words_arguments = make_words(tokenizer, env_arguments, **task_arguments)
        return games, words_arguments, env_arguments
    if name in WORLDS:
        make_world = resolve_name(WORLDS[name])
        world = make_world(split, tokenizer=tokenizer, **task_arguments)
        return world, world.limits, env_arguments
    names = ", ".join([*TASKS, *GAMES, *WORLDS, "ReasoningGym", "Words"])
    raise ValueError(f"unknown task {name!r}, expected one of {names}")


def _limits_of_prompts(
    task: Prompts, tokenizer: PreTrainedTokenizerBase, env_arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Return limits that fit the prompts and the model, for those that are not among the environment's arguments.

    An answer's length depends on its own prompt alone, because training and evaluation have other prompts.
    """
    # Prompts: the user's limit, or the longest prompt as it will be written, with the schemas of the tools
    prompt_tokens = env_arguments.get("max_prompt_tokens")
    reason = f"max_prompt_tokens is {prompt_tokens}"
    if prompt_tokens is None:
        prompt_tokens = task.longest_prompt(tokenizer, _schemas_of(env_arguments.get("tools"), tokenizer))
        reason = f"the longest prompt has {prompt_tokens} tokens"
    limits = {"max_prompt_tokens": prompt_tokens} | task.LIMITS
    if env_arguments.get("max_new_tokens") is not None:
        return limits

    # Answers: behind a long prompt, a small model's context may leave room for few tokens. How long an episode with
    # tools may be is the user's choice
    context = tokenizer.model_max_length
    room = context - prompt_tokens
    if room < limits["max_new_tokens"] and not env_arguments.get("tools"):
        limits["max_length"] = max(context, prompt_tokens + 1)
    if room < FEW_NEW_TOKENS:
        _warn_once(
            "%s, which leaves %d of the %d tokens that the model reads, so the answer to such a prompt is cut there: "
            "leave long prompts out by a lower max_prompt_tokens (--max-prompt-tokens) and overlong='skip' (--overlong "
            "skip), or take a model that reads more",
            reason,
            max(0, room),
            context,
        )
    return limits


def _schemas_of(
    tools: Sequence[Callable[..., object]] | None, tokenizer: PreTrainedTokenizerBase
) -> ToolSchemas | None:
    """Return the schemas of an environment's tools; None without tools."""
    from textenv.envs.tools import Tools

    if not tools:
        return None
    return Tools(tools, tokenizer, timeout=None).schemas


def _make_games(
    name: str, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> tuple[StringGames, dict[str, int]]:
    """Make the task that plays a game; return it and its limits."""
    from textenv.envs.string_env import StringGames

    options = {}
    game_arguments = dict(arguments)
    for option in ("pay_at", "history"):
        if option in arguments:
            options[option] = game_arguments.pop(option)
    make, limits = GAMES[name]
    make_game = functools.partial(make, **game_arguments)
    make_game()  # raises now on a wrong argument
    max_length = min(MAX_GAME_LENGTH, tokenizer.model_max_length)
    return StringGames(make_game, tokenizer=tokenizer, **options), {"max_length": max_length} | limits
