"""Merging an adapter into the weights, also into weights that are tied; compared with peft, which does not merge."""

import pytest
import torch

from tests.helpers.lora import peft
from tests.helpers.models import WORDS, make_bart, make_gemma, make_gpt2, make_llama, make_t5, make_tokenizer
from textenv.lm.loading import check_adapter, load_causal_lm, merged

TOKENS = torch.tensor([[1, 2, 3, 0, 4, 5]])
MODELS = {
    "gpt2": (make_gpt2, "wte", "c_attn"),
    "llama": (lambda: make_llama(tie_word_embeddings=True), "embed_tokens", "q_proj"),
    "untied llama": (make_llama, "embed_tokens", "q_proj"),
    "gemma": (make_gemma, "embed_tokens", "q_proj"),
    "t5": (make_t5, "shared", "q"),
    "bart": (make_bart, "shared", "q_proj"),
}
"""How a model is made, the name of its embedding, and that of a layer inside."""
ADAPTERS = {
    "no embedding": lambda embedding: {},
    "the embedding": lambda embedding: {"targets": [embedding]},
    "the embedding of each half": lambda embedding: {"targets": ["embed_tokens"]},
    "the output": lambda embedding: {"targets": ["lm_head"]},
    "both": lambda embedding: {"targets": [embedding, "lm_head"]},
    "the embedding whole": lambda embedding: {"modules_to_save": [embedding]},
    "the output whole": lambda embedding: {"modules_to_save": ["lm_head"]},
    "both whole": lambda embedding: {"modules_to_save": [embedding, "lm_head"]},
    "both whole and tied": lambda embedding: {"modules_to_save": [embedding, "lm_head"], "ensure_weight_tying": True},
    "some tokens": lambda embedding: {"trainable_token_indices": [1, 4]},
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of what is tested here


def adapted(kind, *, targets=(), **options):
    """A model with an adapter of random weights on an inner layer and on these targets."""
    make, _, inner = MODELS[kind]
    task = "SEQ_2_SEQ_LM" if kind in ("t5", "bart") else "CAUSAL_LM"
    common = dict(r=2, fan_in_fan_out=kind == "gpt2", init_lora_weights=False, task_type=task)
    torch.manual_seed(0)
    model = peft.get_peft_model(make(), peft.LoraConfig(target_modules=[inner, *targets], **common, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def logits(model):
    decoder = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=TOKENS, **decoder).logits


@pytest.mark.heavy
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", MODELS)
def test_merged_and_adapted_logits_are_equal(kind, adapter, tmp_path):
    _, embedding, _ = MODELS[kind]
    if kind in ("t5", "bart") and adapter in ("some tokens", "both whole and tied"):
        pytest.skip("peft cannot make or run it")
    model = adapted(kind, **ADAPTERS[adapter](embedding))
    expected = logits(model)
    merged(model).save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_causal_lm(tmp_path)), expected, atol=1e-3, rtol=0)
    assert torch.equal(logits(model), expected), "merging changed the model itself"


@pytest.mark.parametrize(("adapter", "tied"), [("no embedding", True), ("the output", False)])
def test_weights_stay_tied_unless_adapted_apart(adapter, tied, tmp_path):
    merged(adapted("llama", **ADAPTERS[adapter]("embed_tokens"))).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path)
    assert model.config.tie_word_embeddings is tied
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied


def test_a_merge_with_other_logits_writes_nothing(tmp_path):
    from algos import LMPolicy

    model = adapted("llama", targets=["lm_head"], trainable_token_indices=[1, 4])  # peft drops one of the two
    with pytest.raises(ValueError, match="has other logits than the model with its adapter beside the weights"):
        LMPolicy(model, make_tokenizer(WORDS)).merge(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_tied_by_memory_are_refused(kind):
    _, embedding, _ = MODELS[kind]
    model = adapted(kind, targets=[embedding, "lm_head"], ensure_weight_tying=True)
    with pytest.raises(ValueError, match="ensure_weight_tying=True for tied layers among its target_modules"):
        check_adapter(model)
