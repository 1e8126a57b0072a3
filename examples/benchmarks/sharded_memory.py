"""Bytes a parameter at the peak of an update, in process 0 of a training that shares the weights, or does not.

MALLOC_MMAP_THRESHOLD_=65536 torchrun --nproc-per-node 2 examples/benchmarks/sharded_memory.py [--shard]

The setting makes the C library return large blocks to the system at once, so that the peak is what is in use.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from algos import PPO, LMPolicy, presets
from algos.ranks import collectives
from textenv import TextVectorEnv


def resident(name):
    """Bytes of this process by its own account: VmRSS, or VmHWM for the peak since the last call."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", action="store_true")
    shard = parser.parse_args().shard
    torch.set_num_threads(1)
    torch.manual_seed(0)
    collectives.start()
    before, tokenizer = resident("VmRSS"), LMPolicy.load("embedded").tokenizer
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_layer=12, n_embd=512, n_head=8, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    )
    env = TextVectorEnv(
        prompts=["the film"], reward=lambda prompts, completions, **columns: [float(len(x)) for x in completions],
        tokenizer=tokenizer, num_envs=8, max_new_tokens=8,
    )  # fmt: skip
    config = replace(presets.TEXT, num_episodes=8, minibatch_size=4, fit_value_head=False)
    agent = PPO(env, LMPolicy(model, tokenizer), config, shard=shard)
    rollout = agent.collect()
    Path("/proc/self/clear_refs").write_text("5")
    agent.update(rollout)
    if not collectives.rank():
        count = sum(p.numel() for p in model.parameters())
        said = "shared" if shard else "whole"
        peak = (resident("VmHWM") - before) / count
        print(
            f"{collectives.world_size()} processes, {said} weights, {count / 1e6:.1f} M: {peak:.1f} bytes a parameter"
        )


if __name__ == "__main__":
    main()
