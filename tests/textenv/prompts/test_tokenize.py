"""Texts that go on: tokenizers put spaces and special tokens around a text, which must not stand in its middle."""

import numpy as np
import pytest
import torch

from algos import LMPolicy, evaluate
from tests.helpers.models import WORDS, make_gpt2, make_llama, make_tokenizer
from tests.helpers.sentencepiece import llama, t5
from textenv import TextVectorEnv
from textenv.lm.answers import written_answer
from textenv.lm.loading import load_tokenizer
from textenv.prompts.prompts import as_prompt
from textenv.prompts.tokenize import answer_ids, ending_ids, prompt_ids, reply_ids, text_ids

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


# --- tokens that end a finished text ------------------------------------------------------------------------------


def bert():
    """BERT's own tokenizer, with a small vocabulary: it has no EOS, and writes ``[CLS] text [SEP]``."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "this", "film", "was", "good", "##ly"]
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)})


def test_a_prompt_of_wordpiece_goes_on():
    tokenizer = bert()
    whole = tokenizer("this film was good")["input_ids"]
    prompt = prompt_ids(as_prompt(0, "this film was"), tokenizer)
    assert [*prompt, *text_ids("good", tokenizer), tokenizer.sep_token_id] == whole
    assert ending_ids(tokenizer) == [tokenizer.sep_token_id]

    # In an environment, and where a policy generates: as a model of transformers goes on
    model = make_gpt2(len(tokenizer), bos_token_id=None, eos_token_id=None, pad_token_id=0)
    policy = LMPolicy(model, tokenizer)
    env = TextVectorEnv(
        prompts=["this film was"], reward=lambda completions: [0.0] * len(completions), tokenizer=tokenizer
    )
    observation, _ = env.reset(seed=0)
    assert observation["tokens"][0, : observation["length"][0, 0]].tolist() == prompt
    found = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6)[0]
    text = tokenizer.decode(found, skip_special_tokens=True)
    completion = text.removeprefix(tokenizer.decode(prompt, skip_special_tokens=True))
    assert policy.generate(["this film was"], max_new_tokens=6, deterministic=True) == [completion]


def test_a_tokenizer_without_eos_ends_no_turn_by_itself():
    """Neither does `generate` of transformers: what ends its texts stands in ``generation_config``."""
    tokenizer = bert()
    model = make_gpt2(len(tokenizer), bos_token_id=None, eos_token_id=None, pad_token_id=0)
    assert LMPolicy(model, tokenizer).ends.ids == []
    model.generation_config.eos_token_id = tokenizer.sep_token_id
    assert LMPolicy(model, tokenizer).ends.ids == [tokenizer.sep_token_id]


@pytest.mark.parametrize(
    ("prefix", "suffix", "eos", "ending"),
    [
        ("", "d", None, "d"),
        ("c", "d", "<eos>", "d"),
        ("", "d c", "<eos>", "d c"),  # XLNet
        ("d", "d", None, "d"),  # one token on both sides
        ("", ".", None, "."),  # an ordinary token
        ("c", "<eos>", "<eos>", "<eos>"),
        ("<eos>", "", "<eos>", ""),  # OPT
        ("c", "", "<eos>", ""),
        ("", "", "<eos>", ""),
    ],
)
@pytest.mark.parametrize("text", ["a", "b a", "good bad .", "b a d"])
def test_a_prompt_ends_without_the_end_of_a_finished_text(prefix, suffix, eos, ending, text):
    tokenizer = make_tokenizer(WORDS, eos=eos, prefix=prefix, suffix=suffix)
    whole = tokenizer(text)["input_ids"]
    end = tokenizer.convert_tokens_to_ids(ending.split())
    assert ending_ids(tokenizer) == end
    assert prompt_ids(as_prompt(0, text), tokenizer) + end == whole


def test_a_tokenizer_of_other_letters_has_its_ending():
    words = ["0", "1", "+", "=", "<end>"]
    tokenizer = make_tokenizer(words, eos=None, pad=None, suffix="<end>")
    assert ending_ids(tokenizer) == [4]
    assert prompt_ids(as_prompt(0, "1 + 1 ="), tokenizer) == [1, 2, 1, 3]


def test_a_language_after_eos_stays_in_an_encoders_prompt():
    """mBART; the language may change later."""
    tokenizer = make_tokenizer(WORDS, suffix="<eos> d")
    assert ending_ids(tokenizer) == []
    assert prompt_ids(as_prompt(0, "a b"), tokenizer) == tokenizer("a b")["input_ids"]


@pytest.mark.parametrize("text", ["4", " good", "\n\nmore", "", "tab\tand space "])
def test_other_tokenizers_read_texts_as_before(text):
    tokenizer = load_tokenizer("embedded")
    assert text_ids(text, tokenizer) == tokenizer(text, add_special_tokens=False)["input_ids"]
