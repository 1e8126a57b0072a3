"""Memory of a training before it is started: counts against real models, optimizers, caches and logits."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, MixtralConfig, T5Config

from algos import LMPolicy, presets
from algos.cli import main
from algos.lab.memory_plan import MemoryEstimate, check_fits, peaks
from tests.helpers.models import WORDS, make_gpt2, make_llama, make_tokenizer

SIZES = dict(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)  # fmt: skip
MODELS = {
    "llama": make_llama,
    "gpt2": make_gpt2,
    "mixtral": lambda: AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=4)),
    "t5": lambda: AutoModelForSeq2SeqLM.from_config(T5Config(vocab_size=40, d_model=32, d_ff=64, num_layers=2, d_kv=8)),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def run_of(folder, **options):
    config = replace(presets.TEXT, num_episodes=8, minibatch_size=4)
    own = dict(lora=None, critic=None, gradient_checkpointing=False, autocast=False, dtype="float32")
    own |= dict(num_envs=4, shard=False)
    return SimpleNamespace(model=str(folder), config=config, kl_coef=0.1, device=None, **(own | options))


def size(tensors):
    return sum(x.nbytes for x in tensors)


@pytest.mark.heavy
def test_counts_are_those_of_real_model_and_adam(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    standing = MemoryEstimate(run_of(tmp_path)).now
    assert standing["policy"] == standing["reference"] == size([*model.parameters(), *model.buffers()])
    head = size([torch.zeros(model.get_output_embeddings().weight.shape[1] + 1)])
    assert standing["critic"] == head and standing["gradients"] == size(model.parameters()) + head
    adam = torch.optim.AdamW([torch.nn.Parameter(x.detach().clone()) for x in model.parameters()], fused=True)
    for p in adam.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    adam.step()
    moments = [x for state in adam.state.values() for name, x in state.items() if name != "step"]
    assert standing["Adam"] == size(moments) + 2 * head
    assert MemoryEstimate(run_of(tmp_path, dtype="bfloat16")).now["gradients"] == size(model.parameters()) // 2 + head


@pytest.mark.heavy
def test_every_phase_has_a_peak_of_positive_parts(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    found = peaks(run_of(tmp_path), prompt=6, new=5)
    assert list(found) == ["generate", "score", "update", "save"]
    assert all(min(parts.values()) > 0 and "policy" in parts for parts in found.values())


def test_an_adapter_trains_alone_a_critic_is_a_copy(tmp_path):
    pytest.importorskip("peft")
    model = make_llama()
    model.save_pretrained(tmp_path)
    make_tokenizer(WORDS).save_pretrained(tmp_path)
    policy = LMPolicy.load(tmp_path, lora="r=4", critic="copy")
    trained = size(p for p in policy.parameters() if p.requires_grad)
    standing = MemoryEstimate(run_of(tmp_path, lora="r=4", critic="copy")).now
    assert standing["gradients"] == trained and standing["Adam"] == 2 * trained
    assert standing["reference"] == size(p for p in policy.lm.parameters() if p.requires_grad)
    assert standing["policy"] == size([*policy.lm.parameters(), *policy.lm.buffers()])


@pytest.mark.heavy
def test_cache_and_logits_are_as_counted_by_hand(tmp_path):
    make_llama().config.save_pretrained(tmp_path)
    found = peaks(run_of(tmp_path, num_envs=3), prompt=6, new=5)
    layers, heads, width, slots, length, float32 = 2, 2, 8, 3, 11, 4
    keys_and_values = 2 * layers * heads * width * slots * length * float32
    assert keys_and_values <= found["save"]["cache"] < keys_and_values + 200  # with positions and two numbers
    assert found["update"]["logits"] >= 4 * 5 * len(WORDS) * float32  # of 4 answers of 5 tokens


@pytest.mark.heavy
def test_switches_save_what_they_say(tmp_path):
    make_llama().config.save_pretrained(tmp_path)
    plain, recomputed, divided = (
        peaks(run, prompt=32, new=32, **options)["update"]
        for run, options in (
            (run_of(tmp_path), {}),
            (run_of(tmp_path, gradient_checkpointing=True), {}),
            (run_of(tmp_path, shard=True), {"processes": 4}),
        )
    )
    assert recomputed["activations"] < 0.7 * plain["activations"]
    assert divided["Adam"] == -(-plain["Adam"] // 4) and divided["activations"] < plain["activations"]


@pytest.mark.long
def test_the_command_says_what_helps_until_it_fits(tmp_path, capsys):
    make_llama().config.save_pretrained(tmp_path)
    words = ["plan", "--model", str(tmp_path), "--max-prompt-tokens", "32", "--max-new-tokens", "16", "--json"]
    main([*words, "--gpu-memory", "1"])
    easy = json.loads(capsys.readouterr().out)
    assert easy["fits"] and not easy["options"] and easy["phase"] in easy["phases"]
    main([*words, "--gpu-memory", str(1.1 * easy["peak GiB"] + 1 / 8)])  # and 128 MiB for cuBLAS
    tight = json.loads(capsys.readouterr().out)
    assert not tight["fits"] and tight["options"] and tight["fits with these options"]
    assert tight["peak GiB"] == easy["peak GiB"]
    main([*words, "--gpu-memory", "1e-6"])
    assert json.loads(capsys.readouterr().out)["fits with these options"] is False
    for wrong, said in (["CartPole-v1"], "plan is for text"), (["--gpus", "0"], "--gpus is 0"):
        with pytest.raises(SystemExit):
            main([*words[:3], *wrong])
        assert said in capsys.readouterr().err


def test_a_run_too_large_is_refused_before_loading(tmp_path):
    config = make_llama().config
    config.hidden_size, config.num_hidden_layers, config.vocab_size = 2**14, 4, 2**20
    config.intermediate_size = 2**19
    config.save_pretrained(tmp_path)
    check_fits(run_of(tmp_path))  # no weights are there: small
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(2**42)  # has no blocks on the disk
    with pytest.raises(ValueError, match=r"needs \d+\.\d GiB before it computes anything \(policy .*algos plan"):
        check_fits(run_of(tmp_path))
