"""Schemas of functions in prompts, and calls in answers."""

import json

import pytest

from tests.helpers.tool_calls import PLAIN, QUESTION, SIX, byte_tokenizer
from textenv.envs.tool_schemas import ToolSchemas
from textenv.envs.turn import Turn
from textenv.prompts.prompts import Prompt
from textenv.prompts.tokenize import prompt_ids

SCHEMA = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "multiply", "arguments": {"a": 2}}}]


@pytest.mark.parametrize("content", ["", "So:"])
def test_earlier_calls_stand_in_the_text_where_the_template_has_no_tools(content):
    """As the model has written them: the template would drop them."""
    tokenizer = byte_tokenizer(PLAIN)
    chat = (*QUESTION, {"role": "assistant", "content": content, "tool_calls": CALLS}, {"role": "tool", "content": "6"})
    text = tokenizer.decode(ToolSchemas([SCHEMA], tokenizer).prompt_ids(Prompt(chat)))
    written = '<tool_call>\n{"name": "multiply", "arguments": {"a": 2}}\n</tool_call>'
    answer = "\n".join(filter(None, [content, written]))
    assert f"<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>tool\n6<|im_end|>" in text


@pytest.mark.parametrize(
    ("call", "readable"),
    [
        ({"name": "f", "arguments": {"a": 2}}, True),
        ({"name": "f", "arguments": None}, True),
        ({"name": "f"}, True),
        ({"name": "f", "parameters": {"a": 2}}, False),  # as models like Llama write them: not a call without arguments
        ({"name": "f", "arguments": []}, False),
        ({"name": "f", "arguments": "a"}, False),
    ],
)
def test_a_call_whose_arguments_stand_elsewhere_is_no_call(call, readable):
    tokenizer = byte_tokenizer(PLAIN)
    text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    ids = tokenizer(text)["input_ids"]
    turn = Turn(Prompt(tuple(QUESTION)), [1], [1], ids, terminated=True, tokenizer=tokenizer)
    message = ToolSchemas([SCHEMA], tokenizer).message(turn, number=0)
    if readable:
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": call.get("arguments") or {}}
    else:
        assert message == {"role": "assistant", "content": text}


def test_a_template_that_would_write_no_schemas_is_refused():
    only_users = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ValueError, match="writes neither tools nor system messages"):
        ToolSchemas([SCHEMA], byte_tokenizer(only_users))


def test_calls_are_written_beside_the_thoughts_that_a_template_shows():
    tokenizer = byte_tokenizer(PLAIN.replace("m['content']", "m.get('reasoning_content', '') + m['content']"))
    answer = {"role": "assistant", "content": "So:", "reasoning_content": "easy. ", "tool_calls": CALLS}
    chat = Prompt((*QUESTION, answer, {"role": "tool", "content": "6"}))
    written = 'easy. So:\n<tool_call>\n{"name": "multiply", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    assert f"<|im_start|>assistant\n{written}" in tokenizer.decode(prompt_ids(chat, tokenizer))
    assert f"<|im_start|>assistant\n{written}" in tokenizer.decode(ToolSchemas([SCHEMA], tokenizer).prompt_ids(chat))


def test_a_call_in_a_thought_is_not_in_the_message():
    tokenizer = byte_tokenizer(PLAIN)
    thought = "<think>Perhaps <tool_call>{}</tool_call>?</think>"
    ids = tokenizer(f"{thought} So: {SIX}")["input_ids"]
    turn = Turn(Prompt(tuple(QUESTION)), [1], [1], ids, terminated=True, tokenizer=tokenizer)
    message = ToolSchemas([SCHEMA], tokenizer).message(turn, number=0)
    assert message["content"] == f"{thought} So:"
    assert [one["function"]["arguments"] for one in message["tool_calls"]] == [{"a": 2, "b": 3}]
