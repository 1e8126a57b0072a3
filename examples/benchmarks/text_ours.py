"""Our side of what needs a process of its own: a PPO iteration, and log-probs at 50,257 tokens. Run by ``text.py``.

python examples/benchmarks/text_ours.py iteration --size tiny --iters 4

Prints one line ``RESULT {...}``, as the peers' scripts do. Seconds are the processor's.
"""

import argparse
import json
import time

import torch
from peak_memory import PeakMemory
from text_task import SHAPES, Shape, make_agent, make_model

from textenv.lm.model import LanguageModel

ROWS, LENGTH = 8, 256
HEAD = Shape(vocabulary=50257, layers=1, width=768, heads=12)
"""Of the log-probs; the peers' script has the output layer alone."""
CHUNK = 128
"""Entries whose logits are in memory at a time, in the floor."""


def iteration(options):
    """Seconds and memory of iterations after the first one, and the mean length of their answers."""
    agent = make_agent(
        SHAPES[options.size], algorithm=options.algorithm, ending=options.ending, learning_rate=options.lr
    )
    memory = PeakMemory()
    memory.start()
    clock, steps = [], []

    def enough(metrics):
        clock.append(time.process_time())
        steps.append(metrics["rollout/steps"])
        return len(clock) > options.iters

    agent.learn(10**9, on_iteration=enough)
    seconds, length = (clock[-1] - clock[0]) / options.iters, sum(steps) / len(steps) / agent.config.num_episodes
    return {"s_per_iter": seconds, "length": length} | memory.metrics()


def log_probs(options):
    """Seconds and megabytes of `LanguageModel.score_actions` without and with a gradient: 8 x 256 entries."""
    lm = LanguageModel(*make_model(HEAD))
    weight = lm.model.get_output_embeddings().weight
    hidden = torch.randn(ROWS * LENGTH, HEAD.width).mul_(0.5).requires_grad_()
    action = torch.randint(HEAD.vocabulary, (ROWS * LENGTH,))
    # There before, as in the peers' script; the pages of zeros come into being when they are written.
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    memory = PeakMemory()
    memory.start()
    with torch.no_grad():
        start = time.process_time()
        lm.score_actions(hidden, action=action, allowed=None)
        no_grad_s = time.process_time() - start
    no_grad_mb = memory.metrics()["above_mb"]
    start = time.process_time()
    log_prob, _ = lm.score_actions(hidden, action=action, allowed=None)
    log_prob.mean().backward()
    return {
        "no_grad_s": no_grad_s,
        "fwd_bwd_s": time.process_time() - start,
        "extra_peak_mb_no_grad": no_grad_mb,
        "extra_peak_mb_fwd_bwd": memory.metrics()["above_mb"],
        "gnorm": weight.grad.norm().item(),
    }


def products(options):
    """Seconds of the matrix products of the output layer, in chunks: the floor of log-probs."""
    hidden, weight = torch.randn(ROWS * LENGTH, HEAD.width), torch.randn(HEAD.vocabulary, HEAD.width)
    buffer = torch.empty(CHUNK, HEAD.vocabulary)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        for chunk in hidden.split(CHUNK):
            torch.mm(chunk, weight.T, out=buffer)
        seconds.append(time.process_time() - start)
    return {"s": min(seconds)}


CASES = {"iteration": iteration, "log-probs": log_probs, "products": products}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--size", choices=list(SHAPES), default="tiny")
    parser.add_argument("--iters", type=int, default=4)
    parser.add_argument("--algorithm", choices=["ppo", "grpo"], default="ppo")
    parser.add_argument("--ending", type=float, help="probability of EOS after every text")
    parser.add_argument("--lr", type=float)
    torch.set_num_threads(1)
    options = parser.parse_args()
    print("RESULT " + json.dumps(CASES[options.case](options)), flush=True)
