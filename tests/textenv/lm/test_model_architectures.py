"""Every family of decoders acts and scores as a plain pass of its own does, or is refused in a sentence.

A dozen of them are always tested; ``make architectures`` tests all.
"""

import numpy as np
import pytest
import torch
import transformers
from tensordict import TensorDict

from algos import PPO, LMPolicy, PPOConfig
from algos.finetuning.sft import check_context
from algos.policies.critic import Critic
from tests.helpers.architectures import REFUSED, RIGHT, UNCACHED, make_family
from tests.helpers.models import WORDS, make_gpt2, make_llama, make_tokenizer
from tests.helpers.text_envs import text_env
from textenv import LanguageModel
from textenv.lm.decoding import Decoder

LENGTH = 24
# fmt: off
ALWAYS = [
    "bart", "bloom", "falcon_h1", "gemma3_text", "gpt2", "gpt_neo", "gpt_oss", "jamba", "lfm2_moe", "llama",
    "llama4_text", "mamba2", "phi3", "qwen3_moe", "qwen3_next", "rwkv",
    "bert", "musicgen", "reformer", "rembert", "xlm", "xlnet",
]
# fmt: on


def some(families):
    return [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in families]


def language_model(model):
    return LanguageModel(model, make_tokenizer(WORDS))


def random_texts(length=LENGTH):
    return np.random.default_rng(0).integers(0, len(WORDS), (6, length))


def plain_log_probs(lm, texts):
    """What the model's own forward says of whole texts, ``[6, length, 9]``."""
    with torch.no_grad():
        return lm.model(torch.from_numpy(texts)).logits.log_softmax(-1)


def worst_gap_of_slots(lm, texts):
    """Three slots at lengths of their own grow to the longest text; other texts take them over, one in mid-run."""
    longest, plain = texts.shape[1], plain_log_probs(lm, texts)
    decoder, waiting = Decoder(lm, num_slots=3, max_length=longest), list(range(len(texts)))
    chosen, length = [waiting.pop(0) for _ in range(3)], np.array([3, 1, 7])
    worst = 0.0
    for step in range(2 * longest):
        log_probs = decoder.logits(texts[chosen], length).log_softmax(-1)
        busy = length > 0
        worst = max(worst, (log_probs - plain[chosen, length - 1])[torch.from_numpy(busy)].abs().max().item())
        length = length + busy
        over = (length > longest) | (np.arange(3) == 0 if step == 5 else False)
        for slot in np.flatnonzero(over):
            chosen[slot], length[slot] = (waiting.pop(0), 2 + step % 7) if waiting else (0, 0)
        if over.any():
            decoder.reset(over)
        if not length.any():
            break
    assert not waiting and not length.any()
    return worst


@pytest.mark.heavy
@pytest.mark.parametrize("family", some(RIGHT))
def test_a_family_equals_a_plain_pass(family):
    lm, texts = language_model(make_family(family)), random_texts()
    tokens, plain = torch.from_numpy(texts), plain_log_probs(lm, texts)
    assert (plain.amax(-1) - plain.amin(-1)).mean() > 0.1, "its logits are all alike: the test guards nothing"
    torch.testing.assert_close(plain_log_probs(lm, texts[:, :11]), plain[:, :11], atol=1e-4, rtol=0)
    # Rounding grows with the log-probabilities: these reach 5 nats.
    assert worst_gap_of_slots(lm, texts) < 1e-5 * max(1.0, plain.abs().max().item())
    assert lm.cached[LENGTH] is (family not in UNCACHED)

    mask = torch.rand(6, LENGTH - 1, generator=torch.Generator().manual_seed(0)) > 0.4
    rollout = TensorDict({"observation": tokens[:, :-1], "action": tokens[:, 1:], "mask": mask}, [6, LENGTH - 1])
    log_prob, entropy, _ = lm.evaluate(rollout)
    expected = plain[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(log_prob[mask], expected[mask], atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy[mask], -(plain.exp() * plain).sum(-1)[:, :-1][mask], atol=1e-4, rtol=0)

    real = torch.ones_like(tokens)
    real[0, :5] = 0  # padding on the left, which some families know nothing of
    found = lm.token_log_probs(tokens, real)[: LENGTH - 6]
    alone = plain_log_probs(lm, texts[:1, 5:])[0, :-1]
    torch.testing.assert_close(found, alone.gather(-1, tokens[0, 6:, None])[:, 0], atol=1e-4, rtol=0)


SCALED = {
    "beam": dict(final_logit_softcapping=2.0),
    "cohere": dict(logit_scale=0.0625),
    "cohere2": dict(logit_scale=0.25),
    "falcon_h1": dict(lm_head_multiplier=0.125),
    "gemma3_text": dict(final_logit_softcapping=2.0),
    "granite_swa": dict(logits_scaling=4.0),
    "granitemoe": dict(logits_scaling=4.0),
    "granitemoe_swa": dict(logits_scaling=4.0),
    "granitemoehybrid": dict(logits_scaling=4.0),
    "granitemoeshared": dict(logits_scaling=4.0),
    "hyperclovax": dict(logits_scaling=0.25),
    "inkling_text": dict(logits_mup_width_multiplier=4.0),
    "minicpm3": dict(dim_model_base=8),
    "nanochat": dict(final_logit_softcapping=2.0),
    "recurrent_gemma": dict(logits_soft_cap=2.0),
    "xlstm": dict(output_logit_soft_cap=2.0),
}
"""Settings that change logits after the output layer, not as in models that leave them as they are."""


@pytest.mark.parametrize("family", SCALED)
def test_scaled_logits_are_those_of_the_model(family):
    lm, tokens = language_model(make_family(family, **SCALED[family])), torch.from_numpy(random_texts())
    plain = plain_log_probs(lm, random_texts())[:, :-1]
    rollout = TensorDict({"observation": tokens[:, :-1], "action": tokens[:, 1:]}, [6, LENGTH - 1])
    rollout["mask"] = torch.ones(6, LENGTH - 1, dtype=torch.bool)
    expected = plain.gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(lm.evaluate(rollout).log_prob, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", some(REFUSED))
def test_a_family_that_cannot_is_refused_in_a_sentence(family):
    model = make_family(family)
    torch.manual_seed(0)  # Reformer draws from it
    with pytest.raises(ValueError, match=REFUSED[family]) as refusal:
        Decoder(language_model(model), num_slots=3, max_length=LENGTH)
    assert type(model).__name__ in str(refusal.value)


def test_no_language_model_is_refused_by_its_error():
    config = make_gpt2().config
    with pytest.raises(ValueError, match="GPT2Model cannot read a text.*no attribute 'logits'") as refusal:
        language_model(transformers.GPT2Model(config))
    assert isinstance(refusal.value.__cause__, AttributeError)


def test_a_model_that_can_be_made_causal_then_acts():
    """Without a mask its forward takes pad tokens for padding; and it asserts that it knows no such cache."""
    lm = language_model(make_family("xlm", causal=True, pad_index=8))
    assert worst_gap_of_slots(lm, random_texts() % 8) < 1e-4
    assert not Decoder(lm, num_slots=3, max_length=LENGTH).cached


# --- the check of the cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_length", "cached"), [(8, True), (9, False), (40, False)])
def test_the_cache_is_checked_to_the_longest_text(max_length, cached):
    """GPT-Neo's local attention sees 8 tokens, and an additive mask says otherwise."""
    lm = language_model(make_family("gpt_neo"))
    assert Decoder(lm, num_slots=3, max_length=max_length).cached is cached
    assert worst_gap_of_slots(lm, random_texts(max_length)) < 1e-4


@pytest.mark.parametrize("slots", [1, 3])
def test_the_check_reads_the_longest_text_twice(slots):
    """In pieces where there is a mask of queries by keys: 600 tokens at once would be 600 by 600."""
    lm, plain, cached = language_model(make_gpt2(n_positions=1100)), [], []
    lm.model.transformer.register_forward_pre_hook(
        lambda module, args, given: (cached if given["use_cache"] else plain).append(given["input_ids"].numel()),
        with_kwargs=True,
    )
    assert Decoder(lm, num_slots=slots, max_length=1100).cached
    assert plain == [1100] and max(cached) <= 512
    assert 1100 <= sum(cached) < 1100 + 8


def test_the_check_leaves_nothing_behind():
    lm = language_model(make_llama())
    decoder, texts = Decoder(lm, num_slots=3, max_length=LENGTH), random_texts()[:3]
    assert not decoder.num_read.any()
    assert all(step.recording is None and step.calls == 0 for step in decoder.recordings)
    log_probs = decoder.logits(texts, np.array([2, 3, 4])).log_softmax(-1)
    expected = plain_log_probs(lm, texts)[torch.arange(3), torch.tensor([1, 2, 3])]
    torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=0)


# --- windows, states and ALiBi ----------------------------------------------------------------------------------------

SLIDING = dict(layer_types=["sliding_attention", "full_attention"])
VARIANTS = {
    "ALiBi": ("falcon", dict(alibi=True)),
    "ALiBi without parallel attention": ("falcon", dict(alibi=True, new_decoder_architecture=True)),
    "windows in some layers": ("qwen2", SLIDING | dict(use_sliding_window=True, sliding_window=5)),
    "no window": ("mistral", dict(sliding_window=None)),
    "a window as long as the texts": ("mistral", dict(sliding_window=LENGTH)),
    "a window of two tokens": ("starcoder2", dict(sliding_window=2)),
    "windows first": ("cohere2", SLIDING),
    "full attention first": ("olmo3", dict(layer_types=SLIDING["layer_types"][::-1])),
    "windows in some layers, scaled": ("gemma3_text", SLIDING),
    "a convolution": ("lfm2", dict(layer_types=["conv", "full_attention"])),
}


@pytest.mark.parametrize(("family", "options"), VARIANTS.values(), ids=VARIANTS)
def test_a_cache_is_right_for_every_kind_of_layer(family, options):
    lm = language_model(make_family(family, **options))
    assert worst_gap_of_slots(lm, random_texts()) < 1e-5 * 5
    assert lm.cached[LENGTH]


@pytest.mark.parametrize("family", ["mamba", "bloom", "rwkv"])
def test_a_slot_may_idle_jump_and_change(family):
    """States advance only with a slot's own tokens; several tokens at once are read from the beginning of the text."""
    lm, texts = language_model(make_family(family)), random_texts()
    plain, decoder = plain_log_probs(lm, texts), Decoder(lm, num_slots=3, max_length=LENGTH)
    for chosen, length in [
        ([0, 1, 2], [1, 4, 4]), ([0, 1, 2], [2, 5, 0]), ([0, 1, 3], [3, 6, 1]), ([0, 1, 3], [9, 7, 2]),
        ([0, 1, 3], [10, 0, 3]), ([0, 4, 3], [11, 1, 4]), ([0, 4, 3], [12, 2, 5]), ([5, 4, 3], [12, 3, 5]),
    ]:  # fmt: skip
        length = np.array(length)
        log_probs = decoder.logits(texts[chosen], length).log_softmax(-1)
        gap = (log_probs - plain[chosen, length - 1])[torch.from_numpy(length > 0)]
        assert gap.abs().max() < 5e-5, (chosen, length)


def test_a_row_of_rwkv_does_not_see_the_others():
    """The model's own step mixes the rows of a batch; the decoder's must not."""
    lm, texts = language_model(make_family("rwkv")), random_texts()
    with torch.no_grad():
        state = lm.model(torch.from_numpy(texts[:, :6]), use_cache=True).state
        own = lm.model(torch.from_numpy(texts[:, 6:7]), state=state, use_cache=True).logits[:, -1].log_softmax(-1)
    plain, decoder = plain_log_probs(lm, texts)[:, 6], Decoder(lm, num_slots=6, max_length=LENGTH)
    decoder.logits(texts, np.full(6, 6))
    assert (own - plain).abs().max() > 0.01, "transformers is right now: _LastInputs may go"
    assert (decoder.logits(texts, np.full(6, 7)).log_softmax(-1) - plain).abs().max() < 5e-5


# --- LongRoPE --------------------------------------------------------------------------------------------------------

ORIGINAL = 16


def make_long(family, **more):
    """A model that turns every position otherwise in texts of more than 16 tokens."""
    factors = dict(short_factor=[1.0] * 4, long_factor=[4.0, 3.0, 2.0, 8.0]) | more
    rope = dict(rope_type="longrope", rope_theta=1e4, factor=4.0, original_max_position_embeddings=ORIGINAL)
    own = dict(original_max_position_embeddings=ORIGINAL) if family == "phi3" else {}
    return make_family(family, rope_parameters=rope | factors, **own)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_two_sets_of_frequencies_stop_at_the_first(family):
    """They are right up to their original length and refused beyond."""
    lm = language_model(make_long(family))
    texts = random_texts(ORIGINAL + 1)
    longer = plain_log_probs(lm, texts)[:, :ORIGINAL]
    assert (longer - plain_log_probs(lm, texts[:, :ORIGINAL])).abs().max() > 0.1, "the length changes nothing here"
    assert worst_gap_of_slots(lm, texts[:, :ORIGINAL]) < 1e-4
    with pytest.raises(ValueError, match="17 tokens long, but the model has 16 positions .with LongRoPE"):
        Decoder(lm, num_slots=3, max_length=ORIGINAL + 1)
    with pytest.raises(ValueError, match="17 tokens long, but the model has 16 positions"):
        lm.hidden(torch.from_numpy(texts))
    with pytest.raises(ValueError, match="max_length is 17, but the model's context is 16 tokens"):
        check_context(lm, ORIGINAL + 1)


def test_texts_beyond_the_original_length_are_refused():
    policy = LMPolicy(make_long("llama"), make_tokenizer(WORDS))
    env = text_env(max_new_tokens=14)
    assert env.max_length > ORIGINAL
    with pytest.raises(ValueError, match="LongRoPE.*lower max_prompt_tokens, max_new_tokens"):
        PPO(env, policy, PPOConfig(num_steps=None, num_episodes=4, minibatch_size=4))


def test_with_one_set_of_frequencies_it_goes_beyond():
    factor = [4.0, 3.0, 2.0, 8.0]
    lm = language_model(make_long("llama", short_factor=factor, long_factor=factor))
    assert worst_gap_of_slots(lm, random_texts()) < 1e-4


def test_a_model_that_contradicts_itself_is_refused():
    """Phi-MoE scales its attention otherwise in long texts, by equal frequencies."""
    factor = [4.0, 3.0, 2.0, 8.0]
    scales = dict(short_mscale=1.0, long_mscale=2.0)
    lm = language_model(make_long("phimoe", short_factor=factor, long_factor=factor, **scales))
    assert worst_gap_of_slots(lm, random_texts(ORIGINAL)) < 1e-4
    with pytest.raises(ValueError, match="PhimoeForCausalLM cannot sample texts of up to 17 tokens .*differ by up to"):
        Decoder(lm, num_slots=3, max_length=ORIGINAL + 1)


# --- other weights and trunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_gpt2, make_llama])
def test_float64_weights_act_score_and_learn(make):
    lm, texts = language_model(make().double()), random_texts()
    assert worst_gap_of_slots(lm, texts) < 1e-4 and Decoder(lm, num_slots=3, max_length=LENGTH).cached
    tokens = torch.from_numpy(texts)
    rollout = TensorDict({"observation": tokens[:, :-1], "action": tokens[:, 1:]}, [6, LENGTH - 1])
    rollout["mask"] = torch.ones(6, LENGTH - 1, dtype=torch.bool)
    log_prob, entropy, _ = lm.evaluate(rollout)
    assert log_prob.dtype == entropy.dtype == torch.float32
    expected = plain_log_probs(lm, texts)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(log_prob.double(), expected, atol=1e-5, rtol=0)
    (log_prob + entropy).sum().backward()
    assert all(p.grad.dtype == torch.float64 and p.grad.isfinite().all() for p in lm.parameters())


def test_a_critic_copies_an_unusual_trunk():
    lm, tokens = language_model(make_family("llama4_text")), torch.from_numpy(random_texts())
    critic = Critic.from_language_model(lm)
    assert (critic.values(tokens) == 0).all() and not {*critic.trunk.parameters()} & {*lm.parameters()}
    torch.testing.assert_close(critic.trunk(tokens).last_hidden_state, lm.hidden(tokens))
