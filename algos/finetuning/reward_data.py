"""Training data of reward models: answers with scores, or pairs of a chosen and a rejected answer."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any, Literal

import numpy as np

from textenv.prompts.messages import Message, is_messages, read_messages, without_prompt
from textenv.prompts.prompts import Prompt, by_position, content_hash
from textenv.prompts.tokenize import warn_of_spelling
from textenv.rewards.reward_model import RewardModel

Content = str | list[Message]
Kind = Literal["scores", "pairs"]
ANSWERS: dict[Kind, tuple[str, ...]] = {"scores": ("completion",), "pairs": ("chosen", "rejected")}
"""Columns of the answers."""
JUDGEMENTS: dict[Kind, tuple[str, ...]] = {"scores": ("score",), "pairs": ("chosen", "rejected")}
"""Columns that are None in a row without a judgement."""
_warn_once = cache(logging.getLogger(__name__).warning)


@dataclass(frozen=True, kw_only=True)
class RewardRow:
    """Scored answer, or preference pair."""

    ids: tuple[list[int], ...]
    """Token ids of prompt and answer: one sequence, or two for the chosen and the rejected answer."""
    target: float
    """Score, or margin by which the chosen answer's reward should exceed the rejected one's."""
    key: int
    """Hash of the prompt, with runs of whitespace as one space; without a prompt, of the (chosen) answer."""


@dataclass(frozen=True, kw_only=True)
class RewardRows:
    """Rows of one kind."""

    kind: Kind
    rows: list[RewardRow]
    skipped: int
    """Number of rows without a judgement: questions that a person skipped, and ties."""


def read_reward_rows(data: Sequence[Mapping[str, object]], model: RewardModel) -> RewardRows:
    """Read rows and encode their texts with the model's own tokenization (`RewardModel.encode`).

    Args:
        data: ``{"prompt", "completion", "score"}``, or ``{"prompt", "chosen", "rejected"}`` with optional ``"margin"``.
            Other columns are ignored, so lines of a `FeedbackFile` are valid. Texts and chats may be whole,
            without a prompt or with the prompt repeated; then the prompt is read once. Texts repeat it if most of them
            begin with it, up to white space at its ends. Also a data frame.
        model: reward model that encodes the texts.

    Raises:
        ValueError: if a row has neither form, both kinds are mixed, a number is not finite, or there are no rows.
    """
    is_frame = hasattr(data, "columns")
    data = by_position(data)
    if is_frame:
        data = [_with_none(row) for row in data]
    kinds = [_kind(index, row) for index, row in enumerate(data)]
    if len(set(kinds)) != 1:
        raise ValueError(
            f"data has {kinds.count('scores')} scored answers and {kinds.count('pairs')} pairs, expected one kind and "
            "at least one row: keep one of the two"
        )
    names = ANSWERS[kinds[0]]
    judged = [(index, row) for index, row in enumerate(data) if _is_judged(row, kinds[0])]
    repeated = _most_repeat_texts(judged, names)
    rows = []
    for index, row in judged:
        prompt, answers = _prompt_and_answers(index, row, names, repeated=repeated)
        rows.append(_reward_row(index, row, kinds[0], prompt, answers, model))
    return RewardRows(kind=kinds[0], rows=rows, skipped=len(data) - len(rows))


def _with_none(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row of a data frame with None in its empty cells, into which pandas writes NaN, NA or NaT."""
    filled: dict[str, object] = dict(row)
    for name, value in row.items():
        is_nan = isinstance(value, float) and math.isnan(value)
        if is_nan or type(value).__name__ in ("NAType", "NaTType"):
            filled[name] = None
    return filled


def _kind(index: int, row: object) -> Kind:
    columns = set(row) if isinstance(row, Mapping) else set()
    if {"completion", "score"} <= columns:
        return "scores"
    if {"chosen", "rejected"} <= columns:
        return "pairs"
    raise ValueError(
        f"row {index} is {row!r:.200}, expected {{'prompt', 'completion', 'score'}} or {{'prompt', 'chosen', "
        "'rejected'}, of which the prompt may be left out"
    )


def _is_judged(row: Mapping[str, object], kind: Kind) -> bool:
    """Return False for a question that a person skipped, and for a tie."""
    return all(row[name] is not None for name in JUDGEMENTS[kind])


def _most_repeat_texts(judged: Sequence[tuple[int, Mapping[str, Any]]], names: Sequence[str]) -> bool:
    """Return True if more than half of the rows with a prompt repeat it, as texts, in their answers.

    A single answer may begin with its question by itself, so the data decide together. A warning says what was found,
    also if a few rows differ from the others.

    Args:
        judged: rows with their indices.
        names: columns of the answers.
    """
    # Rows that repeat their prompts, and those that do not
    repeating = []
    others = []
    for index, row in judged:
        prompt: Any = row.get("prompt")
        answers = [row[name] for name in names]
        are_texts = isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers)
        if not are_texts or not prompt.strip():
            continue
        if _repeated_spelling(prompt, answers) is None:
            others.append(index)
        else:
            repeating.append(index)

    # What is read
    num_rows = len(repeating) + len(others)
    if not repeating:
        return False
    if not others:
        _warn_once("the answers repeat the text of their prompts: it is read once")
        return True
    if len(repeating) > len(others):
        _warn_once(
            "the answers of %d of %d rows repeat the text of their prompts, which is read once there. Check the other "
            "rows (the first is row %d): their answers are read as they are, after the prompt",
            len(repeating), num_rows, others[0],
        )  # fmt: skip
        return True
    _warn_once(
        "the answers of %d of %d rows (the first is row %d) begin with the text of their prompts, which is read twice "
        "there, as no more than half of the rows repeat it: if it is no part of these answers, remove it",
        len(repeating), num_rows, repeating[0],
    )  # fmt: skip
    return False


def _repeated_spelling(prompt: str, answers: Sequence[str]) -> str | None:
    """Return the prompt as all answers begin with it, perhaps without white space at its ends; None if they do not."""
    for spelling in (prompt, prompt.rstrip(), prompt.strip()):
        if spelling and all(answer.startswith(spelling) for answer in answers):
            return spelling
    return None


def _prompt_and_answers(
    index: int, row: Mapping[str, Any], names: Sequence[str], *, repeated: bool
) -> tuple[Content, Sequence[Content]]:
    """Return a row's prompt and its answers without it: texts, or lists of messages.

    Args:
        index: index of the row, for errors.
        row: the row.
        names: columns of the answers.
        repeated: True if texts of answers that begin with the prompt's text repeat it.

    Raises:
        ValueError: if prompt and answers are of different kinds.
    """
    prompt = row.get("prompt")
    answers = [row[name] for name in names]
    where = f"row {index}"
    if prompt is not None and is_messages(prompt):
        messages = read_messages(prompt, where=where, from_data=True)
        bare_answers = []
        for answer in answers:
            if isinstance(answer, str):
                answer_messages = [_assistant(answer)]
            else:
                answer_messages = read_messages(answer, where=where, from_data=True)
            bare_answers.append(without_prompt(answer_messages, messages))
        return messages, bare_answers
    if all(isinstance(answer, str) for answer in answers) and isinstance(prompt or "", str):
        text = prompt or ""
        repeated_prompt = _repeated_spelling(text, answers) if repeated else None
        if repeated_prompt is not None:
            text = repeated_prompt
            answers = [answer.removeprefix(text) for answer in answers]
        if text:
            return text, answers
        return _split_texts(answers)  # what whole texts have in common tells which question they answer

    # Whole chats, with the text of the prompt beside them or without
    if not all(is_messages(answer) for answer in answers):
        answer = next((answer for answer in answers if not isinstance(answer, str)), answers[0])
        raise _mixed(index, prompt, answer)
    chats = [read_messages(answer, where=where, from_data=True) for answer in answers]
    question, chat_answers = _split_chats(chats)
    if isinstance(prompt, str) and prompt.strip():
        texts_of_others = [message["content"].strip() for message in question if message["role"] != "assistant"]
        if prompt.strip() not in texts_of_others:
            raise _mixed(index, prompt, answers[0])
    return question, chat_answers


def _mixed(index: int, prompt: object, answer: object) -> ValueError:
    return ValueError(
        f"row {index} has the prompt {prompt!r:.100} and the answer {answer!r:.100}, expected both as text, or both as "
        "chat messages"
    )


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _split_chats(chats: Sequence[list[Message]]) -> tuple[list[Message], list[list[Message]]]:
    """Split whole chats into the messages that they share at the beginning, and the others, at least one of each."""
    shared = 0
    while all(len(chat) > shared + 1 and chat[shared] == chats[0][shared] for chat in chats):
        shared += 1
    return chats[0][:shared], [chat[shared:] for chat in chats]


def _split_texts(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Split whole texts after the lines (of one line, the words) that they share at the beginning."""
    shared = os.path.commonprefix(list(texts)) if len(texts) > 1 else ""
    end = (shared.rfind("\n") if "\n" in shared else shared.rfind(" ")) + 1
    return shared[:end], [text[end:] for text in texts]


def _reward_row(
    index: int, row: Mapping[str, object], kind: Kind, prompt: Content, answers: Sequence[Content], model: RewardModel
) -> RewardRow:
    """Encode a row, of which prompt and answers are texts or lists of messages."""
    ended = _is_ended(index, row)
    ids = tuple(_encode(prompt, answer, model, ended=ended) for answer in answers)
    number = "margin" if kind == "pairs" else "score"
    target = 0.0 if row.get(number) is None else row[number]
    if not (isinstance(target, Real) and math.isfinite(target)):
        raise ValueError(
            f"row {index} has the {number} {target!r:.100}, expected a finite number (or None: not answered)"
        )
    content = prompt or answers[0]
    hashed = content if isinstance(content, str) else tuple(content)
    key = content_hash(Prompt(hashed))
    return RewardRow(ids=ids, target=float(target), key=key)


def _is_ended(index: int, row: Mapping[str, object]) -> bool:
    """Return whether the model has ended the answers itself, as it has if the row does not say; texts are refused."""
    terminated = row.get("terminated")
    if terminated is None:
        return True
    if not isinstance(terminated, (bool, int, float, np.bool_, np.number)) or terminated not in (0, 1):
        raise ValueError(f"row {index} has terminated {terminated!r:.100}, expected True or False")
    return bool(terminated)


def _encode(prompt: Content, answer: Content, model: RewardModel, *, ended: bool) -> list[int]:
    if isinstance(answer, str):
        warn_of_spelling(answer, model.tokenizer)
    return model.encode(prompt, answer, ended=ended)
