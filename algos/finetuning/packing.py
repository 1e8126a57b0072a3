"""Packing: several examples in one row, with no attention between them."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from textenv.json_files import parse_json
from textenv.lm.answers import eos_ids, learnt_chats, without_turn_end, written_answer
from textenv.lm.model import LanguageModel
from textenv.prompts.messages import (
    Message,
    answer_beginning,
    is_messages,
    plain_json,
    read_messages,
    with_answer,
    without_prompt,
)
from textenv.prompts.prompts import Prompt, as_prompt
from textenv.prompts.template_variables import refuse_own_arguments
from textenv.prompts.tokenize import prompt_ids, text_ids, warn_of_spelling, warn_of_unwritten, without_end

WEIGHTS = ("weight", "train", "training")
"""Fields with which data sets (OpenAI's, Axolotl's) say whether an assistant's message is to be learnt."""


class Example(NamedTuple):
    """Token ids, some of them targets of the loss."""

    ids: list[int]
    learnt: list[bool]
    """True on the target ids: an answer and the token that ends it, or a whole text after its first id."""


class TokenRows(NamedTuple):
    """Examples as tensors, padded on the right."""

    tokens: Tensor
    """int64 ``[R, L]``."""
    learnt: Tensor
    """Bool ``[R, L]``: True on the target tokens of the loss."""
    position_ids: Tensor | None
    """int64 ``[R, L]``, restarting at 0 in each example of a row; None if every row is one example."""


def pack(examples: Sequence[Example], *, max_length: int) -> list[list[Example]]:
    """Pack examples into rows of at most ``max_length`` ids: the longest first, each into the first row with room.

    Example:
        >>> sizes = [Example([0] * n, [True] * n) for n in (2, 5, 3, 4)]
        >>> [[len(example.ids) for example in row] for row in pack(sizes, max_length=7)]
        [[5, 2], [4, 3]]
    """
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        size = len(example.ids)
        row = _first_with_room(room, size)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(max_length)
        rows[row].append(example)
        room[row] -= size
    return rows


def _first_with_room(room: Sequence[int], size: int) -> int | None:
    """Index of the first row with room for ``size`` ids, or None."""
    for row, row_room in enumerate(room):
        if row_room >= size:
            return row
    return None


def token_rows(rows: Sequence[Sequence[Example]], *, lm: LanguageModel) -> TokenRows:
    """Convert rows of examples to tensors on the model's device, padded like an extra example without targets."""
    pad = lm.tokenizer.pad_token_id
    if pad is None:
        pad = lm.tokenizer.eos_token_id
    if pad is None:
        pad = 0

    # The examples of a row one after the other
    tokens: list[list[int]] = []
    learnt: list[list[bool]] = []
    positions: list[list[int]] = []
    for row in rows:
        tokens.append([])
        learnt.append([])
        positions.append([])
        for example in row:
            tokens[-1] += example.ids
            learnt[-1] += example.learnt
            positions[-1] += range(len(example.ids))

    # Padding on the right
    longest = max(map(len, tokens))
    for row_tokens, row_learnt, row_positions in zip(tokens, learnt, positions, strict=True):
        padding = longest - len(row_tokens)
        row_tokens += [pad] * padding
        row_learnt += [False] * padding
        row_positions += range(padding)

    position_ids = None
    if any(len(row) > 1 for row in rows):
        position_ids = torch.tensor(positions, device=lm.device)
    return TokenRows(
        tokens=torch.tensor(tokens, device=lm.device),
        learnt=torch.tensor(learnt, device=lm.device),
        position_ids=position_ids,
    )


def learnt_log_probs(lm: LanguageModel, rows: TokenRows) -> Tensor:
    """Log-probability of each target token given the tokens before it in its example: float32 ``[m]``, nats.

    Logits are computed at these tokens only, in chunks (`LanguageModel.score_actions`).
    """
    learnt = rows.learnt[:, 1:]  # [R, L - 1]: whether the next token is a target
    first_target = learnt.int().argmax(1) + 1
    if rows.position_ids is None:
        hidden = lm.hidden(rows.tokens, first_target)  # [R, L, h]
    else:
        hidden = _hidden_of_packed(lm, rows.tokens, rows.position_ids, first_target)
    log_prob, *_ = lm.score_actions(hidden[:, :-1][learnt], action=rows.tokens[:, 1:][learnt], allowed=None)
    return log_prob


@torch.no_grad()
def check_packing(lm: LanguageModel) -> None:
    """Raise a ValueError unless the model separates the examples of a row.

    Models with a recurrent state do not, and an encoder reads one prompt a row.
    """
    if lm.seq2seq is not None:
        raise ValueError(
            f"{type(lm.model).__name__} is an encoder-decoder, which reads one example a row: set packing=False"
        )

    # The same example twice in a row: the second one must not see the first.
    example = torch.arange(4, device=lm.device).unsqueeze(0) % lm.num_tokens
    alone = lm.hidden(example)
    twice = torch.cat([example, example], dim=1)
    position_ids = torch.arange(4, device=lm.device).repeat(1, 2)
    try:
        packed = _hidden_of_packed(lm, twice, position_ids)
        difference = (packed[:, 4:] - alone).abs().max().item()
        reason = f"a difference of {difference:.3g}"
    except TypeError as error:  # a model without position_ids
        difference = math.inf
        reason = str(error)

    tolerance = torch.finfo(alone.dtype).eps ** 0.5 * max(1.0, alone.abs().max().item())
    if difference > tolerance:
        raise ValueError(
            f"{type(lm.model).__name__} does not separate the examples of a packed row ({reason}): set packing=False"
        )


def _hidden_of_packed(
    lm: LanguageModel, tokens: Tensor, position_ids: Tensor, prompt_length: Tensor | None = None
) -> Tensor:
    """Trunk output ``[R, L, h]`` of packed rows, whose examples do not see each other.

    `transformers` separates them where position ids restart, if there is no attention mask.
    """
    return lm.hidden(tokens, prompt_length, attention_mask=None, position_ids=position_ids)


def read_example(index: int, row: object, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Convert a row of a data set to an `Example`; see `read_examples`.

    Raises:
        ValueError: as `read_examples`, and if the row is a chat whose answers need an example each.
    """
    examples = read_examples(index, row, tokenizer)
    if len(examples) > 1:
        raise ValueError(
            f"example {index} is a chat whose earlier answers the template writes otherwise once later messages follow "
            f"(such as without thoughts), so it makes {len(examples)} examples: use read_examples"
        )
    return examples[0]


def read_examples(index: int, row: object, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Convert a row of a data set to examples, nearly always one.

    The targets in an assistant's message are what the tokenizer's chat template writes for it, with thoughts and calls
    of tools, and the token that ends the turn. `textenv.lm.answers.learnt_chats` says when a chat makes several
    examples.

    Args:
        index: index of the row, for errors.
        row: a text (targets: all tokens but the first, and EOS); ``{"prompt", "completion"}`` with the completion as
            target; or ``{"messages"}``, a chat with the assistant's messages as targets. A chat may have the columns
            ``"tools"`` (schemas) and ``"chat_template_kwargs"`` for its template, each also as JSON. A ``"weight"`` of
            a row, and each of `WEIGHTS` of an answer, may only be 1; other columns are ignored. The completion of a
            chat is messages, or a text that the model writes after the template's start of an answer. If a prompt ends
            with an assistant's message, that is the beginning of the answer.
        tokenizer: the model's tokenizer; a text and a completion of a text end with exactly one EOS.

    Raises:
        ValueError: if the row has none of these forms, or a weight; its answers cannot be learnt as the template writes
            them; or nothing ends them: the tokenizer has no EOS.
    """
    # A text
    if isinstance(row, str):
        text = as_prompt(index, without_end(row, tokenizer))
        ids = [*prompt_ids(text, tokenizer), *eos_ids(tokenizer)]
        learnt = [False] + [True] * (len(ids) - 1)
        return [Example(ids, learnt)]

    # A chat, or a prompt and its completion
    if isinstance(row, Mapping):
        _refuse_weights(index, row)
        if "messages" in row:
            chat = as_prompt(index, row["messages"])
            return _chat(index, _messages_of(chat), tokenizer, row)
        if "prompt" in row and "completion" in row:
            prompt = as_prompt(index, row["prompt"])
            return _answered(index, prompt, row["completion"], tokenizer, row)
    raise ValueError(
        f"example {index} is {row!r:.200}, expected text, {{'prompt': ..., 'completion': ...}} or {{'messages': [...]}}"
    )


def _refuse_weights(index: int, row: Mapping[str, object]) -> None:
    """Raise a ValueError if a row or an assistant's message has a weight other than 1, which would be ignored."""
    values = [("weight", row.get("weight"))]
    for name in ("messages", "completion"):
        messages: Any = row.get(name)
        if not is_messages(messages):
            continue
        for message in messages:
            if isinstance(message, Mapping) and message.get("role") == "assistant":
                values += [(name, message.get(name)) for name in WEIGHTS]
    for name, value in values:
        is_one = isinstance(value, (Real, np.bool_)) and value == 1
        is_missing = value is None or (isinstance(value, Real) and math.isnan(value))  # as tables fill it
        if not is_one and not is_missing:
            raise ValueError(
                f"example {index} has {name}={value!r:.100}, expected 1 or True, as there are no weights: leave out "
                "what is not to be learnt, give earlier messages as the prompt, and rename a column of another meaning"
            )


def _answered(
    index: int, prompt: Prompt, completion: Any, tokenizer: PreTrainedTokenizerBase, row: Mapping[str, object]
) -> list[Example]:
    """Make examples of a prompt and its completion."""
    if not isinstance(completion, str) and not is_messages(completion):
        raise ValueError(f"example {index} has the completion {completion!r:.200}, expected text or a list of messages")

    # A chat, whose completion is a text or messages
    messages = _messages_of(prompt)
    if messages and isinstance(completion, str):
        warn_of_spelling(without_turn_end(completion, tokenizer), tokenizer)
        options = _template_options(index, row)
        ids, learnt = written_answer(prompt, completion, tokenizer, options)
        warn_of_unwritten(messages, tokenizer, has_tools="tools" in options)
        return [Example(ids, learnt)]
    if messages:
        answer = without_prompt(read_messages(completion, where=f"example {index}", from_data=True), messages)
        begun = answer_beginning(messages)
        first_target = len(messages)
        if begun is not None:
            first_target -= 1
        return _chat(index, with_answer(messages, answer), tokenizer, row, first=first_target, begun=begun)

    # A text, or token ids
    text = completion
    if not isinstance(text, str):
        answer = read_messages(completion, where=f"example {index}", from_data=True)
        if len(answer) != 1 or set(answer[0]) != {"role", "content"}:
            raise ValueError(
                f"example {index} has the completion {completion!r:.200} of a prompt that is no chat: give the prompt "
                "as messages, too, or the completion as text"
            )
        text = answer[0]["content"]
    text = without_end(text, tokenizer)
    warn_of_spelling(text, tokenizer)
    query_ids = prompt_ids(prompt, tokenizer)
    answer_ids = [*text_ids(text, tokenizer), *eos_ids(tokenizer)]
    learnt = [False] * len(query_ids) + [True] * len(answer_ids)
    return [Example(query_ids + answer_ids, learnt)]


def _chat(
    index: int,
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    row: Mapping[str, object],
    *,
    first: int = 0,
    begun: str | None = None,
) -> list[Example]:
    """Make examples of a chat.

    Args:
        index: index of the row, for errors.
        messages: the chat.
        tokenizer: the model's tokenizer.
        row: the row, with columns for the template.
        first: index of the message from which on the assistant's messages are targets.
        begun: beginning of the answer that the prompt has, which is no target; None if it has none.
    """
    options = _template_options(index, row)

    # The template ends a turn, so the content must not
    without_ends = []
    for position, message in enumerate(messages):
        is_target = position >= first and message["role"] == "assistant" and "content" in message
        if is_target:
            content = without_turn_end(message["content"], tokenizer)
            message = message | {"content": content}
            warn_of_spelling(content, tokenizer)
        without_ends.append(message)

    try:
        chats = learnt_chats(without_ends, tokenizer, first=first, begun=begun, options=options)
    except ValueError as error:
        raise ValueError(f"example {index}: {error}") from error
    warn_of_unwritten(messages, tokenizer, has_tools="tools" in options)
    return [Example(ids, learnt) for ids, learnt in chats]


def _messages_of(prompt: Prompt) -> list[Message]:
    """Messages of a chat; none if the prompt is a text or token ids."""
    return [message for message in prompt.content if isinstance(message, dict)]


def _template_options(index: int, row: Mapping[str, object]) -> dict[str, object]:
    """Read a row's columns for the chat template, as in TRL's data sets: ``tools`` and ``chat_template_kwargs``."""
    # Each as it is, or as JSON
    columns: dict[str, Any] = {}
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = plain_json(row.get(name), without_none=True)  # tables fill what a schema lacks with None
        if isinstance(value, str):
            value = parse_json(value.encode())
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"example {index} has the {name} {value!r:.200}, expected a {kind.__name__}, or None")
        columns[name] = value

    # Variables of the template
    options = dict(columns["chat_template_kwargs"] or {})
    refuse_own_arguments(options, where=f"the chat_template_kwargs of example {index}")
    if columns["tools"]:
        options["tools"] = columns["tools"]
    return options
