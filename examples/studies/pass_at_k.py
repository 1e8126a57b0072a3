"""Does training raise pass@1 and lower pass@64? SmolLM2 on sums of two numbers of two digits, before and after PPO.

python examples/studies/pass_at_k.py                  # every run: about an hour of a core
python examples/studies/pass_at_k.py --seeds 1        # the untrained model, and one training
python examples/studies/pass_at_k.py --table          # the runs so far

Yue et al. 2025 found that after training with checked answers a model solves more prompts at the first try, and fewer
in many tries. Here each of 40 held-out sums is sampled 64 times, by the untrained model (seed 0) and after each
training. A run is a line of runs/pass_at_k.jsonl, with the value of each prompt. A run that is there is not repeated.
"""

import argparse
import dataclasses
import random
import re
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

from algos import PPO, LMPolicy, evaluate, presets
from algos.statistics.intervals import estimate
from textenv import TextVectorEnv

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from page import DATA, save_table_of_runs
from pictures import COLOURS, new_figure, read_table, save
from recorded_runs import RunFile, print_table

MODEL = "smollm2"
TOTAL_STEPS = 4_000
RUNS = RunFile(
    Path("runs/pass_at_k.jsonl"),
    settings=("seed", "model", "total_steps"),
    defaults={"model": MODEL, "total_steps": TOTAL_STEPS},
)
K = (1, 4, 16, 64)
TEST_PROMPTS = 40
LORA = "r=8,alpha=16,targets=q_proj+v_proj"
UNTRAINED = 0
"""Seed of the run without training."""


def sums():
    """All sums of two numbers of two digits, in random order."""
    rows = []
    for first in range(10, 100):
        for second in range(10, 100):
            prompt = f"State the final answer to the following arithmetic problem: {first} + {second} ="
            rows.append({"prompt": prompt, "sum": first + second})
    random.Random(0).shuffle(rows)
    return rows


def first_number(completion):
    """The answer that a completion gives, and that is voted on; None if there is none."""
    match = re.search(r"-?\d+", completion)
    return match.group() if match else None


def is_right(completions, sum, **columns):
    """Reward 1 for the right sum."""
    answers = [first_number(completion) for completion in completions]
    return [float(answer == str(right)) for answer, right in zip(answers, sum, strict=True)]


def make_environment(rows, tokenizer):
    """An environment of these sums; an answer is at most three digits, a space and the sign that ends it."""
    stop = ["\n", ".", ",", "="]
    return TextVectorEnv(
        prompts=rows,
        reward=is_right,
        tokenizer=tokenizer,
        num_envs=64,
        max_prompt_tokens=40,
        max_new_tokens=5,
        stop=stop,
    )


def run(*, seed, model, total_steps):
    """Train, unless the seed is that of the untrained model, and evaluate; return the values of each prompt."""
    rows = sums()
    policy = LMPolicy.load(model, lora=LORA, seed=seed)
    returns = []
    if seed != UNTRAINED:
        config = dataclasses.replace(presets.TEXT, num_episodes=32, minibatch_size=16, learning_rate=3e-4, seed=seed)
        agent = PPO(make_environment(rows[TEST_PROMPTS:], policy.tokenizer), policy, config)
        returns = [row["episode/return"] for row in agent.learn(total_steps)]
    env = make_environment(rows[:TEST_PROMPTS], policy.tokenizer)
    result = evaluate(env, policy, k=K, answer=first_number, seed=1000)
    values = {name: figure.values for name, figure in result.pass_rates.estimates().items()}
    return {"training": returns, "values": values}


def values_by_seed(*, model, total_steps):
    """Values of the runs so far of this model and length, by seed."""
    return {seed: run["values"] for (seed, *chosen), run in RUNS.read().items() if chosen == [model, total_steps]}


def table(values_of_seed):
    """Columns and rows: each pass rate before and after training, and its change; 95 % limits over the prompts."""
    untrained = values_of_seed[UNTRAINED]
    trained = [values for seed, values in values_of_seed.items() if seed != UNTRAINED]
    rows = []
    for name, untrained_values in untrained.items():
        cells = [name, _in_words(estimate(untrained_values))]
        if trained:
            after = np.mean([values[name] for values in trained], axis=0)
            by_seed = ", ".join(f"{statistics.mean(values[name]):.2f}" for values in trained)
            change = estimate(after - np.array(untrained_values))
            cells += [f"{after.mean():.3f} ({by_seed})", _in_words(change, sign="+")]
        rows.append(cells)
    header = ["", "untrained"]
    if trained:
        header += [f"trained, mean of {len(trained)} (each seed)", "change"]
    return header, rows


def _in_words(figure, sign=""):
    return f"{figure.mean:{sign}.3f} [{figure.low:{sign}.3f}, {figure.high:{sign}.3f}]"


def draw(path):
    """Draw the page's table: pass@k and maj@k by k, before the training and after it."""
    _, rows = read_table(DATA / "pass-at-k.json")
    figure, axes = new_figure("pass-at-k", size=(7, 4.5))

    # Two lines for each rate, a tick for each seed; limits only of the untrained model's pass@k
    for name, style in (("pass", "-"), ("maj", "--")):
        ks = [k for k in K if f"{name}@{k}" in rows]
        lines = [rows[f"{name}@{k}"] for k in ks]
        untrained = [cells[0] for cells in lines]
        axes.plot(
            ks, [mean for mean, _, _ in untrained], style, color=COLOURS[0], marker="o", label=f"{name}@k, untrained"
        )
        trained = [cells[1] for cells in lines]  # the mean, and each seed
        axes.plot(
            ks, [numbers[0] for numbers in trained], style, color=COLOURS[1], marker="o", label=f"{name}@k, trained"
        )
        for k, (_, *seeds) in zip(ks, trained, strict=True):
            axes.plot([k] * len(seeds), seeds, "_", color=COLOURS[1])
        if name == "pass":
            low = [numbers[1] for numbers in untrained]
            high = [numbers[2] for numbers in untrained]
            axes.fill_between(ks, low, high, color=COLOURS[0], alpha=0.15, lw=0)

    # Axes
    axes.set(xscale="log", ylim=(0, 1), xlabel="samples of each sum (k)", ylabel="fraction of the sums that pass")
    axes.set_xticks(K, K)
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def main():
    """Run what is missing, or print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--total-steps", type=int, default=TOTAL_STEPS, help="tokens to write in each training")
    parser.add_argument("--table", action="store_true", help="print the runs so far")
    parser.add_argument("--json", type=Path, help="write the runs so far to this file of docs/results/data")
    parser.add_argument("--figure", type=Path, help="draw the table of docs/results into this SVG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.figure is not None:
        draw(options.figure)
        return

    # What there is of this model and length
    chosen = {"model": options.model, "total_steps": options.total_steps}
    if options.table or options.json is not None:
        values_of_seed = values_by_seed(**chosen)
        if UNTRAINED not in values_of_seed:
            expected = f"no untrained {options.model} with {options.total_steps} steps"
            parser.exit(2, f"{RUNS.path} has {expected}: run it first\n")
        columns, rows = table(values_of_seed)
        if options.table:
            print_table(columns, rows)
        else:
            save_table_of_runs(options.json, columns, rows, "python examples/studies/pass_at_k.py", kinds=["text"])
        return

    # What is missing
    seeds = [UNTRAINED, *map(int, options.seeds.split(","))]
    for entry in RUNS.run_missing([{"seed": seed, **chosen} for seed in seeds], run):
        means = {name: round(statistics.mean(values), 3) for name, values in entry["values"].items()}
        print(entry["seed"], means, entry["seconds"], flush=True)


if __name__ == "__main__":
    main()
