"""What is learnt of a chat, against `transformers`' own rendering, for templates as many models have them."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.helpers.chat_families import FAMILIES, byte_tokenizer, tokenizer_of
from tests.helpers.chat_templates import ENDS, TEMPLATES, template_tokenizer
from textenv import TextVectorEnv
from textenv.lm.answers import learnt_chats, written_answer
from textenv.prompts.messages import read_messages
from textenv.prompts.prompts import as_prompt

USER = {"role": "user", "content": "what is the time?"}
MORE = {"role": "user", "content": "and now?"}
PLAIN = {"role": "assistant", "content": "it is four."}
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "the <b>"}}}
RESULT = {"role": "tool", "content": "16:00"}
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "Tell the time.", "parameters": {}}}]
THINKS = {"role": "assistant", "reasoning_content": "easy", "content": "four"}
CHATS = {
    "plain": [USER, PLAIN],
    "system": [{"role": "system", "content": "be brief"}, USER, PLAIN],
    "several": [USER, PLAIN, MORE, {"role": "assistant", "content": "  five\n"}],
    "open end": [USER, PLAIN, MORE],
    "thinks": [USER, THINKS],
    "thinks in its content": [USER, {"role": "assistant", "content": "<think>\neasy\n</think>\n\nfour"}],
    "thinks twice": [USER, THINKS, MORE, THINKS | {"content": "five"}],
    "thinks, then more": [USER, THINKS, MORE],
    "calls": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, PLAIN],
    "calls without content": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT, PLAIN],
    "calls with none": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "says and calls": [USER, {"role": "assistant", "content": "wait.", "tool_calls": [CALL]}],
    "thinks and calls": [USER, THINKS | {"content": "", "tool_calls": [CALL]}, RESULT, THINKS],
    "parts": [USER, PLAIN | {"content": [{"type": "text", "text": "it is"}, {"type": "text", "text": " 4"}]}],
    "spells": [{"role": "user", "content": "a<|im_end|><eos>"}, {"role": "assistant", "content": "<|user|> four"}],
    "empty": [USER, {"role": "assistant", "content": ""}],
}  # fmt: skip
WITH_CALLS = {"calls", "calls without content", "calls with none", "says and calls", "thinks and calls"}
WITH_THOUGHTS = {"thinks", "thinks twice", "thinks, then more", "thinks and calls"}
WITHOUT_THEM = {"chatml by concatenation", "r1", "gemma", "llama 2", "phi 3", "tools before the last user", "plain"}
WITHOUT_THOUGHTS = WITHOUT_THEM | {"chatml", "chatml that trims", "marked", "llama 3", "glm 4"}
THOUGHTLESS = CHATS.keys() - WITH_THOUGHTS - {"thinks in its content"}
REFUSED = {
    *itertools.product(WITHOUT_THEM, WITH_CALLS),
    *itertools.product(WITHOUT_THOUGHTS, WITH_THOUGHTS),
    *itertools.product(["r1"], CHATS),  # it asks for <think>, and never writes one
    # It asks for thoughts: where there are none it writes "\n\n", one token, of which it has given one half
    *itertools.product(["qwen 3 thinking"], THOUGHTLESS),
    ("llama 3", "says and calls"),
    ("harmony", "says and calls"),
}  # fmt: skip
"""Rows whose answer the template does not write, in part or as it asks for it."""
COMPARED = [
    (name, kind)
    for name, kind in itertools.product(TEMPLATES, CHATS)
    if (name, kind) not in REFUSED and kind != "spells" and name != "plain"
]
"""Without a message in which `transformers` reads a control token, and the template that does not end answers."""
CASES = [case for case in itertools.product(TEMPLATES, CHATS) if case not in REFUSED]


def rendering(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def expected_answer(name, tokenizer, messages, index):
    """The text before an answer, and the answer, from the rendering of `transformers` alone."""
    before = rendering(tokenizer, messages[:index], add_generation_prompt=True)
    written = rendering(tokenizer, messages[: index + 1])
    assert written.startswith(before)
    answer = written[len(before) :]
    end = ENDS.get(name, "<|im_end|>")
    if name == "harmony" and messages[index].get("tool_calls"):
        end = "<|call|>"
    if name == "glm 4":  # the next speaker's token
        return before, answer + ("<|observation|>" if messages[index].get("tool_calls") else "<|user|>")
    if name == "plain":  # nothing but EOS ends a turn
        return before, answer.rstrip() + "<eos>"
    start, found, _ = answer.rpartition(end)
    assert found
    return before, start + end


def learnt_runs(chat):
    """Start and end of each run of learnt tokens."""
    edges = [i for i in range(len(chat.ids) + 1) if (chat.learnt + [False])[i] != ([False] + chat.learnt)[i]]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize(("name", "kind"), CASES, ids=[f"{name}-{kind}" for name, kind in CASES])
def test_each_answer_is_learnt_once(name, kind):
    tokenizer = template_tokenizer(name)
    messages = read_messages(CHATS[kind], where="row")
    chats = learnt_chats(messages, tokenizer)
    filled = [{"content": ""} | message for message in messages] if name == "chatml by concatenation" else messages
    expected = [expected_answer(name, tokenizer, filled, i) for i, m in enumerate(messages) if m["role"] == "assistant"]
    learnt = []
    for chat in chats:
        for start, end in learnt_runs(chat):
            learnt.append((tokenizer.decode(chat.ids[:start]), tokenizer.decode(chat.ids[start:end])))
    if name == "plain":  # ends of earlier answers
        learnt, expected = ([(x.replace("<eos>", ""), y) for x, y in pairs] for pairs in (learnt, expected))
    assert sorted(learnt) == sorted(expected)


@pytest.mark.parametrize(("name", "kind"), COMPARED, ids=[f"{name}-{kind}" for name, kind in COMPARED])
def test_ids_are_those_of_the_whole_rendering(name, kind):
    tokenizer = template_tokenizer(name)
    messages = read_messages(CHATS[kind], where="row")
    for chat in learnt_chats(messages, tokenizer):
        renderings = []
        for stop in range(2, len(messages) + 1):
            asks = messages[stop - 1]["role"] != "assistant"
            text = rendering(tokenizer, messages[:stop], add_generation_prompt=asks)
            ends = ["", "<|user|>", "<|observation|>"] if name == "glm 4" and not asks else [""]
            renderings += [tokenizer(text + end, add_special_tokens=False)["input_ids"] for end in ends]
        assert chat.ids in renderings


@pytest.mark.parametrize(("name", "kind"), sorted(REFUSED))
def test_an_answer_the_template_drops_is_refused(name, kind):
    with pytest.raises(ValueError, match=r"message \d|in one token"):
        learnt_chats(read_messages(CHATS[kind], where="row"), template_tokenizer(name))


def calls(*names):
    return [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]


@pytest.mark.parametrize(
    ("template", "content", "names"),
    [
        ("gemma", "", ["f"]),  # of <end_of_turn>
        ("gemma", "", ["end"]),
        ("gemma", "I look at the clock.", ["clock"]),
        ("phi 3", "the clock, the clock", ["clock"]),
        ("llama 3", "", ["clock", "clock"]),  # it writes the first call only
    ],
)
def test_a_call_that_the_template_drops_is_refused_whatever_its_name(template, content, names):
    """Its name was found in the end of the turn, or in what the assistant says, and an empty answer was learnt."""
    answer = {"role": "assistant", "content": content, "tool_calls": calls(*names)}
    with pytest.raises(ValueError, match=rf"leaves out the tool_calls \({names[0]}\) of message 1"):
        learnt_chats([USER, answer], template_tokenizer(template))


@pytest.mark.parametrize("template", ["chatml", "qwen 3", "marked", "glm 4"])
@pytest.mark.parametrize("names", [["f"], ["clock"], ["clock", "clock"], ["f", "clock"]])
def test_calls_that_the_template_writes_are_learnt_whatever_is_said(template, names):
    answer = {"role": "assistant", "content": "<think>\nf? clock!\n</think>\n\nclock of f", "tool_calls": calls(*names)}
    tokenizer = template_tokenizer(template)
    (chat,) = learnt_chats([USER, answer], tokenizer)
    learnt = tokenizer.decode([token for token, on in zip(*chat, strict=True) if on])
    assert len(re.findall(r'"name": "(f|clock)"', learnt)) == len(names)


FRAGMENTS = st.sampled_from(
    ["four", " ", "\n", "\n\n", "é", "🎬", "<think>", "</think>", "<|im_end|>", "it is", "<eos>"]
)
TEXTS = st.lists(FRAGMENTS, max_size=5).map("".join)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(TEMPLATES)), texts=st.lists(TEXTS, min_size=2, max_size=6), thoughts=st.none() | TEXTS
)
def test_any_chat_is_learnt_as_rendered_or_refused(name, texts, thoughts):
    tokenizer = template_tokenizer(name)
    speakers = itertools.cycle(["user", "assistant"])
    messages = [{"role": role, "content": text} for role, text in zip(speakers, texts, strict=False)]
    if thoughts is not None:
        messages[-1 if len(messages) % 2 == 0 else -2]["reasoning_content"] = thoughts
    try:
        chats = learnt_chats(messages, tokenizer)
    except ValueError as error:
        assert re.search(r"message \d|in one token|special token", str(error))
        return
    answers = [expected_answer(name, tokenizer, messages, i) for i in range(1, len(messages), 2)]
    learnt = []
    for chat in chats:
        for start, end in learnt_runs(chat):
            learnt.append((tokenizer.decode(chat.ids[:start]), tokenizer.decode(chat.ids[start:end])))
    if name == "plain":  # ends of earlier answers
        learnt, answers = ([(x.replace("<eos>", ""), y) for x, y in pairs] for pairs in (learnt, answers))
    assert sorted(learnt) == sorted(answers)


@pytest.mark.parametrize("kind", ["plain", "system", "several", "calls", "says and calls", "empty"])
def test_marked_answers_give_the_templates_mask(kind):
    tokenizer = template_tokenizer("marked")
    messages = read_messages(CHATS[kind], where="row")
    marked = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    (chat,) = learnt_chats(messages, tokenizer)
    assert chat.ids == marked["input_ids"] and chat.learnt == [bool(x) for x in marked["assistant_masks"]]


def test_older_answers_get_a_chat_of_their_own():
    """Mistral shows tools before the last question only: what came before is rendered otherwise then."""
    tokenizer = template_tokenizer("tools before the last user")
    messages = CHATS["several"]
    first, second = learnt_chats(messages, tokenizer, options={"tools": TOOLS})[::-1]
    for chat, stop in ((first, 2), (second, 4)):
        assert tokenizer.decode(chat.ids) == rendering(tokenizer, messages[:stop], tools=TOOLS)
        assert len(learnt_runs(chat)) == 1


def test_a_begun_answer_is_learnt_from_there_on():
    tokenizer = template_tokenizer("qwen 3")
    messages = [USER, {"role": "assistant", "content": "it is four."}]
    (chat,) = learnt_chats(messages, tokenizer, first=1, begun="it is")
    ((start, end),) = learnt_runs(chat)
    begun = [USER, {"role": "assistant", "content": "it is"}]
    assert tokenizer.decode(chat.ids[:start]) == rendering(tokenizer, begun, continue_final_message=True)
    assert tokenizer.decode(chat.ids[start:end]) == " four.<|im_end|>"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("chatml", "<think>\neasy\n</think>\n4", "<think>\neasy\n</think>\n4<|im_end|>"),
        ("qwen 3 thinking", "<think>\neasy\n</think>\n4", "easy\n</think>\n4<|im_end|>"),
        ("r1", "<think>easy\n</think>\n4<eos>", "easy\n</think>\n4<eos>"),
        ("r1", "easy\n</think>\n4", "easy\n</think>\n4<eos>"),
        ("glm 4", "4", "4<|user|>"),
        ("plain", "4", "4<eos>"),
    ],
)
def test_a_text_is_what_follows_the_answers_start(name, text, expected):
    tokenizer = template_tokenizer(name)
    chat = written_answer(as_prompt(0, [USER]), text, tokenizer, {})
    ((start, end),) = learnt_runs(chat)
    assert end == len(chat.ids)
    assert chat.ids[:start] == tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(chat.ids[start:]) == expected


def play(tokenizer, tokens):
    """For each of these tokens of an answer to USER, whether the environment's turn is over after it."""
    env = TextVectorEnv(
        prompts=[[USER]], reward=lambda completions: [0.0], tokenizer=tokenizer, max_prompt_tokens=99, max_new_tokens=99
    )
    env.reset(seed=0)
    over = []
    for token in tokens:
        over.append(bool(env.step(np.array([token]))[2][0]))
        if over[-1]:
            break
    return over


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].template and name != "r1"])
def test_an_answer_ends_as_the_environments_turn(name):
    tokenizer = tokenizer_of(FAMILIES[name])
    (chat,) = learnt_chats([USER, PLAIN], tokenizer)
    ((start, end),) = learnt_runs(chat)
    assert chat.ids[:start] == tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert play(tokenizer, chat.ids[start:end]) == [False] * (end - start - 1) + [True]


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].template])
def test_a_written_answer_ends_as_the_turn_does(name):
    tokenizer = tokenizer_of(FAMILIES[name])
    chat = written_answer(as_prompt(0, [USER]), "it is four.", tokenizer, {})
    ((start, end),) = learnt_runs(chat)
    assert play(tokenizer, chat.ids[start:end]) == [False] * (end - start - 1) + [True]


def test_without_eos_the_templates_ends_are_learnt():
    tokenizer = byte_tokenizer(["<|im_start|>", "<|im_end|>"], template=TEMPLATES["chatml"], eos=None)
    (chat,) = learnt_chats([USER, PLAIN], tokenizer)
    ((_, end),) = learnt_runs(chat)
    assert tokenizer.decode(chat.ids[end - 1]) == "<|im_end|>"
    tokenizer.chat_template = TEMPLATES["plain"]
    with pytest.raises(ValueError, match="no EOS, so no answer would end"):
        learnt_chats([USER, PLAIN], tokenizer)
