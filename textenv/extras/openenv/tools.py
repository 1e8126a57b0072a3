"""`ToolGame`: environments on OpenEnv servers whose actions call tools (MCP), as a program that asks the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from textenv.envs.tool_schemas import CALL_TAG
from textenv.extras.openenv.games import EMPTY, as_text
from textenv.extras.openenv.server import ActionRefusedError, Data, Server, Session, observation_fields
from textenv.prompts.messages import Message

if TYPE_CHECKING:
    import numpy as np

OPENING = "Use the tools."
"""What the model reads first if the environment begins without a word."""
UNREADABLE = 'The call could not be read, expected {"name": ..., "arguments": {...}}.'


class _Ask(Protocol):
    """What a program asks (`textenv.programs.run.Ask`)."""

    def message(self, content: object, *, tools: list[dict[str, Any]]) -> Message:
        """Return the model's answer as a message."""


class ToolGame:
    """A program (`textenv.ProgramVectorEnv`) that plays an environment of tools, in one session per episode.

    The model reads the first observation and the schemas of the tools, and calls tools until it answers without a call,
    or the environment is done. What a tool returns, or its error, is a message of the role ``tool``. The reward is the
    sum of the environment's rewards.

    Args:
        server: a server whose actions call tools.

    Raises:
        ValueError: if it lists no tools.
    """

    __name__ = "OpenEnv"

    def __init__(self, server: Server) -> None:
        self._server = server
        session = server.session()
        session.reset(0)
        listed = session.step({"type": "list_tools"})["observation"].get("tools")
        session.close()
        if not isinstance(listed, list) or not listed:
            raise ValueError(f"{session.address} lists the tools {listed!r:.200}, expected at least one")
        self.tools = [_schema(tool) for tool in listed]
        """Schemas of the tools, as in OpenAI's protocol."""

    def __call__(self, ask: _Ask, *, rng: np.random.Generator) -> float:
        """Play an episode."""
        session = self._server.session()
        try:
            return self._play(ask, session, session.reset(int(rng.integers(2**31))))
        finally:
            session.close()

    def _play(self, ask: _Ask, session: Session, first: Data) -> float:
        """Play an episode; return the sum of the rewards."""
        total = float(first["reward"] or 0)
        fields = observation_fields(first)
        opening = OPENING
        if any(value not in EMPTY for value in fields.values()):
            opening = as_text(fields)
        chat: list[Message] = [{"role": "user", "content": opening}]
        while True:
            message = ask.message(chat, tools=self.tools)
            chat.append(message)
            calls = message.get("tool_calls", [])
            if not calls and CALL_TAG not in message["content"]:
                return total
            if not calls:
                chat.append({"role": "user", "content": UNREADABLE})

            # Run the calls
            for call in calls:
                function = call["function"]
                result, reward, is_done = _call(session, function)
                total += reward
                if is_done:
                    return total
                tool_message: Message = {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "name": function["name"],
                    "content": result,
                }
                chat.append(tool_message)


def _call(session: Session, function: Mapping[str, Any]) -> tuple[str, float, bool]:
    """Call a tool; return its result as a text, the reward, and whether the episode is over."""
    action = {"type": "call_tool", "tool_name": function["name"], "arguments": function["arguments"]}
    try:
        data = session.step(action)
    except ActionRefusedError as error:
        return f"Error: {error}", 0.0, False
    observation = data["observation"]
    failure = observation.get("error")
    if failure:
        text = f"Error: {failure.get('message', failure)}"
    else:
        text = _result_text(observation.get("result"))
    return text, float(data["reward"] or 0), bool(data["done"])


def _result_text(result: object) -> str:
    """Return what a tool has returned as a text; of a result of MCP, its data."""
    if isinstance(result, Mapping) and "data" in result and "content" in result:
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool, as in OpenAI's protocol."""
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}
