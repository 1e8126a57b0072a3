"""Adapters over a base that is no longer what its name gives: what is saved and loaded has equal logits."""

import json
import logging

import pytest
import torch

from tests.helpers.lora import MAKERS, adapted, peft
from tests.helpers.models import make_gpt2, make_llama
from textenv.lm.loading import load_causal_lm, save_model

TOKENS = torch.tensor([[1, 2, 3, 0, 4, 5]])


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def with_adapter(base, name, **options):
    """The base with a LoRA whose weights are random, so that it has an effect."""
    return adapted(name, base=base, lora_dropout=0.0, **({"init_lora_weights": False} | options)).eval()


def train_everything(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def write_past_autograd(model):
    next(iter(model.parameters())).data[1, 0] += 2.0  # leaves no trace in the version counter
    return model


def add_tokens(model):
    model.resize_token_embeddings(model.config.vocab_size + 2, mean_resizing=False)
    return model


def merge_a_first_adapter(model):
    name = model.config.model_type
    return with_adapter(model, name).merge_and_unload()


def change_a_setting(model):
    model.config.layer_norm_epsilon = 0.5
    model.config.rms_norm_eps = 0.5
    for module in model.modules():
        for field in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, field, None), float):
                setattr(module, field, 0.5)
    return model


CHANGES = (train_everything, write_past_autograd, add_tokens, merge_a_first_adapter, change_a_setting)


@pytest.fixture(params=MAKERS)
def named(request, tmp_path):
    """Kind and folder of a saved base model."""
    make, _ = MAKERS[request.param]
    make().save_pretrained(tmp_path / "model")
    return request.param, tmp_path / "model"


@pytest.mark.heavy
@pytest.mark.parametrize("by", ["this library", "transformers"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_adapter_over_a_changed_base_comes_back(change, by, named, tmp_path):
    from transformers import AutoModelForCausalLM

    name, folder = named
    base = load_causal_lm(folder) if by == "this library" else AutoModelForCausalLM.from_pretrained(folder)
    before = logits(base)
    model = with_adapter(change(base), name)
    with model.disable_adapter():
        after = logits(model)
    assert after.shape != before.shape or (after - before).abs().max() > 1e-3, "the change has no effect: no test"
    save_model(model, tmp_path / "saved")
    assert torch.equal(logits(load_causal_lm(tmp_path / "saved")), logits(model))
    again = load_causal_lm(tmp_path / "saved")
    save_model(again, tmp_path / "other")
    assert torch.equal(logits(load_causal_lm(tmp_path / "other")), logits(model))


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_changes_its_base_comes_back(start, tmp_path):
    make_llama().save_pretrained(tmp_path / "model")
    model = with_adapter(load_causal_lm(tmp_path / "model"), "llama", init_lora_weights=start)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    save_model(model, tmp_path / "saved")
    assert torch.equal(logits(load_causal_lm(tmp_path / "saved")), logits(model))


def test_an_unchanged_base_is_only_named(named, tmp_path):
    name, folder = named
    base = load_causal_lm(folder, dtype=torch.bfloat16)
    base.config.use_cache = False
    base.config.pad_token_id = 8
    save_model(with_adapter(base, name), tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert not (tmp_path / "saved" / "base").exists()


def test_a_loaded_adapter_still_only_names_its_base(named, tmp_path):
    """Of a model with a chosen ``generation_config``, as nearly all have that are published."""
    from transformers import GenerationConfig

    name, folder = named
    GenerationConfig(eos_token_id=[7], temperature=0.6, do_sample=True).save_pretrained(folder)
    save_model(with_adapter(load_causal_lm(folder), name), tmp_path / "saved")
    save_model(load_causal_lm(tmp_path / "saved"), tmp_path / "again")
    assert not (tmp_path / "again" / "base").exists()
    file = "generation_config.json"
    assert (tmp_path / "again" / file).read_text() == (tmp_path / "saved" / file).read_text()


def test_a_base_is_saved_over_its_own_folder(named, tmp_path):
    name, folder = named
    model = with_adapter(train_everything(load_causal_lm(folder)), name)
    save_model(model, tmp_path / "saved")
    again = load_causal_lm(tmp_path / "saved")
    train_everything(again)
    save_model(again, tmp_path / "saved")
    assert torch.equal(logits(load_causal_lm(tmp_path / "saved")), logits(again))


def test_a_base_with_changed_files_is_saved(named, tmp_path):
    name, folder = named
    model = with_adapter(load_causal_lm(folder), name)
    MAKERS[name][0](seed=5).save_pretrained(folder)
    save_model(model, tmp_path / "saved")
    assert torch.equal(logits(load_causal_lm(tmp_path / "saved")), logits(model))


def test_a_base_that_changes_after_saving_is_noticed(named, tmp_path, caplog):
    name, folder = named
    save_model(with_adapter(load_causal_lm(folder), name), tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        load_causal_lm(tmp_path / "saved")
    assert not caplog.records
    MAKERS[name][0](seed=5).save_pretrained(folder)
    with caplog.at_level(logging.WARNING):
        load_causal_lm(tmp_path / "saved")
    assert "was trained on other weights of its base model" in caplog.text


def test_a_merged_adapter_is_not_saved(tmp_path):
    model = with_adapter(make_llama(), "llama")
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        save_model(model, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft allows both
def test_several_adapters_are_refused():
    from textenv.lm.loading import check_adapter

    beside = with_adapter(make_gpt2(), "gpt2")
    beside.add_adapter("second", peft.LoraConfig(r=2, target_modules=["c_fc"], fan_in_fan_out=True))
    with pytest.raises(ValueError, match=r"has 2 adapters \(default, second\)"):
        check_adapter(beside)
    inner = with_adapter(make_gpt2(), "gpt2")
    over = peft.get_peft_model(inner, peft.LoraConfig(r=2, target_modules=["c_fc"], fan_in_fan_out=True))
    with pytest.raises(ValueError, match="an adapter over another adapter"):
        check_adapter(over)
