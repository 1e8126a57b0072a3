"""What chat templates make of earlier answers, against transformers' rendering of the same conversation."""

import itertools
import logging

import pytest

from tests.helpers.chat_families import FAMILIES, tokenizer_of
from tests.helpers.chat_templates import TEMPLATES, own_template_tokenizer, template_tokenizer
from tests.helpers.conversations import Parrot
from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.programs import program_env
from tests.helpers.text_envs import make_env
from tests.helpers.tool_calls import multiply
from textenv import TokenVectorEnv
from textenv.lm.earlier_turns import earlier_turn_differences
from textenv.lm.ends import closing_ids
from textenv.prompts.prompts import as_prompt
from textenv.prompts.template_variables import set_template_variables
from textenv.prompts.tokenize import prompt_ids, reply_ids, text_ids

ASKED = [{"role": "user", "content": "what is the time?"}]
REPLY = {"role": "user", "content": "and now?"}
THOUGHTS = "leaves the thoughts out of earlier answers"
BEGINNING = "begins an answer with '<think>', and leaves that out of earlier answers"
END = "ends an answer with '<|return|>', and goes on after earlier answers with '<|end|><|start|>user<|message|>'"
EXPECTED = {
    "qwen 3": [THOUGHTS],
    "qwen 3 thinking": [BEGINNING, THOUGHTS],
    "r1": [BEGINNING, THOUGHTS],
    "harmony": [THOUGHTS, END],
}
"""Read off the templates by eye; the others write what was written."""


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_differences_are_named(name):
    assert earlier_turn_differences(template_tokenizer(name)) == EXPECTED.get(name, [])


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"harmony"}))
def test_a_difference_is_one_of_the_contexts(name):
    """The transcript of an answer with thoughts, and the template's rendering of its messages; without white space."""
    tokenizer = template_tokenizer(name)
    prompt = as_prompt(0, ASKED)
    answer = "<think>\neasy\n</think>\n\nit is four"
    ids = prompt_ids(prompt, tokenizer) + text_ids(answer, tokenizer) + closing_ids(tokenizer, chat=True)
    transcript = tokenizer.decode(ids + reply_ids(REPLY["content"], prompt, ids, tokenizer))

    messages = [*ASKED, {"role": "assistant", "content": answer}, REPLY]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if name == "plain":  # nothing but EOS ends a turn
        transcript = transcript.replace("<eos>", "")
    are_equal = "".join(transcript.split()) == "".join(expected.split())
    assert are_equal == (not earlier_turn_differences(tokenizer))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_only_templates_that_drop_something_differ(name):
    differences = earlier_turn_differences(tokenizer_of(FAMILIES[name]))
    if name == "r1":
        assert differences == [BEGINNING, THOUGHTS]
    elif name == "harmony":
        assert len(differences) == 1 and differences[0].startswith("ends an answer with '<|return|>'")
    else:
        assert differences == []


def test_thoughts_stay_until_the_user_writes_again():
    """As of Qwen 3: results of tools follow a thought that stays."""
    tokenizer = template_tokenizer("qwen 3")
    assert earlier_turn_differences(tokenizer, reply_role="tool") == []
    assert earlier_turn_differences(template_tokenizer("r1"), reply_role="tool") == [BEGINNING, THOUGHTS]


def test_an_empty_thought_that_begins_an_answer_is_a_difference():
    tokenizer = own_template_tokenizer("qwen 3")
    set_template_variables(tokenizer, {"enable_thinking": False})
    beginning = BEGINNING.replace("<think>", "<think></think>")
    assert earlier_turn_differences(tokenizer) == [beginning, THOUGHTS]


def test_a_variable_may_keep_the_thoughts():
    """As `preserve_thinking` of Qwen 3.6."""
    template = TEMPLATES["qwen 3"].replace("loop.index0 > ns.last", "(preserve_thinking or loop.index0 > ns.last)")
    tokenizer = own_template_tokenizer("qwen 3", template)
    assert earlier_turn_differences(tokenizer) == [THOUGHTS]
    set_template_variables(tokenizer, {"preserve_thinking": True})
    assert earlier_turn_differences(tokenizer) == []


NUMBERS = itertools.count()


def fresh(name):
    """A tokenizer whose template reads a variable of its own: the warning names it, and each is logged once."""
    read = f"{{% if unused_{next(NUMBERS)} is defined %}}{{% endif %}}"
    return own_template_tokenizer(name, TEMPLATES[name] + read)


def warnings_of(make, caplog):
    """What is logged about earlier turns."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make()
    return [record.getMessage() for record in caplog.records if "of several turns" in record.getMessage()]


def games(name, **options):
    arguments = dict(num_envs=2, max_prompt_tokens=200, max_new_tokens=8)
    return lambda: TokenVectorEnv(Parrot, tokenizer=fresh(name), **arguments, **options)


def one_question(prompt, name, **options):
    return lambda: make_env(prompts=[prompt], tokenizer=fresh(name), max_prompt_tokens=999, **options)


def test_environments_of_several_turns_warn(caplog):
    (warning,) = warnings_of(games("qwen 3"), caplog)
    assert f"the chat template {THOUGHTS}." in warning and "earlier_turns='template'" in warning
    assert "its variables: enable_thinking, unused_" in warning
    assert warnings_of(lambda: program_env(lambda ask: 1.0, tokenizer=fresh("r1")), caplog)
    assert warnings_of(one_question(ASKED, "r1", tools=[multiply]), caplog)
    mixed = dict(prompts=["a text", ASKED], tokenizer=fresh("r1"), max_prompt_tokens=999, tools=[multiply])
    assert warnings_of(lambda: make_env(**mixed), caplog)


@pytest.mark.parametrize(
    "make",
    [
        games("chatml"),
        games("qwen 3", earlier_turns="template"),
        games("qwen 3", chat=False),
        games("qwen 3", max_turns=1),
        one_question(ASKED, "r1"),
        one_question(ASKED, "qwen 3", tools=[multiply]),  # the user never writes again
        one_question("a text", "r1", tools=[multiply]),
    ],
)
def test_environments_without_a_difference_do_not_warn(make, caplog):
    assert warnings_of(make, caplog) == []


def test_the_template_of_earlier_turns_must_exist():
    with pytest.raises(ValueError, match="earlier_turns is 'template', but the tokenizer has no chat template"):
        make_env(tokenizer=make_tokenizer(WORDS), earlier_turns="template")
    with pytest.raises(ValueError, match="earlier_turns is 'rendered', expected 'transcript' or 'template'"):
        make_env(earlier_turns="rendered")
