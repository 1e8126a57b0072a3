"""Packing: several examples in one row, with no attention between them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from textenv.lm.model import LanguageModel
from textenv.prompts.prompts import Prompt, as_prompt
from textenv.prompts.tokenize import prompt_ids, reply_ids, text_ids, warn_of_spelling, without_end


class Example(NamedTuple):
    """Token ids, some of them targets of the loss."""

    ids: list[int]
    learnt: list[bool]
    """True on the target ids: an answer and its EOS, or a whole text after its first id."""


class TokenRows(NamedTuple):
    """Examples as tensors, padded on the right."""

    tokens: Tensor
    """int64 ``[R, L]``."""
    learnt: Tensor
    """Bool ``[R, L]``: True on the target tokens of the loss."""
    position_ids: Tensor | None
    """int64 ``[R, L]``, restarting at 0 in each example of a row; None if every row is one example."""


def pack(examples: Sequence[Example], *, max_length: int) -> list[list[Example]]:
    """Pack examples into rows of at most ``max_length`` ids, longest first, each into the first row with room.

    Example:
        >>> sizes = [Example([0] * n, [True] * n) for n in (2, 5, 3, 4)]
        >>> [[len(example.ids) for example in row] for row in pack(sizes, max_length=7)]
        [[5, 2], [4, 3]]
    """
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        size = len(example.ids)
        row = next((row for row, left in enumerate(room) if left >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(max_length)
        rows[row].append(example)
        room[row] -= size
    return rows


def token_rows(rows: Sequence[Sequence[Example]], *, lm: LanguageModel) -> TokenRows:
    """Convert rows of examples to tensors on the model's device; padding is an extra example without targets."""
    pad = next((i for i in (lm.tokenizer.pad_token_id, lm.tokenizer.eos_token_id) if i is not None), 0)
    sizes = [sum(len(example.ids) for example in row) for row in rows]
    gaps = [max(sizes) - size for size in sizes]
    filled = [[*row, Example([pad] * gap, [False] * gap)] for row, gap in zip(rows, gaps, strict=True)]
    tokens = [[token for example in row for token in example.ids] for row in filled]
    learnt = [[known for example in row for known in example.learnt] for row in filled]
    positions = [[place for example in row for place in range(len(example.ids))] for row in filled]
    several = any(len(row) > 1 for row in rows)
    return TokenRows(
        tokens=torch.tensor(tokens, device=lm.device),
        learnt=torch.tensor(learnt, device=lm.device),
        position_ids=torch.tensor(positions, device=lm.device) if several else None,
    )


def learnt_log_probs(lm: LanguageModel, rows: TokenRows) -> Tensor:
    """Log-probability of each target token given the tokens before it in its example: float32 ``[m]``, nats.

    Logits are computed at these tokens only, in chunks (`LanguageModel.score_actions`).
    """
    # Without an attention mask, `transformers` separates the examples of a row where position ids restart.
    apart: dict[str, Any] = {} if rows.position_ids is None else _apart(rows.position_ids)
    learnt = rows.learnt[:, 1:]
    hidden = lm.hidden(rows.tokens, learnt.int().argmax(1) + 1, **apart)
    return lm.score_actions(hidden[:, :-1][learnt], action=rows.tokens[:, 1:][learnt], allowed=None)[0]


@torch.no_grad()
def check_packing(lm: LanguageModel) -> None:
    """Raise a ValueError unless the model separates the examples of a row (models with a recurrent state do not)."""
    once = torch.arange(4, device=lm.device).unsqueeze(0) % lm.num_tokens
    alone = lm.hidden(once)
    try:
        packed = lm.hidden(torch.cat([once, once], dim=1), **_apart(torch.arange(4, device=lm.device).repeat(1, 2)))
        gap = (packed[:, 4:] - alone).abs().max().item()
        found = f"a difference of {gap:.3g}"
    except TypeError as error:  # a model without position_ids
        gap, found = math.inf, str(error)
    if gap > torch.finfo(alone.dtype).eps ** 0.5 * max(1.0, alone.abs().max().item()):
        raise ValueError(
            f"{type(lm.model).__name__} does not separate the examples of a packed row ({found}): set packing=False"
        )


def _apart(position_ids: Tensor) -> dict[str, Any]:
    return {"attention_mask": None, "position_ids": position_ids}


def read_example(index: int, example: Any, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Convert one entry of a data set to an `Example`.

    Args:
        index: index of the entry, for errors.
        example: a text (targets: all tokens but the first); ``{"prompt", "completion"}`` with the completion as
            target; or ``{"messages"}``, a chat with the assistant's messages as targets. Other columns are ignored.
        tokenizer: the model's tokenizer; every answer ends with exactly one EOS.

    Raises:
        ValueError: if the entry has none of these forms, or the tokenizer has no EOS.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS, so no answer would end: set tokenizer.eos_token")
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
    """Make an example of a prompt and the turns after it: the policy's at even indices, the environment's at odd."""
    ids = prompt_ids(prompt, tokenizer)
    learnt = [False] * len(ids)
    for place, text in enumerate(said):
        own = place % 2 == 0
        if own:
            text = without_end(text, tokenizer)
            warn_of_spelling(text, tokenizer)
            new = [*text_ids(text, tokenizer), int(tokenizer.eos_token_id)]
        else:
            new = reply_ids(text, prompt, ids, tokenizer)
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
            "the assistant's first, then assistant and user in alternation, as in an environment"
        )
    said = [message["content"] for message in content]
    return _answered(Prompt(content[:first]), said[first:], tokenizer)


def _said(index: int, completion: Any) -> str:
    """Text of a completion: a string, or the content of a list of one chat message."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and len(completion) == 1 and isinstance(completion[0], Mapping):
        return str(completion[0]["content"])
    raise ValueError(f"example {index} has the completion {completion!r:.200}, expected text or a list of one message")
