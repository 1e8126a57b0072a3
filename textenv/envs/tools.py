"""`Tools`: Python functions that the model calls by schema in a conversation."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from textenv.envs.turn import Turn
from textenv.lm.ends import turn_ends
from textenv.prompts.prompts import Prompt
from textenv.prompts.tokenize import is_chat, prompt_ids, render, reply_ids, without_end
from textenv.rewards.scores import shown
from textenv.rewards.workers import attempt, run_in_threads

_CALL = re.compile(r"<tool_call>(.*?)(?=</tool_call>|<tool_call>|\Z)", re.DOTALL)
_HOW = 'To call one, write\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'


class Tools:
    """Functions that the model may call by their JSON schemas; errors of a call are texts for the model.

    A chat template that takes ``tools`` shows the schemas; otherwise they are in the system message, or before a prompt
    that is text. Calls are read by the tokenizer's ``response_template``, else as JSON in ``<tool_call>`` tags. A
    message's calls run in order, those of several episodes at once in threads, abandoned after ``timeout`` seconds.
    Raises a ValueError if a function has no schema, or the chat template's calls or results would be lost.
    """

    def __init__(self, functions: Sequence[Any], tokenizer: Any, timeout: float | None) -> None:
        from transformers.utils import get_json_schema

        try:
            self.schemas: list[Any] = [get_json_schema(function) for function in functions]
        except Exception as error:  # transformers' own kinds
            expected = "a list of functions with type hints, and docstrings with each argument below 'Args:'"
            raise ValueError(f"tools is {functions!r:.200}, expected {expected}: {error}") from error
        self.functions = dict(zip((schema["function"]["name"] for schema in self.schemas), functions, strict=True))
        if len(self.functions) < len(self.schemas) or not (timeout is None or timeout > 0):
            raise ValueError(f"tools {functions!r:.99}, tool_timeout {timeout}: expected different names, above 0 s")
        self.tokenizer, self.timeout = tokenizer, timeout
        self.text = "\n".join(["You may call:\n<tools>", *map(json.dumps, self.schemas), "</tools>", _HOW])
        self.rendered = bool(tokenizer.chat_template) and self._check_template()

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt with the schemas; see `textenv.prompts.tokenize.prompt_ids`."""
        content: Any = prompt.content
        if isinstance(content, str):
            content = f"{self.text}\n\n{content}"
        elif not is_chat(prompt):
            raise ValueError(f"prompt {content!r:.200} is token ids, expected a chat or a text, to show the tools in")
        elif not self.rendered:
            given = [content[0]["content"]] if content[0]["role"] == "system" else []
            content = ({"role": "system", "content": "\n\n".join([*given, self.text])}, *content[len(given) :])
        return prompt_ids(replace(prompt, content=content), self.tokenizer, tools=self.schemas if self.rendered else ())

    def reply(self, turns: Mapping[int, Turn]) -> dict[int, list[dict[str, str]]]:
        """Run the calls in these turns and add them to `Turn.tool_calls`; return, by key, messages with the results."""
        read = {key: attempt(partial(self._read, turn.completion_ids, turn.context_ids)) for key, turn in turns.items()}
        asked = {key: found if isinstance(found, list) else [found] for key, found in read.items() if found != []}
        found = run_in_threads([partial(self._run_all, calls) for calls in asked.values()], self.timeout)
        replies: dict[int, list[dict[str, str]]] = {key: [] for key in asked}
        for (key, calls), done in zip(asked.items(), found, strict=True):
            for call, result in zip(calls, done if isinstance(done, list) else [done] * len(calls), strict=True):
                failed, given = isinstance(result, Exception), call if isinstance(call, Mapping) else {}
                text = f"Error: {type(result).__name__}: {shown(result)}" if failed else result
                name, text = (said.encode(errors="replace").decode() for said in (str(given.get("name")), text))
                own = {"name": name, "arguments": given.get("arguments"), "result": text, "error": failed}
                turns[key].tool_calls = [*turns[key].tool_calls, own]
                replies[key].append({"role": "tool", "tool_call_id": "0" * 9, "name": name, "content": text})
        return replies

    def _read(self, said: list[int], before: list[int]) -> list[Any]:
        """Calls in a message: mappings with ``name`` and ``arguments``, or other JSON (unpaired surrogates, too)."""
        if self.tokenizer.response_template:
            found = self.tokenizer.parse_response(said, prefix=before, tools=self.schemas)
            return [call["function"] for call in found.get("tool_calls") or []]
        if said and said[-1] in turn_ends(self.tokenizer).ids:
            said = said[:-1]
        texts = _CALL.findall(without_end(str(self.tokenizer.decode(said)), self.tokenizer))
        calls = [attempt(partial(json.loads, text)) for text in texts]
        return [one for call in calls for one in (call if isinstance(call, list) else [call])]

    def _run_all(self, calls: list[Any]) -> list[Any]:
        return [call if isinstance(call, Exception) else attempt(partial(self._run, call)) for call in calls]

    def _run(self, call: Any) -> str:
        if not isinstance(call, Mapping) or str(call.get("name")) not in self.functions:
            raise ValueError(f'expected {{"name": ..., "arguments": {{...}}}}, with a name of {[*self.functions]}')
        result = self.functions[call["name"]](**(call.get("arguments") or {}))
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)

    def _check_template(self) -> bool:
        """Return True if the chat template shows the schemas; raise a ValueError if calls or results get lost in it."""
        chat: list[dict[str, Any]] = [{"role": "user", "content": "the-question"}]
        rendered = render(chat, self.tokenizer) != render(chat, self.tokenizer, tools=self.schemas)
        call = {"name": next(iter(self.functions)), "arguments": {"x": "1"}}
        calls = [{"type": "function", "id": "0" * 9, "function": call}]
        result = {"role": "tool", "tool_call_id": "0" * 9, "name": call["name"], "content": "the-result"}
        reply_ids([result], Prompt((chat[0],)), [-1], self.tokenizer)
        chat += [{"role": "assistant", "content": "", "tool_calls": calls}, result]
        written, shows, _ = render(chat, self.tokenizer).rpartition("the-question")[2].partition("the-result")
        read = attempt(partial(self._read, self.tokenizer(written, add_special_tokens=False)["input_ids"], []))
        if not shows or (rendered and read != [call]):
            raise ValueError(
                f"the chat template writes {written!r:.200}, from which {read!r:.200} is read, expected {call!r} and "
                "the result of role 'tool': set tokenizer.response_template (see transformers) or another template"
            )
        return rendered
