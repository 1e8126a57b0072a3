"""Chats as data sets have them: parts, missing contents, the beginning of an answer; against `transformers`."""

import json

import numpy as np
import pytest

from tests.helpers import text_envs
from tests.helpers.chat_templates import TEMPLATES, own_template_tokenizer, template_tokenizer
from textenv.prompts.messages import read_messages, without_prompt
from textenv.prompts.prompts import PromptList, as_prompt, content_hash
from textenv.prompts.template_variables import set_template_variables
from textenv.prompts.tokenize import prompt_ids

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is the time?"}]
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "16:00"}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("begun", ["it is", "Let me think.\n<think>", "  it is ", "\n\nit", ""])
def test_an_answer_that_was_begun_is_continued(name, begun):
    tokenizer = template_tokenizer(name)
    chat = [*ASKED, {"role": "assistant", "content": begun}]
    try:
        expected = tokenizer.apply_chat_template(chat, continue_final_message=True, return_dict=False)
    except ValueError:  # the template writes something else
        with pytest.raises(ValueError, match="chat template refused"):
            prompt_ids(as_prompt(0, chat), tokenizer)
        return
    assert prompt_ids(as_prompt(0, chat), tokenizer) == expected
    if begun == "it is":
        assert tokenizer.decode(expected).endswith("it is")


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_is_continued_with_tools_and_variables(thinking):
    tokenizer = own_template_tokenizer("qwen 3")
    chat = [*ASKED, {"role": "assistant", "content": "the answer is"}]
    schemas = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    options = dict(tools=schemas, continue_final_message=True, return_dict=False)
    expected = tokenizer.apply_chat_template(chat, enable_thinking=thinking, **options)
    set_template_variables(tokenizer, {"enable_thinking": thinking})
    assert prompt_ids(as_prompt(0, chat), tokenizer, tools=schemas) == expected


def test_an_answer_without_a_text_cannot_be_continued():
    tokenizer = template_tokenizer("chatml")
    for message in (CALL, CALL | {"content": ""}, {"role": "assistant", "reasoning_content": "easy"}):
        with pytest.raises(ValueError, match="ends with an assistant's message without a text"):
            prompt_ids(as_prompt(0, [*ASKED, message]), tokenizer)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_parts_of_a_content_are_one_text(name):
    tokenizer = template_tokenizer(name)
    parts = [{"type": "text", "text": "what is", "image": None}, {"text": " the"}, " time?"]
    for content in (parts, tuple(parts), np.array(parts, dtype=object)):
        chat = [ASKED[0], {"role": "user", "content": content}]
        assert prompt_ids(as_prompt(0, chat), tokenizer) == prompt_ids(as_prompt(0, ASKED), tokenizer)
        assert content_hash(as_prompt(0, chat)) == content_hash(as_prompt(0, ASKED))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "say in words what images"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, "the part {'type': 'image'}"),
        ({"role": "user", "content": [{"type": "input_audio", "text": "a"}]}, "input_audio"),
        ({"role": "user", "content": 5}, "the content 5, expected a text"),
        ({"role": "user", "content": None}, "may leave the content out"),
        ({"role": "user", "tool_calls": CALL["tool_calls"]}, "may leave the content out"),
        ({"role": "assistant", "tool_calls": []}, "may leave the content out"),
        ({"role": "assistant", "tool_calls": "clock"}, "the tool_calls 'clock', expected a list"),
        ({"role": None, "content": "a"}, "expected {'role': ..., 'content': ...}"),
        ("a", "expected {'role': ..., 'content': ...}"),
    ],
)
def test_a_malformed_message_is_refused_by_row(message, words):
    with pytest.raises(ValueError, match=words) as caught:
        PromptList([ASKED, [*ASKED, message]]).prompt(1)
    assert str(caught.value).startswith("prompt 1 ")


@pytest.mark.parametrize("name", ["chatml", "chatml by concatenation", "qwen 3", "glm 4", "harmony"])
def test_a_message_of_tool_calls_needs_no_content(name):
    tokenizer = template_tokenizer(name)
    expected = [*ASKED, CALL | {"content": ""}, RESULT]
    if name == "chatml by concatenation":  # it has no calls, so they stand in the text, as models write them
        (function,) = [call["function"] for call in CALL["tool_calls"]]
        written = f"<tool_call>\n{json.dumps(function)}\n</tool_call>"
        expected[-2] = {"role": "assistant", "content": written}
    for call in (CALL, CALL | {"content": None}, CALL | {"content": ""}):
        ids = prompt_ids(as_prompt(0, [*ASKED, call, RESULT]), tokenizer)
        assert ids == tokenizer.apply_chat_template(expected, add_generation_prompt=True, return_dict=False)


def test_fields_without_a_value_are_left_out():
    (message,) = read_messages([{"role": "user", "content": "a", "tool_calls": None, "name": None}], where="row")
    assert message == {"role": "user", "content": "a"}


def test_a_reward_gets_an_answer_with_its_beginning():
    """As TRL does: the messages before the answer, and the answer whole."""
    tokenizer = template_tokenizer("chatml")
    begun = [*ASKED, {"role": "assistant", "content": "it is"}]
    seen = []

    def reward(prompts, completions, **_):
        seen.append((prompts, completions))
        return [0.0] * len(prompts)

    env = text_envs.make_env(reward, 1, prompts=[begun], tokenizer=tokenizer, max_prompt_tokens=200)
    state, _ = env.reset(seed=0)
    expected = tokenizer.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    assert state["tokens"][0, : state["length"][0, 0]].tolist() == expected
    for token in (*tokenizer(" four")["input_ids"], tokenizer.eos_token_id):
        state, *_, info = env.step(np.array([token]))
    assert info["completion"][0] == " four"
    assert seen == [([ASKED], [[{"role": "assistant", "content": "it is four"}]])]
    assert begun[-1] == {"role": "assistant", "content": "it is"}


def test_a_prompt_that_an_answer_repeats_is_read_once():
    answer = [{"role": "assistant", "content": "four"}]
    assert without_prompt([*ASKED, *answer], ASKED) == answer == without_prompt(answer, ASKED)
    assert without_prompt(answer, []) == answer
