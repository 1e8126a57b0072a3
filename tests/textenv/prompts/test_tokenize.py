"""Texts behind other texts: tokenizers that put a space before the first word of a text must not put it there."""

import numpy as np
import pytest

from algos import LMPolicy, evaluate
from tests.helpers.models import make_llama
from tests.helpers.sentencepiece import llama, t5
from textenv import TextVectorEnv
from textenv.lm.answers import written_answer
from textenv.lm.loading import load_tokenizer
from textenv.prompts.prompts import as_prompt
from textenv.prompts.tokenize import answer_ids, prompt_ids, reply_ids, text_ids

KINDS = ["metaspace", "prepend"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
CHAT = [{"role": "user", "content": "2+2?"}]


def rendered(tokenizer, chat, **options):
    return tokenizer.apply_chat_template(chat, return_dict=False, **options)


def same_as_given(completions, wanted):
    """Reward of 1 for the text, or the message, that the prompt's column has."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(text == answer) for text, answer in zip(texts, wanted, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first", "second"), [("2+2=", "4"), ("The film", " is good"), ("a:\n", "b c")])
def test_a_text_goes_on_as_one_text_does(kind, first, second):
    tokenizer = llama(kind)
    whole = tokenizer(first + second)["input_ids"]
    assert tokenizer(first)["input_ids"] + text_ids(second, tokenizer) == whole
    prompt = as_prompt(0, first)
    assert prompt_ids(prompt, tokenizer) + reply_ids(second, prompt, prompt_ids(prompt, tokenizer), tokenizer) == whole


@pytest.mark.parametrize(
    ("kind", "template"),
    [("metaspace", CHATML), ("metaspace", MISTRAL), ("metaspace", LLAMA_2), ("prepend", CHATML)],
)
def test_an_answer_in_a_chat_is_that_of_the_template(kind, template):
    """But of one whose answers follow a special token: there, "prepend" has one space more than the template."""
    tokenizer = llama(kind, template=template)
    start = rendered(tokenizer, CHAT, add_generation_prompt=True)
    whole = rendered(tokenizer, [*CHAT, {"role": "assistant", "content": "4"}])
    ids = answer_ids("4", tokenizer, is_message=True)
    assert whole[: len(start) + len(ids)] == start + ids
    prompt = as_prompt(0, CHAT)
    assert written_answer(prompt, "4", tokenizer, {}).ids[: len(start) + len(ids)] == start + ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_closes_no_message_twice(kind):
    tokenizer = llama(kind, template=LLAMA_2)
    whole = rendered(tokenizer, [*CHAT, {"role": "assistant", "content": "4"}, {"role": "user", "content": "and 1+1?"}])
    end = whole.index(tokenizer.eos_token_id) + 1
    assert reply_ids("and 1+1?", as_prompt(0, CHAT), whole[:end], tokenizer) == whole[end:]


def answers_seen(tokenizer, prompt, answer):
    """Texts that a reward gets, and how often the wanted one, when all turns must be this answer."""
    env = TextVectorEnv(
        prompts=[{"prompt": prompt, "wanted": answer}], reward=same_as_given, tokenizer=tokenizer, num_envs=2,
        max_new_tokens=12, allowed=[answer],
    )  # fmt: skip
    policy = LMPolicy(make_llama(len(tokenizer), max_position_embeddings=256), tokenizer)
    result = evaluate(env, policy, num_episodes=2)
    return {turn.completion for turn in env.scored_turns.turns}, result.returns


@pytest.mark.parametrize("answer", ["4", "yes", "so be it"])
@pytest.mark.parametrize("prompt", ["2+2=", CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("template", [CHATML, MISTRAL])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_sees_the_text_that_is_allowed(kind, template, prompt, answer):
    tokenizer = llama(kind, template=template)
    assert answers_seen(tokenizer, prompt, answer) == ({answer}, [1.0, 1.0])


@pytest.mark.parametrize("answer", ["4", "so be it"])
def test_an_answer_of_an_encoder_decoder_is_a_text_by_itself(answer):
    tokenizer = t5()
    assert [*text_ids(answer, tokenizer), tokenizer.eos_token_id] == tokenizer(answer)["input_ids"]
    assert answers_seen(tokenizer, "2+2=", answer) == ({answer}, [1.0, 1.0])


@pytest.mark.parametrize("prompt", ["2+2=", CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("kind", KINDS)
def test_generate_returns_what_a_reward_sees(kind, prompt):
    tokenizer = llama(kind, template=MISTRAL)
    policy = LMPolicy(make_llama(len(tokenizer), max_position_embeddings=256), tokenizer)
    env = TextVectorEnv(
        prompts=[prompt], reward=lambda completions: [0.0] * len(completions), tokenizer=tokenizer, max_new_tokens=8
    )
    evaluate(env, policy, num_episodes=1, deterministic=True)
    (turn,) = env.scored_turns.turns
    assert policy.generate([prompt], max_new_tokens=8, deterministic=True) == [turn.completion]
    if prompt == "2+2=":
        whole = tokenizer.decode(turn.prompt_ids + turn.completion_ids, skip_special_tokens=True)
        assert prompt + turn.completion == whole
    else:
        assert turn.completion == tokenizer.decode(turn.completion_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_was_begun_goes_on(kind):
    tokenizer = llama(kind, template=CHATML)
    chat = [*CHAT, {"role": "assistant", "content": "It is"}]
    env = TextVectorEnv(
        prompts=[chat], reward=lambda completions: [0.0] * len(completions), tokenizer=tokenizer, max_new_tokens=8
    )
    env.reset(seed=0)
    for token in [*text_ids(" 4", tokenizer), tokenizer.eos_token_id]:
        _, _, _, _, info = env.step(np.array([token]))
    assert info["completion"][0] == " 4"


@pytest.mark.parametrize("text", ["4", " good", "\n\nmore", "", "tab\tand space "])
def test_other_tokenizers_read_texts_as_before(text):
    tokenizer = load_tokenizer("embedded")
    assert text_ids(text, tokenizer) == tokenizer(text, add_special_tokens=False)["input_ids"]
