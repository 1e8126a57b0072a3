"""How a chat template shows earlier answers: whether later turns are asked with what the model has written."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from textenv.lm.ends import template_end
from textenv.prompts.messages import THOUGHTS, Message
from textenv.prompts.plain_text import opened_tag
from textenv.prompts.template_variables import variables_read
from textenv.prompts.tokenize import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "\U000f0002"
"""A private-use character as the answer of an assistant."""
_THOUGHT = "\U000f0003"
"""A private-use character as the thought before it."""
_REPLY = "\U000f0004"
"""A private-use character as the message after it."""
_QUESTION: Message = {"role": "user", "content": "."}
_warn_once = functools.cache(logging.getLogger(__name__).warning)


def earlier_turn_differences(tokenizer: PreTrainedTokenizerBase, *, reply_role: str = "user") -> list[str]:
    """Find how a chat template writes an earlier answer otherwise than the model has written it.

    In a conversation with an environment, replies are appended to the answers as they were written. A server renders
    all messages again at each turn. A conversation of two turns, with and without a thought in its first answer, is
    rendered here in both ways. White space does not count.

    Args:
        tokenizer: the policy's tokenizer.
        reply_role: role of the message after the first answer, ``"user"`` or ``"tool"``. Some templates keep thoughts
            until the user writes again.

    Returns:
        What the template does, such as "leaves the thoughts out of earlier answers"; nothing if both ways are equal, if
        there is no template, or if it refuses such a conversation.
    """
    if not tokenizer.chat_template:
        return []
    asked = _render([_QUESTION], tokenizer, asks=True)
    rendered = _render_reply({"content": _ANSWER}, tokenizer, reply_role)
    if not asked or rendered.count(_ANSWER) != 1 or _REPLY not in rendered:
        return []
    differences = []

    # The beginning of the answer, which may be an empty thought
    prompt = _without_space(asked)
    before_answer, _, after_answer = rendered.partition(_ANSWER)
    before_answer = _without_space(before_answer)
    if not before_answer.startswith(prompt):
        common = os.path.commonprefix([prompt, before_answer])
        differences.append(f"begins an answer with {prompt[len(common) :]!r}, and leaves that out of earlier answers")

    # Thoughts
    if _drops_thoughts(tokenizer, reply_role):
        differences.append("leaves the thoughts out of earlier answers")

    # The end of the answer
    ends = template_end(tokenizer)
    texts = (*map(str, tokenizer.convert_ids_to_tokens(list(ends.ids))), *ends.texts)
    after_answer = after_answer.lstrip()
    if texts and not after_answer.startswith(texts):
        following, _, _ = after_answer.partition(_REPLY)
        differences.append(
            f"ends an answer with {texts[0]!r}, and goes on after earlier answers with {following!r:.60}"
        )
    return differences


def warn_of_earlier_turns(tokenizer: PreTrainedTokenizerBase, *, reply_roles: Sequence[str]) -> None:
    """Log a warning, once for the same differences, if there are `earlier_turn_differences` with one of these roles."""
    differences: list[str] = []
    for role in reply_roles:
        differences += earlier_turn_differences(tokenizer, reply_role=role)
    if not differences:
        return
    variables = ", ".join(sorted(variables_read(tokenizer))) or "none"
    _warn_once(
        "in a conversation of several turns the chat template %s. The model is trained with its answers as it wrote "
        "them, but a server that renders the messages shows it another context. earlier_turns='template' trains on "
        "what the template shows. If the template has a variable that keeps them, chat_template_kwargs sets it (its "
        "variables: %s)",
        "; it ".join(dict.fromkeys(differences)),
        variables,
    )


def _drops_thoughts(tokenizer: PreTrainedTokenizerBase, reply_role: str) -> bool:
    """Return True if the thought of an earlier answer is lost, in one of the forms in which a message may have it."""
    # In tags inside the content, which is what the model writes
    for tag in {"<think>", opened_tag(tokenizer)} - {""}:
        content = f"{tag}\n{_THOUGHT}\n{tag[:1]}/{tag[1:]}\n\n{_ANSWER}"
        rendered = _render_reply({"content": content}, tokenizer, reply_role)
        if _ANSWER in rendered and _THOUGHT not in rendered:
            return True

    # In a field of its own, if the template writes it in the last answer
    for name in THOUGHTS:
        fields = {"content": _ANSWER, name: _THOUGHT}
        message: Any = {"role": "assistant", **fields}
        last = _render([_QUESTION, message], tokenizer, asks=False)
        rendered = _render_reply(fields, tokenizer, reply_role)
        if _THOUGHT in last and _ANSWER in rendered and _THOUGHT not in rendered:
            return True
    return False


def _render_reply(answer: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, reply_role: str) -> str:
    """Return the rendering of a question, an answer with these fields, and a reply; empty if it is refused."""
    message: Any = {"role": "assistant", **answer}
    reply: Message = {"role": reply_role, "content": _REPLY}
    if reply_role == "tool":
        reply |= {"tool_call_id": "0" * 9, "name": "f"}
    return _render([_QUESTION, message, reply], tokenizer, asks=True)


def _render(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, asks: bool) -> str:
    """Return the rendering of messages; empty if the template refuses them."""
    try:
        return render(messages, tokenizer, add_generation_prompt=asks)
    except ValueError:
        return ""


def _without_space(text: str) -> str:
    """Return a text without white space, which templates trim and add."""
    return "".join(text.split())
