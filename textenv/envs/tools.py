"""`Tools`: Python functions that the model calls by schema in a conversation."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, SupportsFloat

import numpy as np
from torch import Tensor

from textenv.envs.tool_schemas import CALL_ID, ToolSchemas, arguments_of
from textenv.envs.turn import ToolCall, Turn
from textenv.prompts.messages import Message
from textenv.rewards.scores import shown
from textenv.rewards.workers import attempt, run_in_threads

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_tool_timeout(timeout: object) -> None:
    """Raise a ValueError unless the argument ``tool_timeout`` of `TextVectorEnv` is a time in seconds, or None."""
    if timeout is None:
        return
    seconds = math.nan
    if isinstance(timeout, SupportsFloat) and not isinstance(timeout, bool):
        seconds = float(timeout)
    if not 0 < seconds < math.inf:
        raise ValueError(f"tool_timeout is {timeout!r}, expected a number of seconds above 0, or None")


class Tools:
    """Functions that the model may call by their JSON schemas; errors of a call are texts for the model.

    `ToolSchemas` shows the schemas and reads the calls. The calls of a message run in order. Messages of several
    episodes run in parallel, each in a thread that is abandoned after ``timeout`` seconds.

    Args:
        functions: functions with type hints and docstrings, from which the schemas are made.
        tokenizer: the policy's tokenizer.
        timeout: time limit of the calls of a message, in seconds, or None.

    Raises:
        ValueError: if a function has no schema, or the chat template would lose the calls or their results.
    """

    def __init__(
        self, functions: Sequence[Callable[..., object]], tokenizer: PreTrainedTokenizerBase, timeout: float | None
    ) -> None:
        from transformers.utils import get_json_schema

        check_tool_timeout(timeout)

        # The functions and their schemas, by name
        try:
            schemas = [get_json_schema(function) for function in functions]
        except Exception as error:  # transformers' own kinds
            expected = "a list of functions with type hints, and docstrings with each argument below 'Args:'"
            raise ValueError(f"tools is {functions!r:.200}, expected {expected}: {error}") from error
        names = [schema["function"]["name"] for schema in schemas]
        self.functions = dict(zip(names, functions, strict=True))
        if len(self.functions) < len(names):
            raise ValueError(f"tools is {functions!r:.200}, expected functions with different names")

        self.schemas = ToolSchemas(schemas, tokenizer)
        self.timeout = timeout

    def reply(self, turns: Mapping[int, Turn]) -> dict[int, list[Message]]:
        """Run the calls in these turns, and add them to `Turn.tool_calls`.

        Args:
            turns: turns that have just ended, by any key, such as the row.

        Returns:
            Messages with the results, by key; turns without calls have none.
        """
        # Read the calls; a message that cannot be read counts as one call, which failed
        calls_of: dict[int, list[object]] = {}
        for key, turn in turns.items():
            calls = attempt(partial(self.schemas.read, turn.completion_ids, turn.context_ids))
            if isinstance(calls, Exception):
                calls = [calls]
            if calls:
                calls_of[key] = calls

        # Run them
        runs = [partial(self._run_all, calls) for calls in calls_of.values()]
        outcomes = run_in_threads(runs, self.timeout)

        # Write the results as messages; a message whose calls were not in time has one error for all of them
        replies: dict[int, list[Message]] = {}
        for (key, calls), outcome in zip(calls_of.items(), outcomes, strict=True):
            results = outcome if isinstance(outcome, list) else [outcome] * len(calls)
            replies[key] = []
            for call, result in zip(calls, results, strict=True):
                record = _record(call, result)
                turns[key].tool_calls = [*turns[key].tool_calls, record]
                message: Message = {
                    "role": "tool",
                    "tool_call_id": CALL_ID,
                    "name": record["name"],
                    "content": record["result"],
                }
                replies[key].append(message)
        return replies

    def _run_all(self, calls: list[object]) -> list[str | Exception]:
        """Run the calls of a message in order; return results and exceptions."""
        results: list[str | Exception] = []
        for call in calls:
            if isinstance(call, Exception):  # it could not be read
                results.append(call)
            else:
                results.append(attempt(partial(self._run, call)))
        return results

    def _run(self, call: object) -> str:
        """Run a call; return the result as a text."""
        if not isinstance(call, Mapping) or str(call.get("name")) not in self.functions:
            raise ValueError(
                f'expected {{"name": ..., "arguments": {{...}}}}, where the name is one of {[*self.functions]}'
            )
        function = self.functions[call["name"]]
        result: object = function(**arguments_of(call))
        if inspect.isawaitable(result):
            result = asyncio.run(_wait_for(result))
        if isinstance(result, AsyncIterator):
            result = asyncio.run(_list_of(result))
        if isinstance(result, Iterator):
            result = list(result)
        if isinstance(result, str):
            return result
        return json.dumps(result, default=_numbers_or_text, ensure_ascii=False)


async def _wait_for(result: Awaitable[object]) -> object:
    """Return what an ``async`` function returns."""
    return await result


async def _list_of(results: AsyncIterator[object]) -> list[object]:
    """Return what an ``async`` generator yields."""
    return [result async for result in results]


def _numbers_or_text(value: object) -> object:
    """Return what JSON does not have: a number or an array of NumPy or torch as numbers and lists, others as text."""
    if isinstance(value, Tensor):
        return value.tolist()
    if not isinstance(value, (np.ndarray, np.generic)):
        return str(value)
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:  # such as dates
        return array.astype(str).tolist()
    if array.dtype.kind == "f":
        array = array.astype(str).astype(np.float64)  # .1 in float32 is .1, and not 0.10000000149
    return array.tolist()


def _record(call: object, result: str | Exception) -> ToolCall:
    """Return the entry of `Turn.tool_calls` for a call and its result, a text or an exception."""
    name = None
    arguments = None
    if isinstance(call, Mapping):
        name = call.get("name")
        arguments = call.get("arguments")
    text = result if isinstance(result, str) else f"Error: {type(result).__name__}: {shown(result)}"
    return {
        "name": _encodable(str(name)),
        "arguments": arguments,
        "result": _encodable(text),
        "error": isinstance(result, Exception),
    }


def _encodable(text: str) -> str:
    """Replace unpaired surrogates, which are no Unicode, by question marks."""
    return text.encode(errors="replace").decode()
