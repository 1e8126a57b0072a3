"""Decoding in slots against `transformers` itself."""

import numpy as np
import pytest
import torch

from tests.helpers.architectures import make_family
from tests.helpers.models import ALL_MODELS, WORDS, make_gpt2, make_tokenizer, plain_log_probs
from textenv import LanguageModel
from textenv.lm.decoding import Decoder


@pytest.fixture(params=list(ALL_MODELS))
def lm(request):
    return LanguageModel(ALL_MODELS[request.param](), make_tokenizer(WORDS))


def test_refilled_slots_equal_a_plain_forward_pass(lm):
    """Slots at unequal positions, one of them refilled in mid-run, one empty."""
    rng = np.random.default_rng(0)
    decoder = Decoder(lm, num_slots=3, max_length=12)
    texts = [[1, 2, 3], [4], []]
    for step in range(8):
        if step == 4:
            texts[0] = [5, 5, 0, 1]
            decoder.reset(np.array([True, False, False]))
        tokens = np.full((3, 12), 8, dtype=np.int64)
        for slot, text in enumerate(texts):
            tokens[slot, : len(text)] = text
        logits = decoder.logits(tokens, np.array([len(text) for text in texts]))
        for slot, text in enumerate(texts[:2]):
            expected = plain_log_probs(lm, text)[-1]
            torch.testing.assert_close(logits[slot].float().log_softmax(-1), expected, atol=1e-5, rtol=0)
            text.append(int(rng.integers(0, 7)))


def test_a_changed_slot_is_read_again(lm):
    """One that is asked twice, too, or gets another text without a reset."""
    decoder = Decoder(lm, num_slots=1, max_length=8)
    for text in ([1, 2, 3], [1, 2, 3], [4, 4], [5]):
        tokens = np.full((1, 8), 8, dtype=np.int64)
        tokens[0, : len(text)] = text
        logits = decoder.logits(tokens, np.array([len(text)]))[0]
        torch.testing.assert_close(logits.float().log_softmax(-1), plain_log_probs(lm, text)[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("idle", "passes"), [(0, [8, 8, 8]), (1, [8, 8, 8, 1]), (2, [6, 6, 6, 2])])
def test_one_idle_slot_copies_no_cache(idle, passes):
    """Two steps, then the idle slots are filled while their neighbours go on; each pass with its rows."""
    lm, seen = LanguageModel(make_gpt2(), make_tokenizer(WORDS)), []
    decoder, tokens = Decoder(lm, num_slots=8, max_length=8), np.full((8, 8), 8, dtype=np.int64)
    tokens[:, :6] = np.random.default_rng(0).integers(0, 7, (8, 6))
    busy = np.arange(8) >= idle
    decoder.logits(tokens, np.full(8, 3))
    decoder.reset(~busy)
    hook = lm.model.transformer.wte.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    for length, waiting in ((4, 0), (5, 0), (6, 3)):
        logits = decoder.logits(tokens, np.where(busy, length, waiting))
        assert waiting or (logits[~busy] == 0).all()
    hook.remove()
    assert seen == passes
    for slot in range(8):
        expected = plain_log_probs(lm, tokens[slot, : 6 if busy[slot] else 3].tolist())[-1]
        torch.testing.assert_close(logits[slot].log_softmax(-1), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("idle", [1, 2])  # with one, the pass of the busy slots reads its first token, too
def test_equal_prompts_are_read_once_while_neighbours_go_on(idle):
    lm, seen = LanguageModel(make_gpt2(), make_tokenizer(WORDS)), []
    decoder, tokens = Decoder(lm, num_slots=16, max_length=8), np.full((16, 8), 8, dtype=np.int64)
    tokens[:, :6] = np.random.default_rng(0).integers(0, 7, (16, 6))
    first, second = 16 - 2 * idle, 16 - idle
    decoder.fraction_to_read_all = 1 - 2 * idle / 16
    decoder.logits(tokens, np.full(16, 3))
    begins = np.arange(16) >= first
    decoder.reset(begins)
    tokens[begins, :3] = [1, 2, 3]
    hook = lm.model.transformer.wte.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    logits = decoder.logits(tokens, np.where(begins, 3, 4))
    hook.remove()
    assert seen == [(16, 1), (1, 2)], "a prompt was read more than once"
    again = decoder.logits(tokens, np.where(begins, 4, 5))  # the copies have all of the cache
    for slot in (0, first, second):
        for length, found in ((3, logits[slot]), (4, again[slot])):
            expected = plain_log_probs(lm, tokens[slot, : length + (slot < first)].tolist())[-1]
            torch.testing.assert_close(found.log_softmax(-1), expected, atol=1e-5, rtol=0)


def test_greedy_decoding_equals_transformers_generate():
    model, tokenizer = make_gpt2(), make_tokenizer(WORDS)
    lm = LanguageModel(model, tokenizer)
    expected = model.generate(
        torch.tensor([[1, 2]]), attention_mask=torch.ones(1, 2, dtype=torch.long), max_new_tokens=10, do_sample=False,
        eos_token_id=None, pad_token_id=8,
    )[0].tolist()  # fmt: skip
    decoder, text = Decoder(lm, num_slots=1, max_length=12), [1, 2]
    while len(text) < 12:
        tokens = np.full((1, 12), 8, dtype=np.int64)
        tokens[0, : len(text)] = text
        text.append(int(decoder.logits(tokens, np.array([len(text)])).argmax()))
    assert text == expected


FAMILIES = ["gpt2", "llama", "bloom", "gemma3_text", "qwen3_moe", "mamba2", "jamba", "rwkv", "falcon_h1"]
SLOTS, LENGTH = 6, 20


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_serves_every_slot(family):
    """Two prompts of unequal length in six slots, then other tokens in each, and a prompt that another slot has."""
    lm = LanguageModel(make_family(family), make_tokenizer(WORDS))
    texts = np.random.default_rng(1).integers(0, len(WORDS), (SLOTS, LENGTH))
    texts[[1, 4], :7], texts[[3, 5], :5] = texts[0, :7], texts[2, :5]
    start = np.array([7, 7, 5, 5, 7, 5])
    with torch.no_grad():
        plain = lm.model(torch.from_numpy(texts)).logits.log_softmax(-1)
    decoder = Decoder(lm, num_slots=SLOTS, max_length=LENGTH)
    for step in range(8):
        length = start + step
        found = decoder.logits(texts, length).log_softmax(-1)
        torch.testing.assert_close(found, plain[np.arange(SLOTS), length - 1], atol=2e-5, rtol=0)
    decoder.reset(np.array([False, True, False, False, True, False]))
    texts[[1, 4]] = texts[2]
    length[[1, 4]] = 9
    found = decoder.logits(texts, length + (length > 9)).log_softmax(-1)
    with torch.no_grad():
        expected = lm.model(torch.from_numpy(texts[2:3, :9])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(found[[1, 4]], expected.expand(2, -1), atol=2e-5, rtol=0)


def test_a_prompt_of_a_group_is_read_once():
    lm = LanguageModel(make_gpt2(), make_tokenizer(WORDS))
    decoder = Decoder(lm, num_slots=8, max_length=32)
    read = []
    lm.model.transformer.wte.register_forward_pre_hook(lambda module, given: read.append(given[0].numel()))
    texts = np.random.default_rng(1).integers(0, len(WORDS), (2, 32)).repeat(4, axis=0)
    first = decoder.logits(texts, np.full(8, 16))
    assert read == [2 * 16] and torch.equal(first[0], first[3]) and not torch.equal(first[0], first[4])
    decoder.logits(texts, np.full(8, 17))
    assert read == [2 * 16, 8]
