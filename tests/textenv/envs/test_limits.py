"""Stop texts: a turn ends with the first token after which its text has one, whatever the tokenizer."""

import itertools
import random

import numpy as np
import pytest
from transformers import ByT5Tokenizer

from algos import LMPolicy
from tests.helpers.chat_families import CHATML, byte_tokenizer, scripted_model
from tests.helpers.models import WORDS
from tests.helpers.text_envs import EOS, GOOD, prompt_env, zero
from textenv import TextVectorEnv
from textenv.envs.limits import Limits, StopConditions

SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool>"]
PIECES = ["a", "b", "\n", " ", "é", "。", "😀", "user", *SPECIAL]
STOPS = ["。", "é", "😀", "a。", "。\n", "é b", "b\n\n", "user\n"]
MARKED = ["<|im_start|>user", "<tool>。", "<|im_start|>", "a<tool>", "é<tool>b", "<tool><|im_start|>", "<tool>\n"]


def byt5():
    """A token for each byte; a part of a longer character decodes to nothing."""
    return ByT5Tokenizer(extra_ids=0, additional_special_tokens=SPECIAL)


TOKENIZERS = {"byte-level": lambda: byte_tokenizer(SPECIAL), "byt5": byt5}


def answer(tokenizer, stop, ids):
    """Number of tokens until the turn ends, the completion and the reason."""
    env = TextVectorEnv(prompts=["Hi"], reward=zero, tokenizer=tokenizer, max_new_tokens=len(ids) + 1, stop=[stop])
    env.reset(seed=0)
    for count, token in enumerate(ids, 1):
        _, _, terminated, _, info = env.step(np.array([token]))
        if terminated[0]:
            return count, info["completion"][0], info["end_reason"][0]
    return None


@pytest.mark.heavy
@pytest.mark.parametrize("stop", STOPS + MARKED)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_turn_ends_at_the_first_stop_text(name, stop):
    tokenizer = TOKENIZERS[name]()
    chance = random.Random(0)
    ended = 0
    for _ in range(25):
        text = "".join(chance.choices([*PIECES, stop], k=8))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prefixes = [ids[:count] for count in range(1, len(ids) + 1)]
        hidden = stop in STOPS  # a text without special tokens is looked for in a text without them
        decoded = [tokenizer.decode(prefix, skip_special_tokens=hidden) for prefix in prefixes]
        first = next((count for count, seen in enumerate(decoded, 1) if stop in seen), None)
        found = answer(tokenizer, stop, ids)
        if first is None:
            assert found is None, text
            continue
        before = decoded[first - 1].partition(stop)[0]
        for token in SPECIAL:
            before = before.replace(token, "")
        assert found == (first, before, "stop"), text
        ended += 1
    assert ended >= 5


def test_part_of_a_character_may_complete_a_stop_text():
    """ByT5 decodes it to nothing."""
    tokenizer = byt5()
    ends = StopConditions(tokenizer, ["。"])
    assert ends.may_complete[tokenizer("。", add_special_tokens=False)["input_ids"]].all()
    assert not ends.may_complete[tokenizer("ab", add_special_tokens=False)["input_ids"]].any()


@pytest.mark.parametrize("stop", ["<|im_start|>user", "<|im_start|>", "user", "r\n"])
def test_generate_ends_at_stop_texts_too(stop):
    tokenizer = byte_tokenizer(SPECIAL, template=CHATML, eos="<eos>")
    words = tokenizer("\na<|im_start|>user\n", add_special_tokens=False)["input_ids"]
    policy = LMPolicy(scripted_model(tokenizer, *itertools.pairwise(words[:-1])), tokenizer, stop=[stop])
    chat = [{"role": "user", "content": "Hi"}]
    count, completion, _ = answer(tokenizer, stop, words[1:])
    assert policy.generate([chat], deterministic=True, max_new_tokens=30) == [completion]
    assert policy.generate([chat], deterministic=True, max_new_tokens=count - 1) != [completion] or "<" in stop


def test_a_closing_tag_token_ends_a_turn_unshown():
    tokenizer = byte_tokenizer(["<answer>", "</answer>"])
    ids = tokenizer("<answer>4</answer>", add_special_tokens=False)["input_ids"]
    assert answer(tokenizer, "</answer>", ids) == (3, "<answer>4", "stop")
    assert answer(tokenizer, "4</answer>", ids) == (3, "<answer>", "stop")


def test_stops_end_a_turn_and_pay():
    env = prompt_env(num_envs=1, stop=[GOOD, "d c"])
    for actions, reason, text in (([0, GOOD], "stop", "a"), ([3, 2], "stop", ""), ([0, EOS], "eos", "a")):
        env.reset(seed=0)
        for token in actions:
            _, _, terminated, truncated, info = env.step(np.array([token]))
        assert (terminated[0], truncated[0], info["end_reason"][0]) == (True, False, reason)
        assert info["completion"][0].replace("good", "").strip() == text


def test_a_special_stop_text_is_found_by_its_id():
    env = prompt_env(num_envs=1, stop=["<pad>"])
    env.reset(seed=0)
    _, _, terminated, _, info = env.step(np.array([WORDS.index("<pad>")]))
    assert terminated[0] and info["end_reason"][0] == "stop"


def test_a_stop_text_that_was_passed_over_cuts_nothing():
    seen = []
    env = prompt_env(["a"], 1, lambda prompts, completions, **_: seen.extend(completions) or [0.0], stop=["."],
                   min_new_tokens=3)  # fmt: skip
    for answer in ([0, 4, 1, 2, EOS], [0, 4, 1, 4]):
        env.reset(seed=0)
        for token in answer:
            _, _, terminated, _, info = env.step(np.array([token]))
        assert terminated[0]
    assert [text.split() for text in seen] == [["a", ".", "b", "c"], ["a", ".", "b"]]


def test_a_passed_stop_text_ends_no_later_turn():
    """ "good" comes too early and is passed over; "bad" ends with the same letter and completes nothing."""
    good, bad = WORDS.index("good"), WORDS.index("bad")
    env = prompt_env(["a"], 1, lambda prompts, completions, **_: [0.0], stop=["good"], min_new_tokens=2)
    env.reset(seed=0)
    ends = [env.step(np.array([token]))[2][0] for token in (good, 0, bad, 1, good)]
    assert ends == [False, False, False, False, True]


@pytest.mark.parametrize("wrong", [64.0, "64", True, 0])
def test_a_length_is_an_integer(wrong):
    with pytest.raises(ValueError, match=rf"max_length is {wrong!r}, expected an integer of at least 1"):
        Limits(max_length=wrong)
    assert Limits(max_length=np.int64(64)).width == 64
