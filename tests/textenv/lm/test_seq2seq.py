"""Encoder-decoder models (T5, BART) against `transformers`: scoring, decoding in slots, the prompt's EOS."""

import numpy as np
import pytest
import torch
import transformers
from tensordict import TensorDict

from tests.helpers.models import SEQ2SEQ, WORDS, make_bart, make_t5, make_tokenizer
from textenv import LanguageModel
from textenv.lm.seq2seq import Seq2SeqDecoder

EOS, PAD = 7, 8
STARTS = {"t5": [PAD], "bart": [EOS]}


SIZES = dict(
    vocab_size=12, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, init_std=0.3, bos_token_id=7, eos_token_id=7,
    pad_token_id=8, decoder_start_token_id=7,
)  # fmt: skip
T5_SIZES = dict(
    vocab_size=12, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, eos_token_id=7, pad_token_id=8,
    decoder_start_token_id=8, num_experts=2,
)  # fmt: skip
GEMMA = dict(
    vocab_size=12, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, sliding_window=4, max_position_embeddings=64, initializer_range=0.2,
    final_logit_softcapping=2.0, bos_token_id=7, eos_token_id=7, pad_token_id=8,
)  # fmt: skip
RELATIVES = {
    "MarianMTModel": SIZES, "MBartForConditionalGeneration": SIZES, "PegasusForConditionalGeneration": SIZES,
    "UMT5ForConditionalGeneration": T5_SIZES, "SwitchTransformersForConditionalGeneration": T5_SIZES,
    "T5GemmaForConditionalGeneration": dict(
        encoder=GEMMA, decoder=GEMMA, vocab_size=12, decoder_start_token_id=7, eos_token_id=7, pad_token_id=8
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELATIVES)
def test_relatives_decode_with_a_right_cache(name):
    """With sliding windows and a cap on the logits in T5Gemma, which by default leaves out <pad> in an answer."""
    kind = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = LanguageModel(kind(kind.config_class(**RELATIVES[name])).eval(), make_tokenizer(WORDS))
    decoder, tokens = Seq2SeqDecoder(lm, num_slots=2, max_length=12), np.random.default_rng(0).integers(0, 9, (2, 12))
    assert decoder.cached
    hidden = lm.hidden(torch.from_numpy(tokens), torch.tensor([3, 2]))
    for length in (3, 4, 5, 9, 12):
        found = decoder.logits(tokens, np.array([length, length - 1])).log_softmax(-1)
        plain = lm.logits(hidden[[0, 1], [length - 1, length - 2]]).log_softmax(-1)
        torch.testing.assert_close(found, plain, atol=2e-5, rtol=0)


@pytest.fixture(params=[(name, ends) for name in SEQ2SEQ for ends in (False, True)], ids=str)
def case(request):
    """A language model, the start of its decoder's text, and the end of its encoder's."""
    name, ends = request.param
    return LanguageModel(SEQ2SEQ[name](), make_tokenizer(WORDS, ends=ends)), STARTS[name], [EOS] * ends


def plain_log_probs(lm, prompt, answer):
    """What `transformers` says after each token of the decoder's text, over the tokenizer's ids: ``[D, 9]``."""
    with torch.no_grad():
        logits = lm.model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([answer])).logits
    return logits[0, :, : len(WORDS)].log_softmax(-1)


def test_padded_rows_score_as_each_alone(case):
    """Prompts and answers of unequal lengths; the third row has an answer in two turns, with a reply between them."""
    lm, start, end = case
    rows, prompt_length = np.random.default_rng(0).integers(0, 7, (3, 9)), [1, 4, 2]
    mask = torch.arange(8) >= torch.tensor(prompt_length)[:, None] - 1
    mask[2, 4:6] = False
    mask[1, 6:] = False
    rows = torch.from_numpy(rows)
    rollout = TensorDict({"observation": rows[:, :-1], "action": rows[:, 1:], "mask": mask}, batch_size=[3, 8])
    log_prob, entropy, _ = lm.evaluate(rollout)
    for row, length, found, others, here in zip(rows.tolist(), prompt_length, log_prob, entropy, mask, strict=True):
        expected = plain_log_probs(lm, row[:length] + end, start + row[length:-1])
        chosen = expected.gather(1, torch.tensor(row[length:])[:, None])[:, 0]
        here = here[length - 1 :]
        torch.testing.assert_close(found[length - 1 :][here], chosen[here], atol=2e-5, rtol=0)
        spread = -(expected.exp() * expected).sum(-1)
        torch.testing.assert_close(others[length - 1 :][here], spread[here], atol=2e-5, rtol=0)


def test_refilled_slots_equal_a_plain_pass(case):
    """Slots at unequal positions: refilled after `reset`, or without it, given replies, asked twice, and empty."""
    lm, start, end = case
    decoder, rng = Seq2SeqDecoder(lm, num_slots=4, max_length=14), np.random.default_rng(0)
    assert decoder.cached
    texts, prompts = [[1, 2, 3], [4], [], [6, 2]], [3, 1, 0, 2]
    for step in range(9):
        if step == 3:
            texts[0], prompts[0] = [1, 2, 3, 4, 5], 5  # begins as the text before it
            decoder.reset(np.array([True, False, False, False]))
        if step == 4:
            texts[1], prompts[1] = [5, 5], 2  # without `reset`: another prompt
        if step == 5:
            texts[3] += [0, 1]
        tokens = np.full((4, 14), PAD, dtype=np.int64)
        for slot, text in enumerate(texts):
            tokens[slot, : len(text)] = text
        for _ in range(1 + (step == 6)):
            logits = decoder.logits(tokens, np.array([len(text) for text in texts]))
        for slot, (text, length) in enumerate(zip(texts, prompts, strict=True)):
            if not length:
                assert (logits[slot] == 0).all()
                continue
            expected = plain_log_probs(lm, text[:length] + end, start + text[length:])[-1]
            torch.testing.assert_close(logits[slot].log_softmax(-1), expected, atol=2e-5, rtol=0)
            text.append(int(rng.integers(0, 7)))


def test_slots_that_began_together_are_read_together(case):
    lm = case[0]
    decoder, seen = Seq2SeqDecoder(lm, num_slots=6, max_length=8), []
    tokens = np.random.default_rng(0).integers(0, 7, (6, 8))
    for part in ("get_encoder", "get_decoder"):
        module = getattr(lm.model, part)()
        module.register_forward_pre_hook(
            lambda m, a, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True
        )
    for length in (3, 4, 5):
        decoder.logits(tokens, np.full(6, length))
    width = 3 + len(lm.seq2seq.prompt_end)
    assert seen == [(6, width), (6, 1), (6, 1), (6, 1)]


def test_a_cache_that_gives_other_logits_is_not_used(caplog):
    lm = LanguageModel(make_t5(), make_tokenizer(WORDS))

    def forgetful(module, given, inputs):
        if inputs.get("past_key_values") is not None and inputs["past_key_values"].get_seq_length():
            inputs["hidden_states" if "hidden_states" in inputs else "input_ids"] = torch.zeros_like(
                inputs["input_ids"]
            )
        return given, inputs

    lm.model.decoder.register_forward_pre_hook(forgetful, with_kwargs=True)
    decoder = Seq2SeqDecoder(lm, num_slots=1, max_length=6)
    assert not decoder.cached and "T5ForConditionalGeneration decodes without a cache" in caplog.text
    tokens = np.array([[1, 2, 3, 4, 5, 6]])
    for length in (2, 3, 5):
        found = decoder.logits(tokens, np.array([length]))[0].log_softmax(-1)
        expected = plain_log_probs(lm, [1, 2], [PAD, *tokens[0, 2:length]])[-1]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_an_eos_of_the_prompt_is_not_repeated():
    lm = LanguageModel(make_t5(), make_tokenizer(WORDS, ends=True))
    ids, known = lm.seq2seq.prompts(torch.tensor([[1, 2, EOS, 4], [1, 2, 3, 4]]), torch.tensor([3, 2]))
    assert ids[0, :3].tolist() == [1, 2, EOS] and ids[1, :3].tolist() == [1, 2, EOS]
    assert known.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]


def test_texts_longer_than_the_positions_are_refused():
    lm = LanguageModel(make_bart(), make_tokenizer(WORDS))
    with pytest.raises(ValueError, match="65 tokens long, but the model has 64 positions"):
        Seq2SeqDecoder(lm, num_slots=1, max_length=65)
