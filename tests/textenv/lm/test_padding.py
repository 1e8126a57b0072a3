"""Padding is not read: the numbers are those of each text alone."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from tensordict import TensorDict

from algos import LMPolicy
from algos.policies.critic import Critic
from tests.helpers.architectures import make_family
from tests.helpers.models import WORDS, make_gpt2, make_t5, make_tokenizer
from tests.helpers.tolerances import output_through
from textenv import LanguageModel
from textenv.lm import padding
from textenv.lm.loading import trunk_of
from textenv.lm.padding import without_padding

FAMILIES = ["gpt2", "llama", "bloom", "gemma3_text", "qwen3_moe", "mamba2", "jamba", "rwkv", "falcon_h1"]
SLOTS, LENGTH = 6, 20
few = settings(derandomize=True, deadline=None, database=None, max_examples=15)


def passes(model):
    """The shape of the tokens of each pass through the trunk from now on."""
    shapes = []
    trunk_of(model).register_forward_pre_hook(
        lambda module, given, options: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    return shapes


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


def outcome(policy, rollouts):
    """Evaluation and values at the True entries of these rollouts, and the gradient."""
    policy.zero_grad()
    parts, values = [], []
    for rollout in rollouts:
        mask = rollout["mask"]
        evaluation = [x[mask] for x in policy.evaluate(rollout)]
        (evaluation[0].square().sum() + evaluation[1].sum() + evaluation[2].square().sum()).backward()
        parts.append([x.detach() for x in evaluation])
        values.append([x[mask] for x in policy.values(rollout)])
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return columns, [torch.cat(column) for column in zip(*values, strict=True)], gradient


def each_alone(rollout):
    """Its rows up to their ends, which have nothing to leave out."""
    ends = (rollout["mask"] * torch.arange(1, rollout.shape[1] + 1)).amax(1)
    return [rollout[row : row + 1, :end] for row, end in enumerate(ends.tolist()) if end]


@pytest.mark.heavy
@pytest.mark.parametrize("critic", [False, True], ids=["head", "critic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_are_scored_as_whole_ones_are(family, critic):
    lm = LanguageModel(make_family(family), make_tokenizer(WORDS))
    critic = Critic.from_language_model(lm) if critic else None
    policy = LMPolicy(lm.model, lm.tokenizer, critic=critic)
    head = policy.value_head if critic is None else policy.critic.head
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    rollout = ragged()
    found, expected = outcome(policy, [rollout]), outcome(policy, each_alone(rollout))
    for own, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(own, other, atol=output_through(2, terms=32), rtol=0)
    scale = expected[2].abs().max()
    assert scale > 1e-3
    torch.testing.assert_close(found[2] / scale, expected[2] / scale, atol=2e-5, rtol=0)


def needed(rollout):
    """How many positions have to be read."""
    return int((rollout["mask"] * torch.arange(1, LENGTH + 1)).amax(1).clamp(min=1).sum())


@pytest.mark.parametrize("grad", [True, False])
def test_a_pack_has_no_padding(grad):
    """The first passes find out whether it may be packed; without a gradient, the others are of limited size."""
    lm, rollout = LanguageModel(make_gpt2(), make_tokenizer(WORDS)), torch.cat([ragged()] * 16)
    assert needed(rollout) > 2 * padding.POSITIONS_AT_ONCE
    with torch.set_grad_enabled(grad):
        lm.evaluate(rollout)
        read = passes(lm.model)
        lm.evaluate(rollout)
    positions = [rows * length for rows, length in read]
    assert sum(positions) == needed(rollout) and (len(read) == 1) == grad
    assert grad or max(positions) < 1.1 * padding.POSITIONS_AT_ONCE


def test_groups_have_little_padding():
    lm, rollout = LanguageModel(make_gpt2(), make_tokenizer(WORDS), gradient_checkpointing=True), ragged()
    rollout = torch.cat([rollout] * 16)
    read = passes(lm.model)
    lm.evaluate(rollout)
    positions = sum(rows * length for rows, length in read)
    assert needed(rollout) <= positions <= 1.1 * needed(rollout) < rollout.numel() / 1.5 and len(read) > 1


PACKABLE = {"gpt2": True, "llama": True, "qwen3_moe": True, "bloom": False, "gemma3_text": False, "mamba2": False,
            "jamba": False, "rwkv": False, "falcon_h1": False}  # fmt: skip


def is_packed(model, run):
    """Whether `without_padding` reads rows of these lengths as one pack, after its check; its output is right."""
    shapes, attention = [], model.config._attn_implementation

    def noting(**inputs):
        shapes.append(tuple(inputs["input_ids"].shape))
        return run(**inputs)

    tokens, length = torch.arange(14).view(2, 7) % len(WORDS), torch.tensor([3, 7])
    with torch.no_grad():
        found = without_padding(noting, tokens, length, model)
        plain = run(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    mask = torch.arange(7) < length[:, None]
    torch.testing.assert_close(found[mask], plain[mask], atol=2e-5, rtol=0)
    assert model.config._attn_implementation == attention
    return shapes[-1] == (1, 10)


@pytest.mark.parametrize("family", PACKABLE)
def test_only_causal_attention_is_packed(family):
    lm = LanguageModel(make_family(family), make_tokenizer(WORDS))
    assert is_packed(trunk_of(lm.model), lm.trunk) == PACKABLE[family]


def spoiled(change):
    """A trunk, and its function that does something to the inputs of a pack."""
    lm = LanguageModel(make_family("llama"), make_tokenizer(WORDS))

    def run(**inputs):
        if "packed_rows" in inputs:
            change(inputs)
        return lm.trunk(**inputs)

    return trunk_of(lm.model), run


def one_row(inputs):
    count = inputs["input_ids"].numel()
    inputs["packed_rows"] = type(inputs["packed_rows"])(torch.arange(count), torch.Size([1, count]))


def other_positions(inputs):
    inputs["position_ids"] = torch.arange(inputs["input_ids"].numel())[None] * 3


def unknown(inputs):
    raise TypeError("unexpected keyword argument 'packed_rows'")


def test_what_mixes_rows_is_not_packed():
    assert is_packed(*spoiled(lambda inputs: None))
    for change in (one_row, other_positions, unknown):
        assert not is_packed(*spoiled(change))


@pytest.mark.parametrize(
    "setting",
    [{"sliding_window": 4}, {"layer_types": ["sliding_attention"]}, {"_attn_implementation": "eager"}],
    ids=str,
)
def test_windows_and_other_attention_are_not_packed(setting):
    model, run = spoiled(lambda inputs: None)
    for name, value in setting.items():
        setattr(model.config, name, value)
    assert not is_packed(model, run)


@pytest.mark.parametrize("options", [{"lora": "r=2"}, {"autocast": torch.bfloat16}, {"dtype": torch.bfloat16}], ids=str)
def test_adapters_and_low_precision_are_packed(options):
    """Largest differences in a bfloat16 of 8 bits; rows that saw each other would differ by more."""
    policy, rollout = LMPolicy.load("embedded", **options), ragged()
    read = passes(policy.lm.model)
    found = policy.evaluate(rollout).log_prob[rollout["mask"]]
    assert read[-1] == (1, needed(rollout))
    expected = torch.cat([policy.evaluate(row).log_prob[row["mask"]] for row in each_alone(rollout)])
    torch.testing.assert_close(found, expected, atol=1e-4 if "lora" in options else 0.1, rtol=0)


rows_of_few_tokens = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=9)


def padded(rows):
    """Rows as a tensor, with tokens on their padding that must not matter, and their lengths."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [4 + i % 2] * (longest - len(row)) for i, row in enumerate(rows)])
    return tokens, torch.tensor([len(row) for row in rows])


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_moe", "bloom", "mamba2"])
@few
@example(rows=[[1, 2, 3, 1], [1, 2], [2], [1, 2], [1, 2, 1, 3, 3, 2], [2, 1], [1, 2, 3, 1]])
@given(rows=rows_of_few_tokens)
def test_rows_that_share_their_beginnings_are_read_as_alone(rows, family):
    """Outputs and the gradient are those of each row alone; tokens of few kinds, so many beginnings are shared."""
    lm = LanguageModel(make_family(family), make_tokenizer(WORDS))
    tokens, length = padded(rows)
    factors = torch.arange(1.0, 7.0).sin()

    def gradient_and_outputs(outputs):
        lm.zero_grad()
        sum((hidden.square().sum(-1) * factors[: len(hidden)]).sum() for hidden in outputs).backward()
        return torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None]), torch.cat(outputs).detach()

    together = lm.hidden(tokens, None, length, share_beginnings=True)
    gradient, outputs = gradient_and_outputs([hidden[:end] for hidden, end in zip(together, length, strict=True)])
    expected_gradient, expected = gradient_and_outputs([lm.hidden(torch.tensor([row]))[0] for row in rows])
    torch.testing.assert_close(outputs, expected, atol=2e-5, rtol=1e-5)
    scale = expected_gradient.abs().max()
    torch.testing.assert_close(gradient / scale, expected_gradient / scale, atol=2e-5, rtol=0)


@pytest.mark.heavy
@few
@given(rows=rows_of_few_tokens)
def test_each_beginning_is_read_once(rows):
    lm = LanguageModel(make_gpt2(), make_tokenizer(WORDS))
    tokens, length = padded(rows)
    lm.hidden(torch.tensor([[1], [2]]), None, torch.tensor([1, 1]), share_beginnings=True)  # finds out about the model
    read = passes(lm.model)
    lm.hidden(tokens, None, length, share_beginnings=True)
    beginnings = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert read == [(1, len(beginnings))]


def test_shared_beginnings_are_read_in_packs_of_limited_size():
    """Without gradients: all texts of four tokens of nine kinds. A beginning that two packs have is read in both."""
    lm = LanguageModel(make_gpt2(), make_tokenizer(WORDS))
    rows = torch.cartesian_prod(*[torch.arange(9)] * 4)
    length = torch.full((len(rows),), 4)
    with torch.no_grad():
        expected = lm.hidden(rows)
        read = passes(lm.model)
        found = lm.hidden(rows, None, length, share_beginnings=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    sizes = [size for number, size in read if number == 1]
    distinct = 9 + 81 + 729 + 6_561
    assert max(sizes) < 1.1 * padding.POSITIONS_AT_ONCE and distinct < sum(sizes) < 1.02 * distinct


def test_groups_have_the_fewest_positions():
    """Against all ways to cut, by enumeration; each pass costs some positions more."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths, read = sorted(rng.integers(1, 30, 7).tolist()), []

        def run(input_ids, read=read, **inputs):
            read.append(tuple(input_ids.shape))
            return torch.zeros(*input_ids.shape, 1)

        def cost(sizes, lengths=lengths):
            ends = np.cumsum(sizes)
            return sum(size * lengths[end - 1] + padding.PASS_COST for size, end in zip(sizes, ends, strict=True))

        without_padding(run, torch.zeros(7, 30, dtype=torch.int64), torch.tensor(lengths))
        ways = [np.diff([0, *(i + 1 for i in range(6) if cuts >> i & 1), 7]).tolist() for cuts in range(2**6)]
        assert sum(rows for rows, _ in read) == 7
        assert sum(rows * length + padding.PASS_COST for rows, length in read) == min(map(cost, ways))


def test_ranks_take_equal_numbers_of_passes(monkeypatch):
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
    rounding = output_through(2, terms=32)  # two layers, and a head of weights about 1 on 32 features
    for row, length in enumerate((2, 9, 5)):
        alone = critic.values(tokens[row : row + 1, :length])[0]
        torch.testing.assert_close(found[row, :length], alone, atol=rounding, rtol=0)
