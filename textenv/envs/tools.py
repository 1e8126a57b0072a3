"""`Tools`: Python functions that the model calls by schema in a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from textenv.envs.turn import ToolCall, Turn
from textenv.lm.ends import turn_ends
from textenv.prompts.messages import Message
from textenv.prompts.prompts import Messages, Prompt
from textenv.prompts.tokenize import is_chat, prompt_ids, render, reply_ids, without_end
from textenv.rewards.scores import shown
from textenv.rewards.workers import attempt, run_in_threads

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CALL = re.compile(r"<tool_call>(.*?)(?=</tool_call>|<tool_call>|\Z)", re.DOTALL)
"""A call: the text after its opening tag. The closing tag may be missing."""
_HOW_TO_CALL = (
    'To call one, write\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_CALL_ID = "0" * 9
"""Identifier of every call: some chat templates demand one, of nine characters."""


class Tools:
    """Functions that the model may call by their JSON schemas; errors of a call are texts for the model.

    A chat template that takes ``tools`` shows the schemas; otherwise they are in the system message, or before a prompt
    that is text. Calls are read by the tokenizer's ``response_template``, else as JSON in ``<tool_call>`` tags. The
    calls of a message run in order. Messages of several episodes run in parallel, each in a thread that is abandoned
    after ``timeout`` seconds.

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

        if timeout is not None and not timeout > 0:
            raise ValueError(f"tool_timeout is {timeout}, expected a number of seconds above 0, or None")

        # The functions and their schemas, by name
        try:
            self.schemas: list[Any] = [get_json_schema(function) for function in functions]
        except Exception as error:  # transformers' own kinds
            expected = "a list of functions with type hints, and docstrings with each argument below 'Args:'"
            raise ValueError(f"tools is {functions!r:.200}, expected {expected}: {error}") from error
        names = [schema["function"]["name"] for schema in self.schemas]
        self.functions = dict(zip(names, functions, strict=True))
        if len(self.functions) < len(names):
            raise ValueError(f"tools is {functions!r:.200}, expected functions with different names")

        # How the model learns of them
        self.tokenizer = tokenizer
        self.timeout = timeout
        lines = ["You may call:", "<tools>", *map(json.dumps, self.schemas), "</tools>", _HOW_TO_CALL]
        self.text = "\n".join(lines)
        """Description of the functions, for prompts in which no chat template shows the schemas."""
        self.template_shows_schemas = bool(tokenizer.chat_template) and self._check_template()

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt with the schemas; see `textenv.prompts.tokenize.prompt_ids`.

        Raises:
            ValueError: if the prompt is token ids, or as that function does.
        """
        content = prompt.content
        if isinstance(content, str):
            content = f"{self.text}\n\n{content}"
        elif not is_chat(prompt):
            raise ValueError(f"prompt {content!r:.200} is token ids, expected a chat or a text, to show the tools in")
        elif not self.template_shows_schemas:
            content = self._with_system_message(prompt.messages)
        schemas = self.schemas if self.template_shows_schemas else ()
        return prompt_ids(replace(prompt, content=content), self.tokenizer, tools=schemas)

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
            calls = attempt(partial(self._read, turn.completion_ids, turn.context_ids))
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
                    "tool_call_id": _CALL_ID,
                    "name": record["name"],
                    "content": record["result"],
                }
                replies[key].append(message)
        return replies

    def _with_system_message(self, chat: Messages) -> Messages:
        """Return a chat whose system message ends with the description of the functions."""
        if chat[0]["role"] == "system":
            text = "\n\n".join([chat[0]["content"], self.text])
            return ({"role": "system", "content": text}, *chat[1:])
        return ({"role": "system", "content": self.text}, *chat)

    def _read(self, ids: list[int], context_ids: list[int]) -> list[object]:
        """Return the calls in a message of the model.

        Args:
            ids: token ids of the message.
            context_ids: token ids before it.

        Returns:
            For each call a mapping with ``name`` and ``arguments``, or whatever other JSON the model wrote (its texts
            may have unpaired surrogates), or the exception if it is no JSON.
        """
        if self.tokenizer.response_template:
            response = self.tokenizer.parse_response(ids, prefix=context_ids, tools=self.schemas)
            return [call["function"] for call in response.get("tool_calls") or []]

        if ids and ids[-1] in turn_ends(self.tokenizer).ids:
            ids = ids[:-1]
        message = without_end(str(self.tokenizer.decode(ids)), self.tokenizer)
        calls: list[object] = []
        for text in _CALL.findall(message):
            call: object = attempt(partial(json.loads, text))
            if isinstance(call, list):  # several calls in one pair of tags
                calls += call
            else:
                calls.append(call)
        return calls

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
        arguments = call.get("arguments") or {}
        result = function(**arguments)
        if isinstance(result, str):
            return result
        return json.dumps(result, default=str, ensure_ascii=False)

    def _check_template(self) -> bool:
        """Return True if the chat template shows the schemas; raise a ValueError if it loses calls or results."""
        question: Message = {"role": "user", "content": "the-question"}
        shows_schemas = render([question], self.tokenizer) != render([question], self.tokenizer, tools=self.schemas)

        # A conversation with a call and its result
        name = next(iter(self.functions))
        call = {"name": name, "arguments": {"x": "1"}}
        calls: list[dict[str, object]] = [{"type": "function", "id": _CALL_ID, "function": call}]
        answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        result: Message = {"role": "tool", "tool_call_id": _CALL_ID, "name": name, "content": "the-result"}
        reply_ids([result], Prompt((question,)), [-1], self.tokenizer)  # raises if the template refuses the result

        # The call must be read from what the template writes, and the result must stand behind it
        rendered = render([question, answer, result], self.tokenizer)
        _, _, after_question = rendered.rpartition("the-question")
        written_call, shown_result, _ = after_question.partition("the-result")
        written_ids = self.tokenizer(written_call, add_special_tokens=False)["input_ids"]
        calls_read = attempt(partial(self._read, written_ids, []))
        if not shown_result or (shows_schemas and calls_read != [call]):
            raise ValueError(
                f"the chat template writes {written_call!r:.200}, from which {calls_read!r:.200} is read, expected "
                f"{call!r} and the result of role 'tool': set tokenizer.response_template (see transformers) or "
                "another template"
            )
        return shows_schemas


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
