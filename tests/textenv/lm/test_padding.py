"""A prompt of several slots is read once, and padding is not read: the numbers are those of each text alone."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from algos import LMPolicy
from algos.policies.critic import Critic
from tests.helpers.architectures import make_family
from tests.helpers.models import WORDS, make_gpt2, make_t5, make_tokenizer
from textenv import LanguageModel
from textenv.lm import padding
from textenv.lm.decoding import Decoder
from textenv.lm.loading import trunk_of
from textenv.lm.padding import without_padding

FAMILIES = ["gpt2", "llama", "bloom", "gemma3_text", "qwen3_moe", "mamba2", "jamba", "rwkv", "falcon_h1"]
SLOTS, LENGTH = 6, 20


def positions(lm, monkeypatch):
    """The number of positions of each pass through the trunk from now on."""
    found, trunk = [], lm.trunk
    monkeypatch.setattr(
        lm, "trunk", lambda part="", **inputs: (found.append(inputs["input_ids"].numel()), trunk(part, **inputs))[1]
    )
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_that_begin_with_one_prompt_go_on_as_if_each_had_read_it(family):
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


def test_a_prompt_of_a_group_is_read_once(monkeypatch):
    lm = LanguageModel(make_gpt2(), make_tokenizer(WORDS))
    decoder = Decoder(lm, num_slots=8, max_length=32)
    read = positions(lm, monkeypatch)
    texts = np.random.default_rng(1).integers(0, len(WORDS), (2, 32)).repeat(4, axis=0)
    first = decoder.logits(texts, np.full(8, 16))
    assert read == [2 * 16] and torch.equal(first[0], first[3]) and not torch.equal(first[0], first[4])
    decoder.logits(texts, np.full(8, 17))
    assert read == [2 * 16, 8]


def ragged(seed=0):
    """Texts of unequal lengths, prompts too, with tokens after their ends; a turn between, and an empty row."""
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(0, len(WORDS), (7, LENGTH + 1)))
    mask = torch.zeros(7, LENGTH, dtype=torch.bool)
    ends = [3, 20, 6, 12, 19, 7, 0]
    for row, (start, end) in enumerate(zip([1, 4, 2, 8, 3, 6, 0], ends, strict=True)):
        mask[row, start:end] = True
    mask[3, 9:11] = False
    done = torch.zeros_like(mask)
    for row, end in enumerate(ends[:-1]):
        done[row, end - 1] = True
    columns = {"observation": tokens[:, :-1], "action": tokens[:, 1:], "mask": mask, "terminated": done}
    return TensorDict(columns | {"truncated": torch.zeros_like(done)}, batch_size=[7, LENGTH])


def outcome(policy, rollout):
    """Evaluation and values at the True entries, and the gradient."""
    policy.zero_grad()
    evaluation, mask = policy.evaluate(rollout), rollout["mask"]
    parts = [x[mask] for x in evaluation]
    (parts[0].square().sum() + parts[1].sum() + parts[2].square().sum()).backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return [x.detach() for x in parts], [x[mask] for x in policy.values(rollout)], gradient


@pytest.mark.parametrize("critic", [False, True], ids=["head", "critic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_are_scored_as_whole_ones_are(family, critic, monkeypatch):
    lm = LanguageModel(make_family(family), make_tokenizer(WORDS))
    critic = Critic.from_language_model(lm) if critic else None
    policy = LMPolicy(lm.model, lm.tokenizer, critic=critic)
    head = policy.value_head if critic is None else policy.critic.head
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    rollout = ragged()
    found = outcome(policy, rollout)
    for place in ("textenv.lm.model", "algos.policies.critic"):
        monkeypatch.setattr(f"{place}.without_padding", lambda run, tokens, length, model: padding._plain(run, tokens))
    expected = outcome(policy, rollout)
    for own, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=1e-5)
    scale = expected[2].abs().max()
    assert scale > 1e-3
    torch.testing.assert_close(found[2] / scale, expected[2] / scale, atol=2e-5, rtol=0)


def needed(rollout):
    """How many positions have to be read."""
    return int((rollout["mask"] * torch.arange(1, LENGTH + 1)).amax(1).clamp(min=1).sum())


@pytest.mark.parametrize("grad", [True, False])
def test_a_pack_has_no_padding(grad, monkeypatch):
    """The first passes find out whether it may be packed; of the others, without a gradient, none has more than 30."""
    monkeypatch.setattr(padding, "POSITIONS_AT_ONCE", 30)
    lm, rollout = LanguageModel(make_gpt2(), make_tokenizer(WORDS)), ragged()
    with torch.set_grad_enabled(grad):
        lm.evaluate(rollout)
        read = positions(lm, monkeypatch)
        lm.evaluate(rollout)
    assert sum(read) == needed(rollout) and (len(read) == 1) == grad


def test_groups_have_little_padding(monkeypatch):
    monkeypatch.setattr(padding, "PASS_COST", 1)
    lm, rollout = LanguageModel(make_gpt2(), make_tokenizer(WORDS), gradient_checkpointing=True), ragged()
    read = positions(lm, monkeypatch)
    lm.evaluate(rollout)
    assert needed(rollout) <= sum(read) <= 1.1 * needed(rollout) < 7 * LENGTH / 1.5 and len(read) > 1


PACKABLE = {"gpt2": True, "llama": True, "qwen3_moe": True, "bloom": False, "gemma3_text": False, "mamba2": False,
            "jamba": False, "rwkv": False, "falcon_h1": False}  # fmt: skip


@pytest.mark.parametrize("family", PACKABLE)
def test_only_models_whose_every_layer_is_causal_attention_are_packed(family):
    lm = LanguageModel(make_family(family), make_tokenizer(WORDS))
    lm.hidden(torch.zeros(2, 5, dtype=torch.int64), None, torch.tensor([5, 3]))
    assert padding._packable[trunk_of(lm.model)] == PACKABLE[family]


def spoiled(change):
    """A trunk's function that does something to the inputs of a pack."""
    lm = LanguageModel(make_family("llama"), make_tokenizer(WORDS))

    def run(**inputs):
        if "packed_rows" in inputs:
            change(inputs)
        return lm.trunk(**inputs)

    return trunk_of(lm.model), run


def test_what_does_not_keep_rows_apart_or_their_positions_is_not_packed():
    def one_row(inputs):
        count = inputs["input_ids"].numel()
        inputs["packed_rows"] = padding._Rows(torch.arange(count), torch.Size([1, count]))

    def other_positions(inputs):
        inputs["position_ids"] = torch.arange(inputs["input_ids"].numel())[None] * 3

    def unknown(inputs):
        raise TypeError("unexpected keyword argument 'packed_rows'")

    assert padding._packs_well(*spoiled(lambda inputs: None))
    for change in (one_row, other_positions, unknown):
        model, run = spoiled(change)
        assert not padding._packs_well(model, run)
        assert model.config._attn_implementation == "sdpa"


def test_windows_and_other_attention_are_not_packed():
    for change in ({"sliding_window": 4}, {"layer_types": ["sliding_attention"]}, {"_attn_implementation": "eager"}):
        model, run = spoiled(lambda inputs: None)
        for name, value in change.items():
            setattr(model.config, name, value)
        assert not padding._packs_well(model, run)


@pytest.mark.parametrize("options", [{"lora": "r=2"}, {"autocast": torch.bfloat16}, {"dtype": torch.bfloat16}], ids=str)
def test_adapters_and_low_precision_are_packed(options, monkeypatch):
    """Largest differences in a bfloat16 of 8 bits; rows that saw each other would differ by more."""
    policy = LMPolicy.load("embedded", **options)
    rollout = ragged()
    found = policy.evaluate(rollout).log_prob
    assert padding._packable[trunk_of(policy.lm.model)]
    monkeypatch.setattr("textenv.lm.model.without_padding", lambda run, tokens, *_: padding._plain(run, tokens))
    expected = policy.evaluate(rollout).log_prob
    torch.testing.assert_close(found, expected, atol=1e-4 if "lora" in options else 0.1, rtol=0)


def test_groups_have_the_fewest_positions_of_all_ways_to_cut():
    """Against all of them, by enumeration."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = sorted(rng.integers(1, 30, 7).tolist())

        def cost(sizes, lengths=lengths):
            ends = np.cumsum(sizes)
            return sum(size * lengths[end - 1] + padding.PASS_COST for size, end in zip(sizes, ends, strict=True))

        ways = [np.diff([0, *(i + 1 for i in range(6) if cuts >> i & 1), 7]).tolist() for cuts in range(2**6)]
        found = padding._group_sizes(lengths)
        assert sum(found) == 7 and cost(found) == min(map(cost, ways))


def test_ranks_that_share_weights_take_equal_numbers_of_passes(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    seen = []

    def run(input_ids, **inputs):
        seen.append(input_ids.shape)
        return torch.zeros(*input_ids.shape, 2)

    model = trunk_of(make_gpt2())
    found = without_padding(run, torch.zeros(3, 9, dtype=torch.int64), torch.tensor([1, 7, 2]), model)
    assert seen == [(3, 9)] and found.shape == (3, 9, 2)


def test_an_encoder_decoder_reads_whole_rows():
    policy = LMPolicy(make_t5(), make_tokenizer(WORDS))
    rollout = ragged()[:6]
    whole = policy.evaluate(rollout)
    for row in range(6):
        alone = policy.evaluate(rollout[row : row + 1])
        torch.testing.assert_close(alone.log_prob[0], whole.log_prob[row], atol=1e-5, rtol=0)


def test_a_critic_reads_what_the_policy_reads():
    critic = Critic.from_language_model(LanguageModel(make_gpt2(), make_tokenizer(WORDS)))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, len(WORDS), (3, 9)))
    torch.nn.init.normal_(critic.head.weight)
    found = critic.values(tokens, None, torch.tensor([2, 9, 5]))
    for row, length in enumerate((2, 9, 5)):
        torch.testing.assert_close(found[row, :length], critic.values(tokens[row : row + 1, :length])[0])
