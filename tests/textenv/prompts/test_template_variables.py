"""Variables of chat templates, against transformers' rendering of the template as it was, with these arguments."""

import pytest
from transformers import AutoTokenizer

from tests.helpers import text_envs
from tests.helpers.chat_templates import TEMPLATES, own_template_tokenizer
from textenv.prompts.prompts import as_prompt
from textenv.prompts.template_variables import set_template_variables, template_defaults, variables_read
from textenv.prompts.tokenize import prompt_ids

CHAT = [{"role": "user", "content": "what is the time?"}]
ODD_TEMPLATE = """
  {% if x is defined %}{{ x | tojson }}{% endif %}
{%- macro twice(text) %}{{ text }}{{ x }}{{ y }}{% endmacro %}
{{ twice('a') }}
{% for m in messages %}{% if y %}{% break %}{% endif %}{{ x }}{% generation %}{{ m.content }}{% endgeneration %}
{% endfor %}"""
"""White space at its beginning, macros, loops that end early, marked answers."""
VALUES = [
    False, True, None, 3, -2.5e-7, "", "it's \"so\"\\\n é \U0001f600 #} %} }} {{ \u2028 \x7f", [1, "a", {"b": None}],
    {"k": [True]}, [],
]  # fmt: skip


def rendered(tokenizer, **options):
    return tokenizer.apply_chat_template(CHAT, tokenize=False, **options)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_defaults_render_as_arguments_would(value):
    tokenizer = own_template_tokenizer("chatml", ODD_TEMPLATE)
    expected = rendered(tokenizer, x=value, y=False)
    overridden = rendered(tokenizer, x=5, y=False)
    set_template_variables(tokenizer, {"x": 7, "y": True})
    for _ in range(2):  # what was set before is replaced
        set_template_variables(tokenizer, {"x": value, "y": False})
        assert rendered(tokenizer) == expected
        assert template_defaults(tokenizer) == {"x": value, "y": False}
    assert rendered(tokenizer, x=5) == overridden


def test_nothing_is_set_by_none():
    tokenizer = own_template_tokenizer("qwen 3")
    for nothing in (None, {}):
        set_template_variables(tokenizer, nothing)
    assert tokenizer.chat_template == TEMPLATES["qwen 3"] and template_defaults(tokenizer) == {}


def test_an_environment_and_what_is_saved_render_alike(tmp_path):
    tokenizer = own_template_tokenizer("qwen 3")
    options = dict(add_generation_prompt=True, return_dict=False)
    expected = tokenizer.apply_chat_template(CHAT, enable_thinking=False, **options)
    assert expected != tokenizer.apply_chat_template(CHAT, **options)

    env = text_envs.make_env(
        prompts=[CHAT], tokenizer=tokenizer, max_prompt_tokens=99, chat_template_kwargs={"enable_thinking": False}
    )
    state, _ = env.reset(seed=0)
    assert state["tokens"][0, : state["length"][0, 0]].tolist() == expected
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert prompt_ids(as_prompt(0, CHAT), loaded) == expected == loaded.apply_chat_template(CHAT, **options)


def test_an_environment_refuses_a_template_that_was_changed():
    tokenizer = own_template_tokenizer("qwen 3")
    options = dict(prompts=[CHAT], tokenizer=tokenizer, max_prompt_tokens=99)
    env = text_envs.make_env(**options)
    text_envs.make_env(**options, chat_template_kwargs={"enable_thinking": False})
    for start in (lambda: env.reset(seed=0), lambda: env.start_episodes(2, seed=0)):
        with pytest.raises(ValueError, match="give each its own tokenizer"):
            start()


def test_several_templates_each_get_the_defaults():
    named = {"default": "{{ x }}{{ messages[0].content }}", "tool_use": "{{ tools | length }}{{ y }}"}
    tokenizer = own_template_tokenizer("chatml", named)
    assert variables_read(tokenizer) == {"x", "y"}
    set_template_variables(tokenizer, {"x": "a", "y": 2})
    assert rendered(tokenizer) == "awhat is the time?"
    assert rendered(tokenizer, tools=[{}]) == "12"


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{% set a = a or 'x' %}{{ a }}", {"a"}),
        ("{% if a is not defined %}{% set a = 1 %}{% endif %}{{ a }}", {"a"}),
        ("{% set a = a | default(true) %}{{ a }}", {"a"}),
        ("{% set a = a if a is defined else true %}{{ a }}", {"a"}),
        ("{% if messages %}{% set a = 1 %}{% endif %}{% if a is defined %}{{ a }}{% endif %}", set()),
        ("{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1) }}{% if tools %}{% set a = 2 %}{% endif %}{{ a }}", set()),
        ("{{ bos_token }}{{ range(3) }}{{ strftime_now('%d') }}{{ documents }}{{ tools }}{{ a.b }}", {"a"}),
        ("{% for m in messages %}{% if m.x %}{% set c = 1 %}{% endif %}{{ c }}{% endfor %}", set()),
        *[(template, {"enable_thinking"} if name == "qwen 3" else set()) for name, template in TEMPLATES.items()],
    ],
)
def test_the_variables_are_those_that_may_be_set(template, names):
    assert variables_read(own_template_tokenizer("chatml", template)) == names


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"enable_thinkng": False}, "has enable_thinkng, which the chat template never reads; it reads enable_think"),
        ({3: False}, "has 3, which the chat template never reads"),
        ({"tokenize": False, "messages": []}, "has messages, tokenize, expected variables of the template only"),
        ({"add_generation_prompt": True}, "has add_generation_prompt, expected"),
        ({"bos_token": "a"}, "has bos_token, expected"),
        (["enable_thinking"], r"is \['enable_thinking'\], expected variables of the chat template"),
        ({"enable_thinking": float("nan")}, "enable_thinking=nan, expected a value of JSON"),
        ({"enable_thinking": object}, "expected a value of JSON"),
        ({"enable_thinking": {1: 2}}, "expected a value of JSON"),
        ({"enable_thinking": ["a<|im_end|>"]}, r"spells the special token '<\|im_end\|>'"),
        ({"enable_thinking": "\ud800"}, "unpaired surrogate"),
    ],
)
def test_variables_without_effect_or_sense_are_refused(variables, words):
    tokenizer = own_template_tokenizer("qwen 3")
    with pytest.raises(ValueError, match=words):
        text_envs.make_env(prompts=[CHAT], tokenizer=tokenizer, chat_template_kwargs=variables)
    assert tokenizer.chat_template == TEMPLATES["qwen 3"]


def test_variables_need_a_readable_template():
    tokenizer = own_template_tokenizer("chatml", "{% if %}")
    with pytest.raises(ValueError, match="no valid template"):
        set_template_variables(tokenizer, {"x": 1})
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template that could read it"):
        set_template_variables(tokenizer, {"x": 1})
