"""Frozen layers read a row once: the numbers are those of a whole pass, until a frozen weight changes."""

import copy
import pickle

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from tests.helpers.architectures import make_family
from tests.helpers.models import WORDS, make_gpt2, make_llama, make_tokenizer
from textenv import LanguageModel
from textenv.lm.frozen_layers import FrozenLayers
from textenv.lm.memory import layers_of

few = settings(derandomize=True, deadline=None, database=None, max_examples=15)
rows_of_few_tokens = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=6)


def padded(rows):
    """Rows as a tensor, with tokens on their padding that must not matter, and their lengths."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [4 + i % 2] * (longest - len(row)) for i, row in enumerate(rows)])
    return tokens, torch.tensor([len(row) for row in rows])


def with_trained_last_layer(model):
    """A language model whose last layer alone trains."""
    model.requires_grad_(False)
    layers_of(model)[-1].requires_grad_(True)
    return LanguageModel(model, make_tokenizer(WORDS))


def tokens_in_first_layer(lm):
    """Numbers of tokens that the first layer computes from now on."""
    counts = []
    first_linear = next(module for module in layers_of(lm.model)[0].modules() if hasattr(module, "weight"))

    class Counting(type(first_linear)):  # a hook would be seen, and turn the memory off
        def forward(self, inputs):
            counts.append(inputs.shape[-2])
            return super().forward(inputs)

    first_linear.__class__ = Counting
    return counts


def read(lm, rows, memory=None):
    """Outputs of all tokens, one row after another."""
    tokens, length = padded(rows)
    hidden = lm.hidden(tokens, None, length, share_beginnings=True, frozen_layers=memory)
    return torch.cat([row[:end] for row, end in zip(hidden, length, strict=True)])


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_moe", "bloom", "mamba2", "gemma3_text"])
@few
@example(first=[[1, 2, 3, 1], [1, 2], [2], [1, 2]], second=[[1, 2, 3], [1, 2, 3, 1], [3, 1, 1, 2, 3, 2]])
@given(first=rows_of_few_tokens, second=rows_of_few_tokens)
def test_outputs_and_gradients_are_those_of_whole_passes(family, first, second):
    """Of rows that are new and of rows that are known, while the last layer changes; families without packs as well."""
    lm = with_trained_last_layer(make_family(family))
    memory = FrozenLayers()
    for rows in (first, second, first):
        lm.zero_grad()
        expected = torch.cat([lm.hidden(torch.tensor([row]))[0] for row in rows])
        factors = torch.arange(1.0, expected.numel() + 1).sin().view_as(expected)
        (expected * factors).sum().backward()
        trained = [parameter for parameter in lm.parameters() if parameter.grad is not None]
        expected_gradient = torch.cat([parameter.grad.flatten() for parameter in trained])

        lm.zero_grad()
        outputs = read(lm, rows, memory)
        (outputs * factors).sum().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in trained])
        torch.testing.assert_close(outputs, expected, atol=2e-5, rtol=1e-5)
        scale = expected_gradient.abs().max()
        assert scale > 0
        torch.testing.assert_close(gradient / scale, expected_gradient / scale, atol=1e-4, rtol=0)
        with torch.no_grad():
            for parameter in trained:
                parameter.mul_(1.1)


@pytest.mark.heavy
@few
@given(first=rows_of_few_tokens, second=rows_of_few_tokens)
def test_frozen_layers_read_each_row_once(first, second):
    lm = with_trained_last_layer(make_llama())
    memory = FrozenLayers()
    read(lm, [[1]], memory)  # finds out about the model
    counts = tokens_in_first_layer(lm)
    read(lm, first, memory)
    read(lm, second, memory)
    rows = {tuple(row) for row in first + second} - {(1,)}
    assert sum(counts) == sum(map(len, rows))


def test_numbers_do_not_depend_on_the_rows_beside():
    """To the bit, so that a resumed training, which has to read the rows again, has the same."""
    lm = with_trained_last_layer(make_llama())
    memory = FrozenLayers()
    tokens, length = padded([[1, 2, 3, 1], [2, 1], [1, 2, 3]])
    assert memory.can_skip(lm.model.model, lm.trunk)
    together = memory.outputs(lm.trunk, tokens, length)
    other_memory = FrozenLayers()
    assert other_memory.can_skip(lm.model.model, lm.trunk)
    alone = other_memory.outputs(lm.trunk, tokens[2:, :3], length[2:])
    assert torch.equal(together[2:, :3], alone) and together[2, :3].abs().min() > 0
    assert (together[2, 3] == 0).all()


def steer(module, inputs, output):
    """A hook that changes what a layer gives."""
    return output + 1


CHANGES = {
    "frozen matrix": lambda llama: llama.layers[0].mlp.up_proj.weight[3:].neg_(),  # not the first row
    "its data": lambda llama: llama.layers[0].mlp.up_proj.weight.data.neg_(),
    "norm's data": lambda llama: llama.layers[0].input_layernorm.weight.data[1:].neg_(),
    "embedding": lambda llama: llama.embed_tokens.weight.neg_(),
    "frozen matrix that the last layer has, too": lambda llama: llama.layers[0].mlp.gate_proj.weight.neg_(),
    "buffer": lambda llama: llama.rotary_emb.inv_freq.add_(1),
    "hook on a layer": lambda llama: llama.layers[0].register_forward_hook(steer),
    "hook in a layer": lambda llama: llama.layers[0].mlp.register_forward_hook(steer),
    "hook on the embedding": lambda llama: llama.embed_tokens.register_forward_hook(steer),
    "other last layer": lambda llama: llama.layers.__setitem__(-1, copy.deepcopy(llama.layers[0])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_frozen_layers_are_seen(change):
    lm = with_trained_last_layer(make_llama())
    first, *_, last = lm.model.model.layers
    if change == "frozen matrix that the last layer has, too":
        last.mlp.gate_proj.weight = first.mlp.gate_proj.weight.requires_grad_(False)
    memory = FrozenLayers()
    rows = [[1, 2, 3], [1, 2]]
    before = read(lm, rows, memory)
    assert memory.can_skip(lm.model.model, lm.trunk)
    with torch.no_grad():
        CHANGES[change](lm.model.model)
    after = read(lm, rows, memory)
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(after, read(lm, rows), atol=2e-5, rtol=1e-5)
    new_rows = [[3, 3, 1]]
    torch.testing.assert_close(read(lm, new_rows, memory), read(lm, new_rows), atol=2e-5, rtol=1e-5)


def test_layers_that_begin_to_train_get_their_gradient():
    lm = with_trained_last_layer(make_llama())
    memory = FrozenLayers()
    read(lm, [[1, 2, 3]], memory)
    first_layer = layers_of(lm.model)[0]
    first_layer.requires_grad_(True)
    read(lm, [[1, 2, 3]], memory)[:, 0].sum().backward()
    assert first_layer.mlp.up_proj.weight.grad.abs().max() > 0


def test_what_autocast_has_read_is_not_used_without_it():
    lm = with_trained_last_layer(make_llama())
    memory = FrozenLayers()
    with torch.autocast("cpu", torch.bfloat16):
        read(lm, [[1, 2, 3]], memory)
    torch.testing.assert_close(read(lm, [[1, 2, 3]], memory), read(lm, [[1, 2, 3]]), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))])
def test_copies_have_room_for_outputs_but_none(copied):
    lm = with_trained_last_layer(make_llama())
    memory = FrozenLayers(12_345)
    read(lm, [[1, 2, 3]], memory)
    assert len(pickle.dumps(memory)) < 1_000 and copied(memory).max_bytes == 12_345


def test_nothing_is_skipped_where_all_layers_train():
    lm = LanguageModel(make_gpt2(), make_tokenizer(WORDS))
    memory = FrozenLayers()
    read(lm, [[1, 2]], memory)
    counts = tokens_in_first_layer(lm)
    read(lm, [[1, 2]], memory)
    assert sum(counts) == 2


def test_memory_is_limited():
    """With room for two rows of three tokens the first two are kept, the third is read each time; all are right."""
    lm = with_trained_last_layer(make_llama())
    memory = FrozenLayers(2 * 3 * lm.hidden_size * 4)
    rows = [[1, 2, 3], [3, 2, 1], [2, 2, 2]]
    torch.testing.assert_close(read(lm, rows, memory), read(lm, rows), atol=2e-5, rtol=1e-5)
    counts = tokens_in_first_layer(lm)
    outputs = read(lm, rows, memory)
    assert sum(counts) == 3
    torch.testing.assert_close(outputs, read(lm, rows), atol=2e-5, rtol=1e-5)


def test_what_inference_has_read_can_be_trained_on():
    lm = with_trained_last_layer(make_llama())
    memory = FrozenLayers()
    with torch.inference_mode():
        read(lm, [[1, 2, 3]], memory)
    read(lm, [[1, 2, 3]], memory).sum().backward()
    assert any(parameter.grad is not None for parameter in lm.parameters())
