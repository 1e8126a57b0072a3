"""`Prompts`: one's own prompts and rewards as a task, from files or from Python."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from textenv.envs.task import FunctionTask
from textenv.importing import load_function, name_of
from textenv.names import check_names
from textenv.prompts.files import load_prompts, with_prompt
from textenv.prompts.lengths import longest_prompt
from textenv.prompts.prompts import Prompt, PromptList, check_no_overlap, split_prompts
from textenv.prompts.tokenize import prompt_ids
from textenv.rewards.calling import distinct_names, reward_name
from textenv.rewards.composite import RewardFunction, Rewards, WeightedFunction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from textenv.envs.tool_schemas import ToolSchemas

PromptSource = str | Path | Sequence[object]
"""A file or a data set as in `textenv.load_prompts`, or a sequence as in `PromptList`."""
RewardSource = str | RewardFunction | Rewards | Mapping[str, WeightedFunction] | Sequence[str | WeightedFunction]
"""A function, or ``"rewards.py:function"``; or several, as in `Prompts`."""
FEW_HELD_OUT = 10
"""Number of held-out prompts below which an evaluation says little."""
logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)
"""Logs a warning once, though training and evaluation both make the task."""


class Prompts(FunctionTask):
    """Answer one's own prompts, scored by one's own reward functions.

    About a quarter of the prompts, chosen by their content, is held out as the test split. If this would leave a split
    empty, both splits have all prompts, and the log says so.

    Args:
        split: ``"train"`` or ``"test"``.
        prompts: a file or a data set (``hf:owner/name``) as in `textenv.load_prompts`; or a sequence as in
            `PromptList`.
        reward: a function, or ``"rewards.py:function"``; or several: a mapping as in `Rewards`, or a list such as
            ``["rewards.py:f", "other.py:g=0.5"]``, where the number is the weight.
        eval_prompts: prompts of the test split; ``prompts`` is then not split.
        prompt_column: name of the prompt's column.
        system_prompt: system message of every chat that has none; text prompts become chats.
        chat: make each text prompt the user's message of a chat, for the model's chat template.

    Raises:
        ValueError: if prompts or reward are missing or cannot be read, or a function needs a column that the prompts
            lack.

    Example:
        >>> task = Prompts(prompts=["Say hello."], reward=lambda completions: [1.0] * len(completions), chat=True)
        >>> task.prompt(0).content
        ({'role': 'user', 'content': 'Say hello.'},)
    """

    LIMITS = {"max_new_tokens": 128}

    @check_names
    def __init__(
        self,
        split: str = "train",
        *,
        prompts: PromptSource | None = None,
        reward: RewardSource | None = None,
        eval_prompts: PromptSource | None = None,
        prompt_column: str = "prompt",
        system_prompt: str | None = None,
        chat: bool = False,
    ) -> None:
        if prompts is None or reward in (None, (), []):
            missing = "prompts" if prompts is None else "reward"
            raise ValueError(
                f"textenv/Prompts-v0 has no {missing}: give prompts='prompts.jsonl' and reward='rewards.py:function', "
                "on the command line --prompts prompts.jsonl --reward rewards.py:function"
            )
        self._system = system_prompt
        self._chat = chat or system_prompt is not None
        super().__init__(_prompts_of_split(split, prompts, eval_prompts, prompt_column), read_rewards(reward))
        self.check_columns()

    def prompt(self, index: int) -> Prompt:
        """See `PromptList.prompt`; a text becomes a chat if ``chat`` or ``system_prompt`` was set."""
        prompt = super().prompt(index)
        if not self._chat:
            return prompt
        if isinstance(prompt.content[0], int):
            raise ValueError(f"prompt {prompt.row} is a list of token ids, but a chat (system_prompt, chat) needs text")
        chat = prompt.messages
        if isinstance(prompt.content, str):
            chat = ({"role": "user", "content": prompt.content},)
        if self._system is not None and chat[0]["role"] != "system":
            chat = ({"role": "system", "content": self._system}, *chat)
        return dataclasses.replace(prompt, content=chat)

    def longest_prompt(self, tokenizer: PreTrainedTokenizerBase, schemas: ToolSchemas | None = None) -> int:
        """Return the length of the longest prompt in tokens, which is the default limit.

        Args:
            tokenizer: the policy's tokenizer.
            schemas: schemas of tools that are written into each prompt; None without tools.
        """

        def count_tokens(prompt: Prompt) -> int:
            if schemas is not None:
                return len(schemas.prompt_ids(prompt))
            return len(prompt_ids(prompt, tokenizer))

        return longest_prompt(self, count_tokens)


def read_rewards(reward: RewardSource) -> Rewards:
    """Make `Rewards` from a function, names of functions with weights, or what `Rewards` takes.

    Raises:
        ValueError: if a function cannot be loaded, a weight is not a number, or a function is given twice.
        TypeError: if something else than a function is among them.
    """
    if isinstance(reward, Rewards):
        return reward
    if not isinstance(reward, Sequence):
        return Rewards(reward)

    # Functions and their weights
    entries = [reward] if isinstance(reward, str) else reward
    functions: list[RewardFunction] = []
    weights: list[float] = []
    for entry in entries:
        if isinstance(entry, str):
            function, weight = _load_reward(entry)
        elif isinstance(entry, tuple) and len(entry) == 2:
            function, weight = entry
        else:
            function = entry
            weight = 1.0
        if not callable(function):
            raise TypeError(
                f"reward is {reward!r:.200}, in which {function!r:.100} is no function: give functions, names of "
                "functions, or (function, weight)"
            )
        functions.append(function)
        weights.append(weight)
    if not any(weights):
        raise ValueError(f"reward is {reward!r:.200}, whose weights are all 0, so nothing would be learnt: raise one")
    if weights == [1.0]:
        return Rewards(functions[0])

    # Give each function a different name
    names = distinct_names(functions)
    for name, function in zip(names, functions, strict=True):
        if name != reward_name(function):
            _warn_once("several rewards have the name %s: %s is %s", reward_name(function), name, name_of(function))
    weighted_functions = zip(functions, weights, strict=True)
    return Rewards(dict(zip(names, weighted_functions, strict=True)))


def _load_reward(text: str) -> tuple[RewardFunction, float]:
    """Load the function and the weight of ``"rewards.py:function"`` or ``"rewards.py:function=WEIGHT"``."""
    name, equals_sign, weight = text.rpartition("=")
    if not equals_sign or ":" in weight:  # the sign is part of a path
        return load_function(text), 1.0
    try:
        factor = float(weight)
    except ValueError as error:
        raise ValueError(f"reward is {text!r}, whose weight is no number: give rewards.py:function=0.5") from error
    return load_function(name), factor


def _prompts_of_split(
    split: str, prompts: PromptSource, eval_prompts: PromptSource | None, column: str
) -> Sequence[object]:
    """Return the prompts of a split; raise a ValueError if either source cannot be read."""
    if eval_prompts is not None and split == "test":
        return _open_prompts(eval_prompts, column)
    all_prompts = _open_prompts(prompts, column)

    # Hold some out
    if eval_prompts is None:
        part = split_prompts(all_prompts, split, all_if_few=True)
        if split == "test" and len(part) < min(FEW_HELD_OUT, len(all_prompts)):
            logger.warning(
                "only %d of %d prompts are held out for evaluation, which says little: give more, or others with "
                "--eval-prompts (eval_prompts=)",
                len(part),
                len(all_prompts),
            )
        return part

    # The user has held some out
    try:
        check_no_overlap(all_prompts, _open_prompts(eval_prompts, column))
    except ValueError as error:
        logger.warning("%s", error)
    return all_prompts


def _open_prompts(prompts: PromptSource, column: str) -> Sequence[object]:
    """Open a file or a data set of prompts, or check a sequence."""
    if isinstance(prompts, (str, Path)):
        return PromptList(load_prompts(prompts, prompt_column=column)).prompts
    rows = PromptList(prompts).prompts
    if column == "prompt":
        return rows
    first_row = rows[0]
    if isinstance(first_row, Mapping) and "prompt" in first_row and column not in first_row:
        logger.warning("prompt_column is %r, which prompt 0 lacks: its column 'prompt' is read", column)
    return _RowsWithPrompt(rows, column)


class _RowsWithPrompt(Sequence[object]):
    """Rows in memory, read on demand; the prompt's column, where there is one, gets the name ``"prompt"``."""

    def __init__(self, rows: Sequence[object], column: str) -> None:
        self._rows = rows
        self._column = column

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> object: ...
    @overload
    def __getitem__(self, index: slice) -> list[object]: ...
    def __getitem__(self, index: int | slice) -> object:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = self._rows[index]
        if not isinstance(row, Mapping) or ("prompt" in row and self._column not in row):
            return row  # it has no such column, which another source has, such as the evaluation's
        try:
            return with_prompt(dict(row), self._column)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
