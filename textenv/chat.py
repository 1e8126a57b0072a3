"""From words to token ids: prompts, chats by the model's template, and what an environment answers.

Ids are made once and appended; what a policy wrote is never tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from textenv.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "THE-ANSWER"
"""Stands for an assistant's message while a template is rendered, to find what follows one."""


def is_chat(prompt: Prompt) -> bool:
    """Whether the prompt is a list of messages."""
    return not isinstance(prompt.content, str) and isinstance(prompt.content[0], dict)


def prompt_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt.

    Text gets the tokenizer's own special tokens, a leading BOS once; a chat is rendered by the tokenizer's template
    up to where the assistant begins to speak.

    Raises:
        ValueError: if there are none, or the tokenizer has no chat template for a chat.
    """
    if is_chat(prompt):
        ids = list(text_ids(render_chat(prompt.content, tokenizer), tokenizer))
    elif isinstance(prompt.content, str):
        ids = _once(list(tokenizer(prompt.content, verbose=False)["input_ids"]), tokenizer)
    else:
        ids = [int(token) for token in prompt.content if not isinstance(token, dict)]
    if not ids:
        raise ValueError(f"prompt {prompt.content!r} has no tokens: a policy needs at least one to start from")
    return ids


def reply_ids(reply: str, prompt: Prompt, said: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids to append when the environment has answered.

    Args:
        reply: what it says.
        prompt: how the episode began: a chat goes on by its template, a text goes on as it is.
        said: the ids so far, which end with the policy's turn.
        tokenizer: of the policy.
    """
    if not is_chat(prompt):
        return text_ids(reply, tokenizer)
    system = [message for message in prompt.content[:1] if isinstance(message, dict) and message["role"] == "system"]
    chat = (*system, {"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER})
    rendered = render_chat((*chat, {"role": "user", "content": reply}), tokenizer)
    ids = text_ids(rendered.partition(_ANSWER)[2], tokenizer)
    # The template closes the assistant's message; where the policy has closed it itself, once is enough.
    return ids[1:] if ids and said[-1] == ids[0] else ids


def render_chat(messages: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a chat up to where the assistant begins to speak; raises as `prompt_ids` does."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"prompt {messages!r:.200} is a chat, but the tokenizer has no chat template: "
            "set tokenizer.chat_template, or give the prompt as text"
        )
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template raises what its author pleased, in jinja
        raise ValueError(f"the tokenizer's chat template refused {messages!r:.300}: {error}") from error


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of what stands inside an episode: without the tokenizer's special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []


def _once(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # A tokenizer that closes a text with EOS would end the answer before it begins, and a text that spells
    # out its BOS would get a second one.
    while len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids.pop(0)
    return ids
