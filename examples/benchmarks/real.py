"""Memory and speed of the recipes for SmolLM2 (examples/film_reviews.py, arithmetic.py), each in a process of its own.

On CUDA the batch is 128 answers, computed in bfloat16; elsewhere it is that of the examples, in float32.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

ITERATIONS = 3
EXAMPLES = Path(__file__).resolve().parents[1]
CASES = {
    "film reviews, PPO, LoRA": {},
    "film reviews, PPO, LoRA, critic of its own": {"critic": "copy"},
    "film reviews, PPO, all weights": {"lora": False},
    "film reviews, GRPO, LoRA": {"algorithm": "grpo"},
    "film reviews, RLOO, LoRA": {"algorithm": "rloo"},
    "arithmetic, PPO, LoRA": {"example": "arithmetic"},
}


def real(*, seeds, chosen, device):
    """Rows of the table, of the median iteration; ``seeds`` is the number of runs of each case."""
    rows = []
    for name in filter(chosen, CASES):
        command = [sys.executable, __file__, name, str(device)]
        done = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(seeds)]
        found = [json.loads(run.stdout.splitlines()[-1]) for run in done]
        rows.append({"case": name} | {key: statistics.median(run[key] for run in found) for key in found[0]})
    return rows


def measure(name, device):
    """Train for a few iterations; the first one is not counted."""
    import torch

    sys.path.insert(0, str(EXAMPLES))
    import arithmetic
    import film_reviews

    from algos import LMPolicy
    from algos.make import find_algorithm

    case = {"example": "film_reviews", "algorithm": "ppo", "lora": True, "critic": None} | CASES[name]
    cuda = device.startswith("cuda")
    policy = LMPolicy.load(
        "smollm2",
        lora=film_reviews.LORA if case["lora"] else None,
        critic=case["critic"],
        autocast=torch.bfloat16 if cuda else None,
        device=device,
    )
    if case["example"] == "arithmetic":
        env = arithmetic.make_environment("train", policy.tokenizer)
    else:
        env = film_reviews.make_environment({"VADER": film_reviews.vader()}, film_reviews.FILMS, policy.tokenizer)
    config = film_reviews.SETTINGS[case["algorithm"]]
    if cuda:
        config = replace(config, num_episodes=128, **({"minibatch_size": 64} if case["algorithm"] != "rloo" else {}))
    agent = find_algorithm(case["algorithm"])(env, policy, config, kl_coef=0.05)
    history = []

    def keep(metrics):
        history.append(metrics)
        return len(history) > ITERATIONS

    agent.learn(10**9, on_iteration=keep)
    ends = [metrics["time/seconds"] for metrics in history]
    seconds = statistics.median(after - before for before, after in zip(ends, ends[1:], strict=False))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tokens = statistics.median(metrics["rollout/steps"] for metrics in history[1:])
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else memory
    return {"seconds an iteration": seconds, "tokens a second": tokens / seconds, "peak MB": peak}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("device")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.case, arguments.device)))
