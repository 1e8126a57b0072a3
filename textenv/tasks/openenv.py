"""``textenv/OpenEnv-v0`` with environments whose actions call tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textenv.extras.openenv.actions import calls_tools
from textenv.extras.openenv.games import TIMEOUT
from textenv.extras.openenv.server import Server
from textenv.extras.openenv.tools import ToolGame
from textenv.programs.vector_env import ProgramVectorEnv

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 128
"""Default maximum number of tokens of an answer: a call of a tool is longer than a word."""


def calls_tools_at(url: str) -> bool:
    """Return True if the actions of the environment at this address call tools (MCP); raises as `Server`."""
    return calls_tools(Server(url, timeout=TIMEOUT).action_schema)


def make_tool_env(
    *, tokenizer: PreTrainedTokenizerBase, url: str, split: str = "train", timeout: float = TIMEOUT, **arguments: Any
) -> ProgramVectorEnv:
    """Make the vector environment of a server whose actions call tools; see `ToolGame`.

    Args:
        tokenizer: the policy's tokenizer, with a chat template.
        url: address of the server.
        split: ignored, as the protocol has none.
        timeout: seconds to wait for an answer of the server, and for it to return.
        arguments: other arguments of `ProgramVectorEnv`.

    Raises:
        ValueError: if the tokenizer has no chat template, or as `ProgramVectorEnv`.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"the environment at {url} is played by calls of tools in a chat, and the tokenizer has no chat template: "
            "take a model of chats, or set tokenizer.chat_template"
        )
    play = ToolGame(Server(url, timeout=timeout))
    length = min(1024, tokenizer.model_max_length)
    options = {"max_length": length, "max_new_tokens": MAX_NEW_TOKENS, "timeout": 2 * timeout} | arguments
    return ProgramVectorEnv(play, tokenizer=tokenizer, **options)
