"""Branches: further completions of turns that are already there, from some of their tokens on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from textenv.envs.task import Conversation, Task, score_turns
from textenv.envs.turn import Turn
from textenv.envs.vector_env import TextVectorEnv
from textenv.prompts.prompts import Prompt, TurnLimits
from textenv.rewards.scores import Score, Scores


class Beginning(NamedTuple):
    """The beginning of a turn."""

    turn: Turn
    """A finished turn that follows its prompt."""
    length: int
    """Number of its tokens, from 0 and less than it has."""


class Branches(Task):
    """Task whose prompts are beginnings of turns; it scores whole turns, with their beginning.

    Args:
        task: scores the turns.
        beginnings: what is completed.
        max_new_tokens: maximum length of a whole turn, in tokens.
        max_length: maximum length of prompt and turn, in tokens.
    """

    def __init__(self, task: Task, beginnings: Sequence[Beginning], *, max_new_tokens: int, max_length: int) -> None:
        self.task = task
        self.beginnings = beginnings
        self.max_new_tokens = max_new_tokens
        self.max_length = max_length

    def sample_prompts(self, numbers: Sequence[int], *, seed: int) -> list[Prompt]:
        """Return the beginnings in their order, whatever the seed; see `Task.sample_prompts`."""
        prompts = []
        for number in numbers:
            turn, length = self.beginnings[number]
            tokens = tuple(turn.prompt_ids + turn.completion_ids[:length])
            most = turn.prompt.limits.max_new_tokens or self.max_new_tokens
            room = self.max_length - len(turn.prompt_ids)
            limits = TurnLimits(max_new_tokens=min(most, self.max_new_tokens, room) - length)
            prompts.append(Prompt(tokens, row=number, limits=limits))
        return prompts

    def score(self, turns: Sequence[Turn]) -> Scores:
        """Score the whole turns; of a score for each token, those of the beginning are left out. See `Task.score`."""
        # Whole turns
        whole_turns = []
        lengths = []
        for turn in turns:
            assert turn.prompt.row is not None, "`sample_prompts` says which beginning it is"
            begun, length = self.beginnings[turn.prompt.row]
            whole_turns.append(
                dataclasses.replace(
                    turn,
                    prompt=begun.prompt,
                    prompt_ids=begun.prompt_ids,
                    context_ids=begun.context_ids,
                    completion_ids=begun.completion_ids[:length] + turn.completion_ids,
                )
            )
            lengths.append(length)
        scores = score_turns(self.task, whole_turns)

        # Scores of what was completed
        completed: list[Score] = []
        for score, length in zip(scores.score, lengths, strict=True):
            if isinstance(score, np.ndarray):
                score = score[length:]
            completed.append(score)
        return Scores(score=completed)


def check_branches(env: object) -> TextVectorEnv:
    """Return the environment if its turns can be branched.

    Raises:
        ValueError: unless it is a `TextVectorEnv` of single turns without tools, ``allowed`` and ``min_new_tokens``.
    """
    if not isinstance(env, TextVectorEnv):
        raise ValueError(f"only turns of a TextVectorEnv can be completed again, not those of a {type(env).__name__}")
    if isinstance(env.task, Conversation) or env.tools is not None:
        raise ValueError(
            "the episodes may have several turns, but only a turn right after its prompt can be completed again"
        )
    if any(isinstance(stop, str) for stop in env.limits.stop):
        raise ValueError(
            f"stop is {env.limits.stop}, but a text that begins before and ends after a token from which a turn is "
            "completed again would be missed: give token ids"
        )
    if env.has_rule or env.limits.min_new_tokens:
        raise ValueError(
            "the environment has allowed or min_new_tokens, which count a turn from its first token: turns cannot be "
            "completed again from a later one"
        )
    return env


def branch_env(env: TextVectorEnv, beginnings: Sequence[Beginning], *, num_envs: int) -> TextVectorEnv:
    """Return an environment whose episodes complete beginnings of another one's turns, in their order.

    Args:
        env: an environment that `check_branches` has returned.
        beginnings: of turns of this environment.
        num_envs: slots.
    """
    limits = env.limits
    longest = max(len(turn.prompt_ids) + length for turn, length in beginnings)
    longest_prompt = max(len(turn.prompt_ids) for turn, _ in beginnings)
    return TextVectorEnv(
        Branches(env.task, beginnings, max_new_tokens=limits.max_new_tokens, max_length=limits.width),
        tokenizer=env.tokenizer,
        num_envs=num_envs,
        max_prompt_tokens=longest,
        max_new_tokens=limits.max_new_tokens,
        max_length=min(longest_prompt + limits.max_new_tokens, limits.width),
        stop=limits.stop,
        forbidden=env.forbidden,
    )
