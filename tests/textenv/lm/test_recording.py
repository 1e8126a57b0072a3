"""Recorded decoding gives what the model gives, or is dropped."""

import logging
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from algos import LMPolicy
from tests.helpers.architectures import make_family
from tests.helpers.models import WORDS, make_bloom, make_gemma, make_gpt2, make_llama, make_mistral, make_tokenizer
from textenv.acceleration import FAST
from textenv.lm.decoding import Decoder
from textenv.lm.model import LanguageModel
from textenv.lm.recording import RECORDED_AFTER, record

SLOTS, LENGTH = 3, 40
one_layer = partial(make_gpt2, n_layer=1)
"""A recording takes half a second a layer."""


def texts(seed=0):
    return torch.randint(0, len(WORDS), (SLOTS, LENGTH), generator=torch.Generator().manual_seed(seed)).numpy()


def soon(decoder, after=4):
    """As if nearly all the calls that come before a recording had been made: it is made after so many more."""
    for step in decoder.recordings:
        step.calls = RECORDED_AFTER - after


def recording_decoder(make, after=4, *, slots=SLOTS):
    if not FAST:
        pytest.skip("TEXTENV_FAST=0 switches the recorder off")
    lm = LanguageModel(make(), make_tokenizer(WORDS))
    decoder = Decoder(lm, num_slots=slots, max_length=LENGTH)
    soon(decoder, after)
    return lm, decoder


def plain_logits(lm, tokens, length):
    with torch.no_grad():
        hidden = lm.hidden(torch.from_numpy(tokens))
        return lm.logits(hidden[torch.arange(len(tokens)), torch.from_numpy(length - 1)])


def decode(lm, decoder, tokens, starts, steps):
    """Token by token from these lengths on; every step against a whole pass of the model without a cache."""
    for step in range(steps):
        length = starts + step
        torch.testing.assert_close(
            decoder.logits(tokens, length), plain_logits(lm, tokens, length), atol=5e-5, rtol=1e-5
        )


@pytest.mark.heavy
@pytest.mark.parametrize(
    "make",
    [make_gpt2, partial(make_family, "qwen3"), make_mistral, make_gemma, make_bloom],
    ids=["gpt2", "qwen", "one window", "windows in some layers", "ALiBi"],
)
def test_recorded_steps_are_right_at_every_width(make):
    """Slots at positions of their own, up to the longest text."""
    lm, decoder = recording_decoder(make)
    decode(lm, decoder, texts(), np.array([2, 5, 3]), LENGTH - 4)
    assert decoder.step_all_slots.recording is not None


@pytest.mark.parametrize(
    "make",
    [
        make_llama,
        pytest.param(make_gpt2, marks=pytest.mark.slow),
        pytest.param(partial(make_family, "qwen3"), marks=pytest.mark.slow),
    ],
    ids=["llama", "gpt2", "qwen"],
)
def test_recorded_steps_of_some_slots_are_right(make):
    """Slots fall idle and are given other texts, now one and now most of them; every step against a whole pass."""
    rng, slots = np.random.default_rng(0), 9
    lm, decoder = recording_decoder(make, after=3, slots=slots)
    tokens, length = np.zeros((slots, LENGTH), dtype=np.int64), np.zeros(slots, dtype=np.int64)
    for step in range(60):
        length[length > 0] += 1
        stopped = (length > LENGTH) | (rng.random(slots) < 0.15)
        length[stopped] = 0
        begun = (length == 0) & (rng.random(slots) < (0.9 if step % 20 == 0 else 0.1))
        for slot in np.flatnonzero(begun):
            length[slot] = rng.integers(1, 14)
            tokens[slot] = rng.integers(0, len(WORDS), LENGTH)
        if stopped.any() or begun.any():
            decoder.reset(stopped | begun)
        logits, at_work = decoder.logits(tokens, length), length > 0
        if at_work.any():
            expected = plain_logits(lm, tokens[at_work], length[at_work])
            torch.testing.assert_close(logits[torch.from_numpy(at_work)], expected, atol=5e-5, rtol=1e-5)
        assert (logits[torch.from_numpy(~at_work)] == 0).all()
    assert decoder.step_some_slots_one_token.recording is not None
    assert decoder.step_some_slots_many_tokens.recording is not None


@pytest.mark.heavy
def test_a_number_made_of_rows_is_found_out():
    """At another number of rows."""
    lm, decoder = recording_decoder(one_layer, after=0)
    layer = lm.model.transformer.ln_f
    own = layer.forward
    layer.forward = lambda x: own(x) * len(x)
    lengths = np.array([5, 7, 0]), np.array([3, 4, 6])
    for length, recorded in zip(lengths, (True, False), strict=True):
        decoder.reset()
        decoder.logits(texts(), length)
        assert (decoder.step_some_slots_many_tokens.recording is not None) == recorded


@pytest.mark.heavy
def test_a_recording_reads_present_weights():
    lm, decoder = recording_decoder(one_layer)
    decode(lm, decoder, texts(), np.array([2, 5, 3]), 8)
    recorded = decoder.step_all_slots.recording
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(1.1)
    decoder.reset()
    decode(lm, decoder, texts(1), np.array([4, 2, 2]), 20)
    assert decoder.step_all_slots.recording is recorded is not None


@pytest.mark.heavy
def test_weights_that_are_replaced_are_recorded_anew():
    lm, decoder = recording_decoder(one_layer)
    decode(lm, decoder, texts(), np.array([2, 5, 3]), 8)
    head = lm.model.transformer.ln_f
    head.weight = torch.nn.Parameter(head.weight.detach() * 3)
    decoder.reset()
    assert decoder.step_all_slots.recording is None
    soon(decoder)
    decode(lm, decoder, texts(1), np.array([4, 2, 2]), 20)
    assert decoder.step_all_slots.recording is not None


@pytest.mark.heavy
def test_another_way_is_recorded_anew():
    """With its adapter switched off the weights are the same tensors, and the forward is another one; and back."""
    lm, decoder = recording_decoder(lambda: with_adapter(one_layer()), after=0)
    length = np.array([5, 7, 3])
    decode(lm, decoder, texts(), length, 3)
    decoder.reset()
    decoder.logits(texts(), length + 1)
    assert all(step.recording is not None for step in (decoder.step_all_slots, decoder.step_some_slots_many_tokens))
    with lm.model.disable_adapter():
        decoder.reset()
        soon(decoder, 0)
        decode(lm, decoder, texts(), length, 3)
    assert all(step.recording is not None for step in (decoder.step_all_slots, decoder.step_some_slots_many_tokens))
    decoder.reset()
    decode(lm, decoder, texts(), length, 3)


def with_adapter(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    return get_peft_model(model, config)


@pytest.mark.heavy
def test_a_replaced_forward_is_recorded_anew(monkeypatch):
    lm, decoder = recording_decoder(partial(make_llama, num_hidden_layers=1))
    decode(lm, decoder, texts(), np.array([2, 5, 3]), 8)
    assert decoder.step_all_slots.recording is not None
    norm_type = type(lm.model.model.norm)
    forward = norm_type.forward
    monkeypatch.setattr(norm_type, "forward", lambda norm, hidden: 1.5 * forward(norm, hidden))
    decoder.reset()
    soon(decoder)
    decode(lm, decoder, texts(1), np.array([2, 5, 3]), 8)


@pytest.mark.heavy
def test_a_model_that_reads_values_is_not_recorded(caplog):
    """A branch on a value cannot be recorded; it is said in the log, and the logits are right."""
    lm, decoder = recording_decoder(make_gpt2)
    layer = lm.model.transformer.ln_f
    own = layer.forward
    layer.forward = lambda x: own(x) * (2.0 if x.sum() > 0 else 1.5)
    decoder.reset()
    with caplog.at_level(logging.INFO):
        for step in range(10):
            decoder.logits(texts(), np.array([2, 5, 3]) + step)
    assert decoder.step_all_slots.recording is None and "decodes without a recording" in caplog.text


@pytest.mark.heavy
def test_a_change_with_the_length_is_found_out():
    """From 16 keys on another branch, which a recording made before cannot know: it is dropped."""
    lm, decoder = recording_decoder(one_layer, after=1)
    layer = lm.model.transformer.h[0].ln_1
    own, cache = layer.forward, decoder.cache.layers[0]
    layer.forward = lambda x: own(x) * (2.0 if cache.width >= 16 else 1.0)
    for step in range(3):
        decoder.logits(texts(), np.array([4, 5, 3]) + step)
    assert decoder.step_all_slots.recording is not None
    for step in range(3, 24):
        decoder.logits(texts(), np.array([4, 5, 3]) + step)
    assert decoder.step_all_slots.recording is None


def test_a_number_made_of_the_width_is_found_out():
    lm, decoder = recording_decoder(one_layer, after=1)
    layer = lm.model.transformer.h[0].ln_1
    own, cache = layer.forward, decoder.cache.layers[0]
    layer.forward = lambda x: own(x) * (1 + int(cache.width) / 10)
    for step in range(3):
        decoder.logits(texts(), np.array([4, 5, 3]) + step)
    assert decoder.step_all_slots.recording is not None
    decoder.logits(texts(), np.array([7, 8, 6]))
    assert decoder.step_all_slots.recording is None and not decoder.step_all_slots.recordable


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "plain"])
def test_acting_leaves_no_gradient_behind(recorded, deterministic):
    policy = LMPolicy(one_layer(), make_tokenizer(WORDS))
    for length in range(8, 14):
        observation = {"tokens": texts(), "length": np.full(SLOTS, length)}
        assert not policy.act(observation, deterministic=deterministic).log_prob.requires_grad
        if recorded:
            soon(policy.decoder, after=0)
    recordings = [step.recording for step in policy.decoder.recordings]
    assert any(recordings) == (recorded and FAST), recordings


def test_a_moved_policy_decodes_where_it_is():
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    policy.act({"tokens": texts(), "length": np.full(SLOTS, 3)})
    policy.reset()
    assert policy.decoder.device == torch.device("cpu")
    policy.to("meta").reset()
    assert policy.decoder is None, "its cache is on the CPU"


def test_writes_into_buffers_are_repeated():
    """And any size above 1 may be another one."""
    memory = torch.zeros(5)

    def add(at, x):
        memory[at] = x * 2
        return memory[: x.shape[0] + 1].sum()

    memory_of = record(add, torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    memory.zero_()
    assert memory_of(torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 3.0])) == 12
    assert memory.tolist() == [0, 2, 4, 6, 0]


BENCHMARK = """
import sys
from functools import partial
from types import SimpleNamespace
sys.path.insert(0, "examples/benchmarks")
import text_decoding
from text_task import SHAPES, Shape
text_decoding.EPISODES, text_decoding.BATCH, text_decoding.NEW_TOKENS = 16, 4, 8
text_decoding.make_env = partial(text_decoding.make_env, num_envs=4, new_tokens=8)
SHAPES["tiny"] = SHAPES["small"] = Shape(vocabulary=32, layers=1, width=32, heads=2)
text_decoding.FAMILIES["mamba"] |= dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
for case in ("lengths", "interface", "generation", "families"):
    figures = text_decoding.CASES[case](SimpleNamespace(size="tiny", family="mamba", pairs=1, prefix=16))
    assert len(figures["ours"]) == 1 and all(len(peer) == 1 for peer in figures["peers"].values()), (case, figures)
"""


@pytest.mark.long
def test_what_measures_the_fast_paths_runs():
    """One pair of each, of few short episodes, in a process of its own, where it makes recordings earlier."""
    subprocess.run([sys.executable, "-c", BENCHMARK], check=True, cwd=Path(__file__).parents[3])
