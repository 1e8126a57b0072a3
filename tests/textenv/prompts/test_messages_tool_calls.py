"""Calls of tools in rows of data, whatever holds the rows, against `transformers` on plain Python rows."""

import json

import pytest

from algos.finetuning.packing import read_examples
from tests.helpers.chat_templates import own_template_tokenizer, template_tokenizer
from textenv.prompts.messages import read_messages
from textenv.prompts.prompts import PromptList, rows_by_position
from textenv.prompts.tokenize import prompt_ids


def tool(name, **types):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters | {"required": list(types)}}}


def chat(name, arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "what is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "four"},
    ]


ROWS = [
    {"tools": [tool("weather", city="string")], "messages": chat("weather", {"city": "Rome", "days": [1, 2]})},
    {"tools": [tool("add", a="string", b="number")], "messages": chat("add", {"a": "two", "b": 0.5})},
    {"tools": [tool("clock")], "messages": chat("clock", {})},
]
"""A table has the arguments of all rows in each. (pandas makes floats of whole numbers, so there are none here.)"""
HOLDERS = ["list", "Dataset", "torch", "numpy", "Parquet", "pandas", "pandas of Parquet", "OpenAI"]


def held_by(holder, rows, folder):
    """The rows as a data set of this kind."""
    if holder == "list":
        return rows
    if holder == "OpenAI":
        return [row | {"messages": with_texts(row["messages"])} for row in rows]
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    dataset = datasets.Dataset.from_list(rows)
    if holder in ("torch", "numpy"):
        return dataset.with_format(holder)
    if holder == "pandas":
        return dataset.to_pandas()
    if "Parquet" in holder:
        dataset.to_parquet(folder / "rows.parquet")
    if holder == "Parquet":
        return datasets.Dataset.from_parquet(str(folder / "rows.parquet"), cache_dir=str(folder))
    if holder == "pandas of Parquet":
        return pytest.importorskip("pandas", reason="needs pandas").read_parquet(folder / "rows.parquet")
    return dataset


def with_texts(messages):
    """The messages with the arguments of calls as JSON text."""
    changed = json.loads(json.dumps(messages))
    for message in changed:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return changed


@pytest.mark.parametrize("holder", HOLDERS)
def test_calls_and_schemas_are_learnt_as_they_were_written(holder, tmp_path):
    tokenizer = template_tokenizer("qwen 3")
    rows = rows_by_position(held_by(holder, ROWS, tmp_path), "examples")
    for index, row in enumerate(ROWS):
        (example,) = read_examples(index, rows[index], tokenizer)
        text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        schemas, _, _ = text.partition("<|im_start|>user")
        assert "properties" in schemas and tokenizer.decode(example.ids).startswith(schemas)
        learnt = [token for token, is_learnt in zip(example.ids, example.learnt, strict=True) if is_learnt]
        (call,) = row["messages"][1]["tool_calls"]
        written = tokenizer.decode(learnt).partition("<tool_call>\n")[2].partition("\n</tool_call>")[0]
        assert json.loads(written) == call["function"]


@pytest.mark.parametrize("holder", HOLDERS)
def test_earlier_calls_in_prompts_are_read_as_they_were_written(holder, tmp_path):
    tokenizer = template_tokenizer("harmony")
    rows = [{"prompt": row["messages"]} for row in ROWS]
    if holder == "OpenAI":
        data = [{"prompt": with_texts(row["prompt"])} for row in rows]
    else:
        data = held_by(holder, rows, tmp_path)
    prompts = PromptList(data)
    for index, row in enumerate(rows):
        expected = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert prompt_ids(prompts.prompt(index), tokenizer) == expected


def test_null_in_json_text_is_an_argument():
    """A person wrote it; in objects it is what a table fills in, so it is kept only where no table can have been."""
    messages = chat("add", '{"a": null}')
    for from_data in (False, True):
        (_, answer, _) = read_messages(messages, where="row", from_data=from_data)
        assert answer["tool_calls"][0]["function"]["arguments"] == {"a": None}
    (_, answer, _) = read_messages(chat("add", {"a": None}), where="a request")
    assert answer["tool_calls"][0]["function"]["arguments"] == {"a": None}


@pytest.mark.parametrize("arguments", [{"arguments": {}}, {"arguments": None}, {"arguments": ""}, {}])
@pytest.mark.parametrize("by_itself", [False, True])
def test_a_call_without_arguments_has_none(arguments, by_itself):
    """Also one that has the name without a "function" around it."""
    function = {"name": "clock", **arguments}
    call = function if by_itself else {"type": "function", "function": function}
    asked, answer, _ = chat("clock", {})
    (_, answer) = read_messages([asked, answer | {"tool_calls": [call]}], where="row")
    assert answer["tool_calls"] == [{"type": "function", "function": {"name": "clock", "arguments": {}}}]


@pytest.mark.parametrize(("arguments", "words"), [('{"a": 2', "not JSON"), ("[2]", "expected a JSON object")])
def test_arguments_that_are_no_object_are_refused_with_their_row(arguments, words):
    with pytest.raises(ValueError, match=f"prompt 1 has a call with the arguments .*{words}"):
        PromptList([ROWS[0]["messages"], chat("add", arguments)]).prompt(1)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_template_that_adds_text_to_the_arguments_gets_them_as_text(as_text):
    """As DeepSeek's does."""
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}<eos>{% endfor %}"
    )
    tokenizer = own_template_tokenizer("chatml", template)
    messages = chat("add", {"a": 2, "city": "Zürich"})
    expected = with_texts(messages)
    expected[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "city": "Zürich"}'
    asked = expected if as_text else messages
    ids = prompt_ids(PromptList([asked]).prompt(0), tokenizer)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(expected, tokenize=False)
