"""Upper bounds of prompts' lengths, against the lengths themselves."""

import pytest

from tests.helpers.chat_templates import template_tokenizer
from textenv.prompts.lengths import LengthBounds
from textenv.prompts.prompts import as_prompt
from textenv.prompts.tokenize import prompt_ids


def chat(question, numbers=None):
    """A chat, whose assistant has called a function with these numbers."""
    messages = [{"role": "user", "content": question}]
    if numbers is not None:
        function = {"name": "add", "arguments": {"numbers": numbers}}
        calls = [{"id": "1", "type": "function", "function": function}]
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "6"}]
    return messages


@pytest.mark.parametrize("name", ["chatml", "chatml by concatenation", "qwen 3"])
@pytest.mark.parametrize(
    ("first", "other"),
    [
        (chat("what is the time?"), chat("what is 好 the 🙂 time " * 9)),
        (chat("a", [1]), chat("a", [123_456_789] * 40)),
        (chat("a", [1]), chat("a", [[[]]] * 40)),
        ("the film", "🙂 the film " * 20),
    ],
)
def test_no_prompt_is_longer_than_its_bound(name, first, other):
    tokenizer = template_tokenizer(name)
    bounds = LengthBounds()
    prompt = as_prompt(0, first)
    bounds.note(prompt, len(prompt_ids(prompt, tokenizer)))
    longer = as_prompt(1, other)
    bound = bounds.bound(longer)
    assert bound is None or bound >= len(prompt_ids(longer, tokenizer))
    assert (bound is None) == ("tool_calls" in str(other))
