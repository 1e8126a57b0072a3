"""What each part of a language model adds to a difference of logits, and what of a change it explains."""

import copy

import numpy as np
import pytest
import torch

from algos.lab.insight.attribution import Place, attribute, patch
from algos.lab.insight.blocks import Blocks
from algos.lab.insight.language import interpret_language, token_ids
from tests.helpers.architectures import make_family
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_bart, make_gpt2, make_llama, make_tokenizer
from textenv.lm.model import LanguageModel

ROWS = [[0, 1, 2, 5], [3, 1], [4, 4, 4, 2, 6, 0]]
PAIR = ([5, 0], [6])
FAMILIES = [
    "gpt2",
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "opt",
    "gpt_neox",
    "phi",
    "bloom",
]


def language_model(model):
    return LanguageModel(model, make_tokenizer(WORDS))


def rows_of(finding, *keys):
    return {
        tuple(row[finding.columns.index(key)] for key in keys): dict(zip(finding.columns, row, strict=True))
        for row in finding.rows
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_contributions_add_up_to_the_logit_difference(family):
    model = make_family(family)
    if family == "gemma2":  # the difference is that before the cap
        model.config.final_logit_softcapping = None
    blocks = Blocks(language_model(model))
    found = attribute(blocks, ROWS, PAIR, neurons=True)
    with torch.no_grad():
        last = torch.stack([model(torch.tensor([row])).logits[0, -1] for row in ROWS])
    own = last[:, PAIR[0]].mean(1) - last[:, PAIR[1]].mean(1)
    torch.testing.assert_close(found.difference, own, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.parts.sum(1), own, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.lens[:, -1], own, rtol=1e-3, atol=1e-5)
    layers = len(blocks.blocks)
    torch.testing.assert_close(found.heads.sum(2), found.parts[:, :layers], rtol=1e-3, atol=1e-5)
    assert found.neurons.shape[:2] == (len(ROWS), layers)


def test_a_capped_logit_is_read_before_its_cap():
    model = make_family("gemma2")
    capped = model(torch.tensor(ROWS[:1])).logits[0, -1].double()
    found = attribute(Blocks(language_model(model)), ROWS[:1], ([5], [6]))
    before = 2 * torch.atanh(capped / 2)
    assert found.difference.item() == pytest.approx((before[5] - before[6]).item(), rel=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "opt", "gpt_neox"])
def test_attention_is_the_models_own_and_is_restored(family):
    model = make_family(family)
    before = model.config._attn_implementation
    patterns = Blocks(language_model(model)).patterns(ROWS[0])
    assert model.config._attn_implementation == before
    model.set_attn_implementation("eager")
    own = model(torch.tensor(ROWS[:1]), output_attentions=True).attentions
    torch.testing.assert_close(patterns, torch.stack(own)[:, 0, :, -1])


@pytest.mark.heavy
@pytest.mark.parametrize("make", [make_gpt2, make_llama])
@pytest.mark.filterwarnings("ignore")
def test_parts_and_heads_are_those_of_transformer_lens(make):
    lens = pytest.importorskip("transformer_lens.model_bridge")
    model, row = make(), ROWS[2]
    options = dict(tokenizer=make_tokenizer(WORDS), device="cpu", dtype=torch.float32)
    theirs = lens.TransformerBridge.boot_transformers("tiny", hf_model=copy.deepcopy(model), **options)
    theirs.set_use_attn_result(True)
    _, cache = theirs.run_with_cache(torch.tensor([row]))
    blocks = Blocks(language_model(model))
    reading, patterns, heads = blocks.read([row]), blocks.patterns(row), attribute(blocks, [row], PAIR).heads[0]
    scale = cache["ln_final.hook_scale"][0, -1]  # the divisor of the final norm
    weight = model.get_output_embeddings().weight
    direction = weight[PAIR[0]].mean(0) - weight[PAIR[1]].mean(0)
    for layer in range(2):
        for part, name in (("attention", "attn"), ("mlp", "mlp")):
            written = reading[blocks.writers[part][layer].last][1][0]
            torch.testing.assert_close(written, cache[f"blocks.{layer}.hook_{name}_out"][0, -1], atol=1e-4, rtol=1e-4)
        theirs_patterns = cache[f"blocks.{layer}.attn.hook_pattern"][0, :, -1]
        torch.testing.assert_close(patterns[layer], theirs_patterns, atol=1e-4, rtol=1e-4)
        results = cache[f"blocks.{layer}.attn.hook_result"][0, -1]
        if make is make_gpt2:  # a LayerNorm takes off the mean
            results = results - results.mean(-1, keepdim=True)
        results = results * blocks.norm.weight / scale
        torch.testing.assert_close(heads[layer, :-1], results @ direction, atol=1e-4, rtol=1e-4)


def planted(seed, layer=1, head=1):
    """Two models that differ in one head, which writes the direction of "good" minus "bad" wherever it looks."""
    base = make_llama(seed=seed)
    tuned = make_llama(seed=seed)
    with torch.no_grad():
        attention = tuned.model.layers[layer].self_attn
        direction = tuned.lm_head.weight[5] - tuned.lm_head.weight[6]
        own = attention.o_proj.weight[:, 8 * head : 8 * head + 8]
        own += 2 * torch.outer(direction / direction.norm(), torch.ones(8))
    return language_model(base), language_model(tuned)


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_head_ranks_first_and_patches_away(seed):
    base, tuned = planted(seed)
    prompts = ["a b c", "d a", "b b c .", ". a", "c d d"]
    found = {x.name: x for x in interpret_language({"base": base, "tuned": tuned}, prompts, ("good", "bad"))}
    assert found["heads"].rows[0][:2] == (1, 1)
    shares = rows_of(found["patching"], "place")
    assert shares[("layer 1 head 1",)]["share"] == pytest.approx(1, abs=1e-3)
    difference = rows_of(found["logit_difference"])[()]
    assert shares[("layer 1 head 1",)]["difference"] == pytest.approx(difference["base"], abs=1e-3)
    others = [
        row["share"] for (place,), row in shares.items() if place.count("head") == 1 and place != "layer 1 head 1"
    ]
    assert others and np.allclose(others, 0, atol=1e-3), "nothing else changed"


def test_patching_a_changed_part_gives_the_base_back():
    base, tuned = (Blocks(lm) for lm in (language_model(make_gpt2()), language_model(make_gpt2())))
    with torch.no_grad():
        tuned.blocks[1].mlp.c_proj.weight += 0.1
    difference = patch(base, tuned, ROWS, PAIR, [[Place(1, "mlp")], [Place(1, "attention")], []])
    torch.testing.assert_close(difference[:, 0], attribute(base, ROWS, PAIR).difference)
    torch.testing.assert_close(difference[:, 1], attribute(tuned, ROWS, PAIR).difference)
    torch.testing.assert_close(difference[:, 2], attribute(tuned, ROWS, PAIR).difference)


@pytest.mark.parametrize("make", [make_gpt2, make_llama])
def test_identical_models_show_no_change_at_all(make):
    models = {"base": language_model(make()), "same": language_model(make())}
    for finding in interpret_language(models, ["a b", "c"] * 3, ("good", "bad"), neurons=2):
        if "change" in finding.columns:
            first = finding.columns.index("change")
            assert {value for row in finding.rows for value in row[first:]} == {0.0}, finding.name
        elif finding.name == "patching":
            assert {row[2:] for row in finding.rows} == {("", "", "")}
        else:
            assert all(row[-1] == row[-2] for row in finding.rows)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_adapter_counts_as_its_merged_weights(name):
    pytest.importorskip("peft")
    from tests.helpers.lora import adapted
    from textenv.lm.loading import merged

    targets = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "o_proj", "down_proj"]}[name]
    model = adapted(name, target_modules=targets)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_B" in key:
                p.normal_(std=0.3)
    lms = language_model(model), language_model(merged(model))
    one, other = (attribute(Blocks(lm), ROWS, PAIR, neurons=True) for lm in lms)
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    whole = language_model(make_gpt2() if name == "gpt2" else make_llama())
    assert (attribute(Blocks(whole), ROWS, PAIR).heads - one.heads).abs().max() > 1e-2, "the adapter counts"


def test_groups_of_prompts_give_what_each_gives():
    blocks = Blocks(language_model(make_llama()))
    rows = [[1] * length for length in range(1, 30)] * 4
    assert len(list(blocks.batches(rows))) > 1
    together = attribute(blocks, rows, PAIR)
    alone = [attribute(blocks, [row], PAIR).heads for row in rows[:29]]
    torch.testing.assert_close(together.heads[:29], torch.cat(alone), atol=1e-5, rtol=1e-4)


@pytest.mark.heavy
def test_what_cannot_be_taken_apart_is_refused():
    with refused(ValueError, "BartForConditionalGeneration cannot be taken apart", "encoder-decoder"):
        Blocks(language_model(make_bart()))
    with refused(ValueError, "MambaForCausalLM cannot be taken apart", "attention blocks"):
        Blocks(language_model(make_family("mamba")))
    with refused(ValueError, "Mixtral", "its mlp"):
        Blocks(language_model(make_family("mixtral")))
    with refused(ValueError, "not float32"):
        Blocks(language_model(make_llama().to(torch.bfloat16)))
    with refused(ValueError, "do not add up"):  # its blocks multiply what they add
        Blocks(language_model(make_family("granite", residual_multiplier=0.5))).read(ROWS)
    with refused(ValueError, "do not add up"):  # its blocks pass several streams on
        Blocks(language_model(make_family("gemma3n_text"))).read(ROWS)
    one, other = language_model(make_gpt2()), language_model(make_llama())
    with refused(ValueError, "other has other layers, heads or tokens than one"):
        interpret_language({"one": one, "other": other}, ["a"], ("good", "bad"))
    with refused(ValueError, "1 different models"):
        interpret_language({"one": one}, ["a"], ("good", "bad"))
    with refused(ValueError, "in common"):
        interpret_language({"one": one, "same": one}, ["a"], ("good", "bad|good"))


def test_a_text_of_several_tokens_is_refused():
    tokenizer = make_tokenizer(WORDS)
    assert token_ids("good", tokenizer) == [5] and token_ids("good|bad", tokenizer) == [5, 6]
    with refused(ValueError, "'good bad' is 2 tokens", "'good', 'bad'"):
        token_ids("good bad", tokenizer)
    with refused(ValueError, "'great' is not in the tokenizer's vocabulary"):
        token_ids("great|good", tokenizer)
    with refused(ValueError, "'' is not in the tokenizer's vocabulary"):
        token_ids("", tokenizer)
    with refused(ValueError, "'superb' is 3 tokens", "expected one: ' superb' is one"):
        token_ids("superb", LanguageModel.load("embedded").tokenizer)
