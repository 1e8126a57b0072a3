"""Format rewards see the whole answer: tags that the chat template opens, and tags that are special tokens."""

import numpy as np
import pytest

from algos import LMPolicy
from tests.helpers.chat_families import CHATML, R1, byte_tokenizer, scripted_model
from textenv import TextVectorEnv
from textenv.prompts.plain_text import opened_tag, plain_text, written_tags
from textenv.rewards import format_tags, matches

CHAT = [{"role": "user", "content": "2+2?"}]
OPENED = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
EMPTY = "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
THINKING = OPENED.replace("{{ m['content'] }}", EMPTY + "{{ m['content'] }}")
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
RIGHT = "<think>2 and 2</think>\n<answer>4</answer>"
REST = RIGHT.removeprefix("<think>")


def tokenizer_with(template, *, special=(), added=()):
    marks = ["<|im_start|>", *special]
    return byte_tokenizer(marks, added, template, eos="<|im_end|>", bos="<|begin|>")


def score(tokenizer, text, reward=None, prompt=CHAT):
    """The reward of an answer in an environment, and the text that the reward got."""
    reward = format_tags("think", "answer") if reward is None else reward
    env = TextVectorEnv(prompts=[prompt], reward=reward, tokenizer=tokenizer, max_prompt_tokens=100, max_new_tokens=100)
    env.reset(seed=0)
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
        _, rewards, _, _, info = env.step(np.array([token]))
    return rewards[0], info["completion"][0]


@pytest.mark.parametrize("template", [OPENED, THINKING, R1])
@pytest.mark.parametrize("kind", ["text", "added", "special"])
def test_a_tag_the_template_opens_is_the_answers(template, kind):
    tokenizer = tokenizer_with(template, **({} if kind == "text" else {kind: TAGS}))
    assert score(tokenizer, REST) == (1, REST)
    assert score(tokenizer, RIGHT) == (0, RIGHT), "a doubled tag"
    assert score(tokenizer, "<answer>4</answer>")[0] == 0


@pytest.mark.parametrize("kind", ["text", "added", "special"])
def test_tags_reach_the_reward_as_any_token(kind):
    tokenizer = tokenizer_with(CHATML, **({} if kind == "text" else {kind: TAGS}))
    assert score(tokenizer, RIGHT) == (1, RIGHT)
    assert score(tokenizer, REST)[0] == 0
    assert score(tokenizer, RIGHT, matches("^<think>.*</answer>$")) == (0, RIGHT), "a line break stops the dot"
    assert score(tokenizer, RIGHT, matches("(?s)^<think>.*</answer>$")) == (1, RIGHT)


def test_a_prompt_may_begin_the_answer():
    reward = format_tags("think", "answer")
    assert score(byte_tokenizer(), REST, prompt="2+2=<think>")[0] == 1
    assert score(byte_tokenizer(), REST, prompt="2+2=<think> (in this tag)")[0] == 0
    begun = [*CHAT, {"role": "assistant", "content": "<think>2 and"}]
    answer = [{"role": "assistant", "content": " 2</think><answer>4</answer>"}]
    assert reward(prompts=[begun, CHAT], completions=[answer, answer]) == [1, 0]


def test_opened_tags_are_told_at_construction(caplog):
    for template, said in ((OPENED.replace("think", "thought"), True), (CHATML, False)):
        caplog.clear()
        score(tokenizer_with(template), "4")
        assert ("begins each answer with <thought>" in caplog.text) is said


def test_opened_tags_are_told_of_a_later_chat_too(caplog):
    tokenizer = tokenizer_with(OPENED.replace("think", "muse"))
    arguments = dict(reward=lambda completions: [0.0], tokenizer=tokenizer, max_prompt_tokens=100)
    TextVectorEnv(prompts=["a text", "another"], **arguments)
    assert "begins each answer" not in caplog.text
    TextVectorEnv(prompts=["a text", CHAT], **arguments)
    assert "begins each answer with <muse>" in caplog.text


@pytest.mark.parametrize(
    ("template", "tag"),
    [
        (OPENED, "<think>"),
        (THINKING, "<think>"),
        (R1, "<think>"),
        (CHATML, ""),
        (None, ""),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>", ""),
        (OPENED.replace("<think>", "[THINK]"), "[THINK]"),
        (OPENED.replace("<think>\n", "<think>\n\n</think>"), ""),
        ("{{ raise_exception('no') }}", ""),
    ],
)
def test_the_opened_tag_ends_the_prompt(template, tag):
    assert opened_tag(tokenizer_with(template)) == tag


def test_texts_show_tags_but_no_other_special_tokens():
    special = ["<think>", "</think>", "[THINK]", "[/THINK]", "<unpaired>", "<|im_start|>", "[INST]", "[/INST]", "</s>"]
    template = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    tokenizer = byte_tokenizer(special, (), template, bos="<s>")
    assert {*tokenizer.convert_ids_to_tokens([*written_tags(tokenizer)])} == {*special[:4]}
    ids = tokenizer("".join(f"{token}é" for token in ["<s>", "<eos>", *special]), add_special_tokens=False)["input_ids"]
    assert plain_text(ids, tokenizer) == "éé<think>é</think>é[THINK]é[/THINK]" + 6 * "é"
    tokenizer.chat_template = None
    assert "[INST]é[/INST]é" in plain_text(ids, tokenizer)


def test_without_tags_a_text_is_transformers_own():
    tokenizer = byte_tokenizer(["<think>", "<a>", "<|im_start|>"])
    ids = tokenizer("<think>é<a> 。<eos><|im_start|>x", add_special_tokens=False)["input_ids"]
    assert plain_text(ids, tokenizer) == tokenizer.decode(ids, skip_special_tokens=True) == "é 。x"


def test_generate_shows_the_tags_too():
    tokenizer = tokenizer_with(CHATML, special=["<think>", "</think>"])
    ids = tokenizer("\n<think>a</think><|im_end|>", add_special_tokens=False)["input_ids"]
    policy = LMPolicy(scripted_model(tokenizer, *zip(ids, ids[1:], strict=False)), tokenizer)
    assert policy.generate([CHAT], deterministic=True) == ["<think>a</think>"]
