"""The fast way gives what the obvious way gives: recorded decoding, two-level sampling, scores in chunks."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algos import LMPolicy
from tests.helpers.models import WORDS, make_bloom, make_gemma, make_gpt2, make_llama, make_mistral, make_tokenizer
from textenv.acceleration import FAST
from textenv.envs.action_masks import ActionMasks
from textenv.lm import memory, recording
from textenv.lm.model import LanguageModel
from textenv.lm.recording import record
from textenv.lm.sampling import BLOCK, restrict, sample
from textenv.lm.scoring import TokenScores
from textenv.rollout import Allowed

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))
import text_decoding

from textenv.lm.decoding import Decoder

SLOTS, LENGTH = 3, 40


def texts(seed=0):
    return torch.randint(0, len(WORDS), (SLOTS, LENGTH), generator=torch.Generator().manual_seed(seed)).numpy()


def make_qwen(**options):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def make_biased():
    """An output layer with a bias, so that logits are scored by autograd."""
    model = make_llama()
    model.lm_head = torch.nn.Linear(32, len(WORDS))
    return model


def recording_decoder(make, monkeypatch, after=4):
    if not FAST:
        pytest.skip("TEXTENV_FAST=0 switches the recorder off")
    monkeypatch.setattr(recording, "RECORDED_AFTER", after)
    lm = LanguageModel(make(), make_tokenizer(WORDS))
    return lm, Decoder(lm, num_slots=SLOTS, max_length=LENGTH)


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


@pytest.mark.parametrize(
    "make",
    [make_gpt2, make_llama, make_qwen, make_mistral, make_gemma, make_bloom],
    ids=["gpt2", "llama", "qwen", "one window", "windows in some layers", "ALiBi"],
)
def test_recorded_steps_are_right_at_every_width(make, monkeypatch):
    """Slots at positions of their own, up to the longest text."""
    lm, decoder = recording_decoder(make, monkeypatch)
    decode(lm, decoder, texts(), np.array([2, 5, 3]), LENGTH - 4)
    assert decoder.everywhere.recording is not None


@pytest.mark.skipif(not FAST, reason="TEXTENV_FAST=0 switches the recorder off")
@pytest.mark.parametrize(
    "make", [make_gpt2, make_llama, pytest.param(make_qwen, marks=pytest.mark.long)], ids=["gpt2", "llama", "qwen"]
)
def test_recorded_steps_of_some_slots_are_right(make, monkeypatch):
    """Slots fall idle and are given other texts, now one and now most of them; every step against a whole pass."""
    monkeypatch.setattr(recording, "RECORDED_AFTER", 3)
    lm = LanguageModel(make(), make_tokenizer(WORDS))
    rng, slots = np.random.default_rng(0), 9
    decoder = Decoder(lm, num_slots=slots, max_length=LENGTH)
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
    assert decoder.one.recording is not None and decoder.several.recording is not None


def test_a_number_made_of_rows_is_found_out(monkeypatch):
    """At another number of rows."""
    lm, decoder = recording_decoder(make_gpt2, monkeypatch, after=0)
    layer = lm.model.transformer.ln_f
    own = layer.forward
    layer.forward = lambda x: own(x) * len(x)
    lengths = np.array([5, 7, 0]), np.array([3, 4, 6])
    for length, recorded in zip(lengths, (True, False), strict=True):
        decoder.reset()
        decoder.logits(texts(), length)
        assert (decoder.several.recording is not None) == recorded


def test_a_recording_reads_present_weights(monkeypatch):
    lm, decoder = recording_decoder(make_gpt2, monkeypatch)
    decode(lm, decoder, texts(), np.array([2, 5, 3]), 8)
    recorded = decoder.everywhere.recording
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(1.1)
    decoder.reset()
    decode(lm, decoder, texts(1), np.array([4, 2, 2]), 20)
    assert decoder.everywhere.recording is recorded is not None


def test_weights_that_are_replaced_are_recorded_anew(monkeypatch):
    lm, decoder = recording_decoder(make_gpt2, monkeypatch)
    decode(lm, decoder, texts(), np.array([2, 5, 3]), 8)
    head = lm.model.transformer.ln_f
    head.weight = torch.nn.Parameter(head.weight.detach() * 3)
    decoder.reset()
    assert decoder.everywhere.recording is None
    decode(lm, decoder, texts(1), np.array([4, 2, 2]), 20)
    assert decoder.everywhere.recording is not None


def test_another_way_is_recorded_anew(monkeypatch):
    """With its adapter switched off the weights are the same tensors, and the forward is another one."""
    lm, decoder = recording_decoder(lambda: with_adapter(make_gpt2()), monkeypatch, after=0)
    length = np.array([5, 7, 3])
    decode(lm, decoder, texts(), length, 3)
    decoder.reset()
    decoder.logits(texts(), length + 1)
    assert all(step.recording is not None for step in (decoder.everywhere, decoder.several))
    with lm.model.disable_adapter():
        decoder.reset()
        decode(lm, decoder, texts(), length, 3)
    decoder.reset()
    decode(lm, decoder, texts(), length, 3)


def with_adapter(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    return get_peft_model(model, config)


def test_a_replaced_forward_is_recorded_anew(monkeypatch):
    lm, decoder = recording_decoder(make_llama, monkeypatch)
    decode(lm, decoder, texts(), np.array([2, 5, 3]), 8)
    assert decoder.everywhere.recording is not None
    norm_type = type(lm.model.model.norm)
    forward = norm_type.forward
    monkeypatch.setattr(norm_type, "forward", lambda norm, hidden: 1.5 * forward(norm, hidden))
    decoder.reset()
    decode(lm, decoder, texts(1), np.array([2, 5, 3]), 8)


def test_a_model_that_reads_values_is_not_recorded(monkeypatch, caplog):
    """A branch on a value cannot be recorded; it is said in the log, and the logits are right."""
    lm, decoder = recording_decoder(make_gpt2, monkeypatch)
    layer = lm.model.transformer.ln_f
    own = layer.forward
    layer.forward = lambda x: own(x) * (2.0 if x.sum() > 0 else 1.5)
    decoder.reset()
    with caplog.at_level(logging.INFO):
        for step in range(10):
            decoder.logits(texts(), np.array([2, 5, 3]) + step)
    assert decoder.everywhere.recording is None and "decodes without a recording" in caplog.text


def test_a_change_with_the_length_is_found_out(monkeypatch):
    """From 16 keys on another branch, which a recording made before cannot know: it is dropped."""
    lm, decoder = recording_decoder(make_gpt2, monkeypatch, after=1)
    layer = lm.model.transformer.h[0].ln_1
    own, cache = layer.forward, decoder.cache.layers[0]
    layer.forward = lambda x: own(x) * (2.0 if cache.width >= 16 else 1.0)
    for step in range(3):
        decoder.logits(texts(), np.array([4, 5, 3]) + step)
    assert decoder.everywhere.recording is not None
    for step in range(3, 24):
        decoder.logits(texts(), np.array([4, 5, 3]) + step)
    assert decoder.everywhere.recording is None


def test_a_number_made_of_the_width_is_found_out(monkeypatch):
    lm, decoder = recording_decoder(make_gpt2, monkeypatch, after=1)
    layer = lm.model.transformer.h[0].ln_1
    own, cache = layer.forward, decoder.cache.layers[0]
    layer.forward = lambda x: own(x) * (1 + int(cache.width) / 10)
    for step in range(3):
        decoder.logits(texts(), np.array([4, 5, 3]) + step)
    assert decoder.everywhere.recording is not None
    decoder.logits(texts(), np.array([7, 8, 6]))
    assert decoder.everywhere.recording is None and not decoder.everywhere.recordable


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("after", [1, 100], ids=["recorded", "plain"])
def test_acting_leaves_no_gradient_behind(after, deterministic, monkeypatch):
    monkeypatch.setattr(recording, "RECORDED_AFTER", after)
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    for length in range(2, 8):
        observation = {"tokens": texts(), "length": np.full(SLOTS, length)}
        assert not policy.act(observation, deterministic=deterministic).log_prob.requires_grad


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


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [BLOCK * 4, 5000])
def test_large_vocabularies_follow_probabilities(n):
    """Chi-square of 40,000 draws over 16 classes of tokens (99.9 % point for 15 degrees of freedom: 37.7)."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(n, generator=generator)
    action, log_prob = sample(logits.expand(40_000, n), generator=generator)
    classes = torch.arange(n) * 16 // n
    expected = torch.zeros(16).scatter_add_(0, classes, logits.softmax(-1)) * 40_000
    found = torch.bincount(classes[action], minlength=16)
    assert ((found - expected) ** 2 / expected).sum() < 37.7
    torch.testing.assert_close(log_prob, logits.log_softmax(-1)[action], atol=1e-5, rtol=1e-5)
    likely = logits.topk(8).indices  # and single tokens: within 5 standard deviations
    probability = logits.softmax(-1)[likely]
    share = (action[:, None] == likely).float().mean(0)
    assert ((share - probability).abs() < 5 * (probability / 40_000).sqrt()).all()


@pytest.mark.parametrize("n", [300, 5000])
@pytest.mark.parametrize("level", [0.0, 1 - 2**-24, 0.5])
def test_no_uniform_number_draws_a_forbidden_token(n, level):
    """At both ends and where whole blocks are forbidden; at 0 the first open token, at the end the last."""
    allowed = torch.zeros(2, n, dtype=torch.bool)
    allowed[0, [7, n // 2, n - 3]] = True
    allowed[1, n - 1] = True
    logits = torch.randn(2, n, generator=torch.Generator().manual_seed(1))
    restricted = restrict(logits, temperature=1.0, allowed=allowed)
    action, log_prob = sample(restricted, uniform=torch.full((2,), level))
    assert allowed[torch.arange(2), action].all() and torch.isfinite(log_prob).all()
    if level != 0.5:
        assert action[0] == (7 if level == 0 else n - 3)


def test_levels_decide_as_the_distribution_function():
    """The inverse by float64 over the whole vocabulary."""
    logits = 3 * torch.randn(64, 3000, generator=torch.Generator().manual_seed(2))
    level = torch.rand(64, 1, generator=torch.Generator().manual_seed(3))
    action, _ = sample(logits, uniform=level[:, 0])
    below = logits.double().softmax(-1).cumsum(-1)
    high = below.gather(-1, action[:, None])
    low = high - logits.double().softmax(-1).gather(-1, action[:, None])
    assert (low - 1e-5 <= level).all() and (level <= high + 1e-5).all()


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 100], ids=["chunks", "whole"])
@pytest.mark.parametrize("what", ["log_prob", "entropy", "both"])
def test_scores_are_those_of_log_softmax(size, what):
    """With a temperature, forbidden tokens, and an output layer of more rows than there are tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    sets = torch.rand(10, 7, generator=generator) > 0.3
    action = sets.double().multinomial(1, generator=generator).squeeze(-1)
    allowed, scales = Allowed(torch.arange(10), sets), torch.randn(2, 10, generator=generator, dtype=torch.float64)

    def logits(part, start):
        z = (part @ weight.T)[:, :7] / 0.7
        return z.masked_fill(~allowed.rows(start, start + len(part)), torch.finfo(torch.float32).min)

    def total(log_prob, entropy):
        return {"log_prob": 0.0, "entropy": 1.0, "both": 1.0}[what] * (scales[1] * entropy).sum() + (
            0.0 if what == "entropy" else (scales[0] * log_prob).sum()
        )

    def gradients(scores):
        loss = total(*scores)
        return [loss, *torch.autograd.grad(loss, [hidden, weight])]

    found = TokenScores.apply(hidden, weight, action, logits, 0.7, size)
    log_probs = logits(hidden, 0).log_softmax(-1)
    expected = log_probs.gather(-1, action[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)
    for ours, theirs in zip((*found, *gradients(found)), (*expected, *gradients(expected)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("scale", [1e-2, 10.0, 1e3])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("make", [make_llama, make_biased], ids=["plain head", "head with a bias"])
def test_masked_entropy_has_a_finite_gradient(make, temperature, scale):
    """Against the distribution over the allowed tokens alone, in which nothing is forbidden."""
    lm = LanguageModel(make(), make_tokenizer(WORDS), temperature=temperature)
    head, generator = lm.model.get_output_embeddings(), torch.Generator().manual_seed(0)
    hidden = torch.randn(5, lm.hidden_size, generator=generator, requires_grad=True)
    action, open_tokens = torch.tensor([1, 4, 6, 4, 1]), torch.tensor([1, 4, 6])
    allowed = Allowed(torch.zeros(5, dtype=torch.int64), torch.zeros(1, 9, dtype=torch.bool))
    allowed.sets[0, open_tokens] = True

    def gradients(log_prob, entropy):
        return torch.autograd.grad((scale * entropy + log_prob).sum(), [hidden, head.weight])

    found = lm.score_actions(hidden, action=action, allowed=allowed)
    log_probs = (lm.logits(hidden)[:, open_tokens] / temperature).log_softmax(-1)
    expected = log_probs.gather(-1, torch.searchsorted(open_tokens, action)[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    for ours, theirs in zip(
        (*found, *gradients(*found)), (expected, entropy, *gradients(expected, entropy)), strict=True
    ):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, atol=1e-4 * max(1, scale), rtol=1e-4)


def test_a_frozen_output_layer_gets_no_gradient():
    lm = LanguageModel(make_llama(tie_word_embeddings=False), make_tokenizer(WORDS))
    head = lm.model.get_output_embeddings().weight.requires_grad_(False)
    hidden = torch.randn(4, lm.hidden_size, requires_grad=True)
    log_prob, _ = lm.score_actions(hidden, action=torch.tensor([0, 1, 2, 3]), allowed=None)
    log_prob.sum().backward()
    assert head.grad is None and hidden.grad.abs().sum() > 0


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_gpt2, make_llama, make_qwen], ids=["gpt2", "llama", "qwen"])
def test_rows_read_in_parts_equal_all_at_once(make, monkeypatch):
    """Without a gradient; padded on the left, so that positions and mask must be cut alike."""
    lm, tokens = LanguageModel(make(), make_tokenizer(WORDS)), torch.from_numpy(texts())
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    read = []
    lm.model.base_model.register_forward_pre_hook(
        lambda module, given, options: read.append(len(options["input_ids"])), with_kwargs=True
    )
    monkeypatch.setattr(memory, "POSITIONS_AT_ONCE", 2 * LENGTH)
    whole = lm.hidden(tokens, **inputs)
    with torch.no_grad():
        parts = lm.hidden(tokens, **inputs)
    assert read == [SLOTS, 2, SLOTS - 2]
    torch.testing.assert_close(parts[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=1e-5)


def test_masks_of_many_rows_are_those_of_each_row():
    masks = ActionMasks(5, forbidden=[0], ends=[4], min_new_tokens=2, rule=lambda turn: turn)
    turns = [[1, 2], None, [3], None]
    together = masks.index(lambda i: turns[i], np.array([0, 1, 2, 3]))
    each = [masks.index(lambda i, turn=turn: turn, np.array([n]))[0] for n, turn in enumerate(turns)]
    assert together.tolist() == each
    assert [masks.sets[i].nonzero().squeeze(-1).tolist() for i in together] == [[1, 2], [1, 2, 3], [3], [1, 2, 3, 4]]


@pytest.mark.long
@pytest.mark.parametrize("case", ["lengths", "interface", "generation", "families"])
def test_what_measures_the_fast_paths_runs(case, monkeypatch):
    """One pair of each, of few episodes: whether it is fast is no test's business."""
    monkeypatch.setattr(recording, "RECORDED_AFTER", recording.RECORDED_AFTER)  # a benchmark lowers it
    monkeypatch.setattr(text_decoding, "EPISODES", 32)
    found = text_decoding.CASES[case](SimpleNamespace(size="tiny", family="mamba", pairs=1, prefix=16))
    assert len(found["ours"]) == 1 and all(len(figures) == 1 for figures in found["peers"].values())
