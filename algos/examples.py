"""Examples to imitate: texts, answers to prompts and chats, as token ids and which of them are to be learnt.

Ids are made as an environment makes them (`textenv.prompts.tokenize`), so that a policy meets the same ones afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from textenv.prompts.prompts import Prompt, as_prompt
from textenv.prompts.tokenize import prompt_ids, reply_ids, text_ids, warn_of_spelling, without_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Example(NamedTuple):
    """Token ids, of which some are learnt."""

    ids: list[int]
    learnt: list[bool]
    """True on the ids that the loss is about: an answer and its EOS, or a whole text after its first id."""


def read_example(index: int, example: Any, tokenizer: PreTrainedTokenizerBase) -> Example:
    """An example from whatever a data set holds.

    Args:
        index: its place, for errors.
        example: a text, all of which is learnt; ``{"prompt", "completion"}``, of which the completion is; or
            ``{"messages"}``, a chat of which what the assistant says is. Other columns are left alone.
        tokenizer: of the model; every answer ends with its EOS, once.

    Raises:
        ValueError: if it is none of these, or the tokenizer has no EOS.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS, so no answer would ever end: set tokenizer.eos_token")
    if isinstance(example, str):
        ids = [*prompt_ids(as_prompt(index, without_end(example, tokenizer)), tokenizer), int(tokenizer.eos_token_id)]
        return Example(ids, [False] + [True] * (len(ids) - 1))
    columns = set(example) if isinstance(example, Mapping) else set()
    if "messages" in columns:
        return _chat(index, example["messages"], tokenizer)
    if {"prompt", "completion"} <= columns:
        prompt = as_prompt(index, example["prompt"])
        return _answered(prompt, [_said(index, example["completion"])], tokenizer)
    raise ValueError(
        f"example {index} is {example!r:.200}, expected text, {{'prompt': ..., 'completion': ...}} or "
        "{'messages': [...]}"
    )


def _answered(prompt: Prompt, said: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Example:
    """The policy's turns (even places) and the environment's between them, after a prompt."""
    ids = prompt_ids(prompt, tokenizer)
    learnt = [False] * len(ids)
    for place, text in enumerate(said):
        own = place % 2 == 0
        new = _own_ids(text, tokenizer) if own else reply_ids(text, prompt, ids, tokenizer)
        ids, learnt = ids + new, learnt + [own] * len(new)
    return Example(ids, learnt)


def _chat(index: int, messages: Any, tokenizer: PreTrainedTokenizerBase) -> Example:
    content: Any = as_prompt(index, messages).content
    roles = [message["role"] for message in content] if isinstance(content[0], dict) else []
    first = roles.index("assistant") if "assistant" in roles else 0
    expected = (["assistant", "user"] * len(roles))[: len(roles) - first]
    if not first or roles[first:] != expected:
        raise ValueError(
            f"example {index} is a chat of {', '.join(roles) or 'no messages'}; expected at least one message before "
            "the assistant's first, and from there on assistant and user in turn, as in an environment"
        )
    said = [message["content"] for message in content]
    return _answered(Prompt(content[:first]), said[first:], tokenizer)


def _said(index: int, completion: Any) -> str:
    """The text of a completion: itself, or that of the one message of a chat's."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and len(completion) == 1 and isinstance(completion[0], Mapping):
        return str(completion[0]["content"])
    raise ValueError(f"example {index} has the completion {completion!r:.200}, expected text or a list of one message")


def _own_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = without_end(text, tokenizer)
    warn_of_spelling(text, tokenizer)
    return [*text_ids(text, tokenizer), int(tokenizer.eos_token_id)]
