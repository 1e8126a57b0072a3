"""`ToolSchemas`: functions that a model may call, as JSON schemas: shown in prompts, and read from answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from textenv.envs.turn import Turn
from textenv.lm.ends import turn_ends
from textenv.prompts.messages import Message
from textenv.prompts.prompts import Messages, Prompt
from textenv.prompts.tokenize import (
    has_system_message,
    is_chat,
    prompt_ids,
    render,
    reply_ids,
    with_written_calls,
    without_end,
)
from textenv.rewards.patterns import NUM_LAST_IDS
from textenv.rewards.workers import attempt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALL_TAG = "<tool_call>"
"""What a call begins with."""
CALL = re.compile(rf"{CALL_TAG}(.*?)(?=</tool_call>|{CALL_TAG}|\Z)", re.DOTALL)
"""A call: the text after its opening tag. The closing tag may be missing."""
THOUGHT_TAG = r"<(?P<name>think|thinking|thought|reasoning)>|\[(?P<NAME>THINK)\]"
"""Pattern of what a thought begins with."""
THOUGHT = re.compile(rf"(?:{THOUGHT_TAG}).*?(?:</(?P=name)>|\[/(?P=NAME)\]|\Z)", re.DOTALL)
"""A thought with its tags. The closing tag may be missing."""
OPENED_THOUGHT = re.compile(rf"(?:{THOUGHT_TAG})\s*\Z")
"""The tag of a thought that the chat template begins."""
HOW_TO_CALL = (
    'To call one, write\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
CALL_ID = "0" * 9
"""Identifier of the calls that the environment runs: some chat templates demand one, of nine characters."""


class ToolSchemas:
    """JSON schemas of functions, for prompts and answers of a model.

    A chat template that takes ``tools`` shows the schemas; otherwise they are in the system message, or before a prompt
    that is text. Calls are read by the tokenizer's ``response_template``, else as JSON in ``<tool_call>`` tags.

    Args:
        schemas: as in OpenAI's protocol: ``{"type": "function", "function": {"name": ..., "parameters": ...}}``.
        tokenizer: the policy's tokenizer.

    Raises:
        ValueError: if the chat template would lose the schemas, the calls or their results.
    """

    def __init__(self, schemas: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> None:
        self.schemas = list(schemas)
        self.tokenizer = tokenizer
        lines = ["You may call:", "<tools>", *map(json.dumps, self.schemas), "</tools>", HOW_TO_CALL]
        self.text = "\n".join(lines)
        """Description of the functions, for prompts in which no chat template shows the schemas."""
        self.template_shows_schemas = bool(tokenizer.chat_template) and self._check_template()
        if tokenizer.chat_template and not self.template_shows_schemas and not has_system_message(tokenizer):
            raise ValueError(
                "the chat template writes neither tools nor system messages, so the model would not read which "
                "functions there are: set another template"
            )

    def prompt_ids(self, prompt: Prompt, **variables: object) -> list[int]:
        """Return the token ids of a prompt with the schemas; see `textenv.prompts.tokenize.prompt_ids`.

        Args:
            prompt: the prompt.
            variables: variables of the chat template.

        Raises:
            ValueError: if the prompt is token ids, or as that function does.
        """
        content = prompt.content
        if isinstance(content, str):
            content = f"{self.text}\n\n{content}"
        elif not is_chat(prompt):
            raise ValueError(f"prompt {content!r:.200} is token ids, expected a chat or a text, to show the tools in")
        elif not self.template_shows_schemas:
            content = self._with_system_message(tuple(with_written_calls(prompt.messages)))
        schemas = self.schemas if self.template_shows_schemas else ()
        return prompt_ids(replace(prompt, content=content), self.tokenizer, tools=schemas, **variables)

    def read(self, ids: list[int], context_ids: list[int]) -> list[object]:
        """Return the calls in a message of the model, without those inside of a thought (``<think>``).

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
        for text in CALL.findall(self._without_thoughts(message, context_ids)):
            call: object = attempt(partial(json.loads, text))
            if isinstance(call, list):  # several calls in one pair of tags
                calls += call
            else:
                calls.append(call)
        return calls

    def message(self, turn: Turn, *, number: int) -> Message:
        """Return an answer of the model as a message; if it calls functions, with the calls and the text before them.

        An answer whose calls cannot be read is its text.

        Args:
            turn: the answer.
            number: number of the turn in its conversation, for the identifiers of the calls.
        """
        outcome = attempt(partial(self.read, turn.completion_ids, turn.context_ids))
        entries = [outcome] if isinstance(outcome, Exception) else outcome
        calls = [entry for entry in entries if _is_call(entry)]
        if not calls or len(calls) < len(entries):
            return {"role": "assistant", "content": turn.completion}
        tool_calls: list[dict[str, Any]] = []
        for index, call in enumerate(calls):
            call_id = f"{number % 10**5:05d}{index % 10**4:04d}"  # nine characters, see CALL_ID
            function = _encodable({"name": call["name"], "arguments": arguments_of(call)})
            tool_calls.append({"id": call_id, "type": "function", "function": function})
        before_call, _, _ = self._without_thoughts(turn.completion, turn.context_ids).partition(CALL_TAG)
        text = turn.completion[: len(before_call)]
        if self.tokenizer.response_template:
            response = self.tokenizer.parse_response(turn.completion_ids, prefix=turn.context_ids, tools=self.schemas)
            text = str(response.get("content") or "")
        return {"role": "assistant", "content": text.strip(), "tool_calls": tool_calls}

    def _without_thoughts(self, message: str, context_ids: list[int]) -> str:
        """Return a message with spaces in place of its thoughts; the end of the context may begin the first one."""
        context = str(self.tokenizer.decode(context_ids[-NUM_LAST_IDS:]))
        opened = OPENED_THOUGHT.search(context)
        beginning = "" if opened is None else opened[0]
        text = THOUGHT.sub(lambda thought: " " * len(thought[0]), beginning + message)
        return text[len(beginning) :]

    def _with_system_message(self, chat: Messages) -> Messages:
        """Return a chat whose system message ends with the description of the functions."""
        if chat[0]["role"] == "system":
            text = "\n\n".join([chat[0]["content"], self.text])
            return ({"role": "system", "content": text}, *chat[1:])
        return ({"role": "system", "content": self.text}, *chat)

    def _check_template(self) -> bool:
        """Return True if the chat template shows the schemas; raise a ValueError if it loses calls or results."""
        question: Message = {"role": "user", "content": "the-question"}
        shows_schemas = render([question], self.tokenizer) != render([question], self.tokenizer, tools=self.schemas)

        # A conversation with a call and its result
        name = self.schemas[0]["function"]["name"]
        call = {"name": name, "arguments": {"x": "1"}}
        calls: list[dict[str, object]] = [{"type": "function", "id": CALL_ID, "function": call}]
        answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        result: Message = {"role": "tool", "tool_call_id": CALL_ID, "name": name, "content": "the-result"}
        reply_ids([result], Prompt((question,)), [-1], self.tokenizer)  # raises if the template refuses the result

        # The call must be read from what the template writes, and the result must stand behind it
        rendered = render([question, answer, result], self.tokenizer)
        _, _, after_question = rendered.rpartition("the-question")
        written_call, shown_result, _ = after_question.partition("the-result")
        written_ids = self.tokenizer(written_call, add_special_tokens=False)["input_ids"]
        calls_read = attempt(partial(self.read, written_ids, []))
        if not shown_result or (shows_schemas and calls_read != [call]):
            raise ValueError(
                f"the chat template writes {written_call!r:.200}, from which {calls_read!r:.200} is read, expected "
                f"{call!r} and the result of role 'tool': set tokenizer.response_template (see transformers) or "
                "another template"
            )
        return shows_schemas


def _is_call(call: object) -> TypeGuard[Mapping[str, Any]]:
    """Return True for a call with a name, whose arguments can be read (`arguments_of`)."""
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        return False
    try:
        json.dumps(call, allow_nan=False)
    except ValueError:  # Python reads NaN and Infinity, which are no JSON
        return False
    return not isinstance(attempt(partial(arguments_of, call)), Exception)


def arguments_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call, by name; none if it has a name only.

    Raises:
        ValueError: if they are no object, or may stand under another name, such as ``"parameters"``.
    """
    arguments = call.get("arguments")
    if arguments is None and set(call) <= {"name", "arguments"}:
        return {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f'the call is {call!r:.200}, expected {{"name": ..., "arguments": {{...}}}}')
    return arguments


def _encodable(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call in which unpaired surrogates, which are no Unicode, are question marks."""
    text = json.dumps(function, ensure_ascii=False).encode(errors="replace")
    return dict(json.loads(text))
