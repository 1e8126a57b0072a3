"""Peak memory that `algos plan` estimates against what a fresh process took: one table, one row a configuration.

    python examples/benchmarks/plan_check.py                  # five runs, about 2 minutes on a free core
    python examples/benchmarks/plan_check.py --device cuda    # what torch allocated on the GPU

Each process trains a model of random weights for two iterations. Measured is the peak of its resident memory, without
what stood after the imports and two iterations of a tiny model. glibc gives freed memory back at once
(MALLOC_MMAP_THRESHOLD_=131072), unless that variable is set; 0 stands for glibc's own changing threshold.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from peak_memory import PeakMemory

from algos import PPOConfig, presets

LLAMA = dict(model_type="llama", hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
             num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True)  # fmt: skip
GPT2 = dict(model_type="gpt2", n_embd=512, n_layer=8, n_head=8, n_positions=512)
LARGE = LLAMA | dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12)
PROMPT, NEW = 96, 32
CASES = {
    "PPO, value head": (LLAMA, 16_384, {}),
    "PPO, a critic of its own": (LLAMA, 16_384, {"critic": "copy"}),
    "GRPO, no reference": (GPT2, 32_768, {"algorithm": "grpo", "kl_coef": None}),
    "PPO, LoRA": (LARGE, 32_768, {"lora": "r=16"}),
    "PPO, LoRA, gradient checkpointing": (LARGE, 32_768, {"lora": "r=16", "gradient_checkpointing": True}),
}
TINY = LLAMA | dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)


def write_model(settings, vocabulary, folder):
    """A folder with a model of random weights, and a tokenizer of words 0, 1, 2, ..."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = {str(i): i for i in range(vocabulary - 1)} | {"<eos>": vocabulary - 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    config = AutoConfig.for_model(**settings, vocab_size=vocabulary, eos_token_id=vocabulary - 1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def run_of(folder, *, algorithm="ppo", num_episodes=16, kl_coef=0.05, **options):
    """What both sides are given: options of `algos train`."""
    config = presets.TEXT if algorithm == "ppo" else presets.TEXT_GRPO
    config = replace(config, num_episodes=num_episodes, minibatch_size=8, num_epochs=1)
    own = dict(lora=None, critic=None, gradient_checkpointing=False, autocast=False, dtype="float32", num_envs=16,
               shard=False)  # fmt: skip
    return SimpleNamespace(model=str(folder), config=config, kl_coef=kl_coef, **(own | options))


def train(run, device):
    """Two iterations, with answers of full length (nearly: EOS is one token of many)."""
    from algos import LMPolicy
    from algos.make import find_algorithm
    from textenv.envs.vector_env import TextVectorEnv

    policy = LMPolicy.load(
        run.model, lora=run.lora, critic=run.critic, gradient_checkpointing=run.gradient_checkpointing, device=device
    )
    env = TextVectorEnv(
        prompts=[[i + 2] * PROMPT for i in range(8)], tokenizer=policy.tokenizer, num_envs=run.num_envs,
        reward=lambda prompts, completions, **_: [float(len(x) % 7) for x in completions],
        max_prompt_tokens=PROMPT, max_new_tokens=NEW,
    )  # fmt: skip
    kind = find_algorithm("ppo" if isinstance(run.config, PPOConfig) else "grpo")
    agent = kind(env, policy, run.config, kl_coef=run.kl_coef)
    agent.learn(10**9, on_iteration=lambda metrics: metrics["iteration"] >= 2)


COLUMNS = ("run", "parameters, M", "estimate, MB", "its phase", "measured, MB", "estimate / measured")


def measure(name, device):
    """Print the peak in bytes, on this process's CPU or GPU."""
    settings, vocabulary, options = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        write_model(TINY, 64, folder)
        train(run_of(folder, **(options | {"num_episodes": 8})), device)
        write_model(settings, vocabulary, folder)
        memory = PeakMemory()
        memory.start()
        before = 0
        if device == "cuda":
            gc.collect()
            before = torch.cuda.memory_allocated()
            print("allocated before, mostly by cuBLAS:", before, file=sys.stderr)
            torch.cuda.reset_peak_memory_stats()
        train(run_of(folder, **options), device)
    peak = memory.metrics()["above_mb"] * 2**20
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
    print(int(peak))


def main(device, chosen, file=None):
    from page import machine, save_table

    from algos.lab.memory_plan import peaks

    about, rows = machine("python " + " ".join(sys.argv)), []
    print("| " + " | ".join(COLUMNS) + " |")
    print("| --- " * len(COLUMNS) + "|")
    for name, (settings, vocabulary, options) in CASES.items():
        if chosen not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_model(settings, vocabulary, folder)
            phases = peaks(run_of(folder, **options), prompt=PROMPT, new=NEW, cuda=device == "cuda")
        estimate, phase = max((parts.total(), name) for name, parts in phases.items())
        command = [sys.executable, __file__, "--measure", name, "--device", device]
        settled = {"MALLOC_MMAP_THRESHOLD_": "131072"} | os.environ | {"OMP_NUM_THREADS": "1"}
        settled = {name: x for name, x in settled.items() if (name, x) != ("MALLOC_MMAP_THRESHOLD_", "0")}
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=settled)
        peak = int(ended.stdout.splitlines()[-1])
        millions = phases["generate"]["policy"] / 4e6
        cells = (
            name,
            f"{millions:.0f}",
            f"{estimate / 1e6:,.0f}",
            phase,
            f"{peak / 1e6:,.0f}",
            f"{estimate / peak:.2f}",
        )
        print("|", " | ".join(cells), "|", flush=True)
        rows.append(cells)
    if file is not None:
        save_table(file, COLUMNS, rows, about, kind="memory")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="a part of the names of the runs to do")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.measure:
        measure(given.measure, given.device)
    else:
        main(given.device, given.only, given.json)
