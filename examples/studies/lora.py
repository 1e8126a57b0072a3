"""Does an adapter of low rank learn as well as all weights, and at which rate? SmolLM2 on sums of two digits, by PPO.

python examples/studies/lora.py                # every rank at every rate: over an hour of a core
python examples/studies/lora.py --best         # three more seeds of each rank, at the rate that was best
python examples/studies/lora.py --table        # the runs so far; with --best: those of the three seeds

Schulman et al. 2025 ("LoRA Without Regret") found that in training with rewards an adapter of rank 1 learns as well as
all weights, if it sits on all linear layers, and that its best rate is ten times as high. Here adapters and all weights
train for equal numbers of tokens, over a grid of rates. A run is a line of runs/lora.jsonl, and is not repeated.
"""

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

import torch
from pass_at_k import make_environment, sums

from algos import PPO, LMPolicy, evaluate, presets

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from page import DATA, save_table_of_runs
from pictures import COLOURS, new_figure, read_table, save
from recorded_runs import RunFile, print_table

RUNS = RunFile(Path("runs/lora.jsonl"), settings=("rank", "rate", "seed", "model", "total_steps"))
MODEL = "smollm2"
TOTAL_STEPS = 2_000
TEST_PROMPTS = 100
ALL_WEIGHTS = 0
"""Rank of the runs without an adapter."""
RANKS = (1, 8, 64, ALL_WEIGHTS)
ADAPTER_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
ALL_RATES = (3e-6, 1e-5, 3e-5, 1e-4)
CHOICE_SEED = 0
"""Seed of the grid, which chooses the rates of the other seeds."""
SEEDS = (1, 2, 3)


def rates(rank):
    """The grid of rates of a rank."""
    return ALL_RATES if rank == ALL_WEIGHTS else ADAPTER_RATES


def measure(*, rank, rate, seed, model, total_steps):
    """Train one rank at one rate, and evaluate it on sums that it never saw."""
    rows = sums()
    adapter = None
    if rank != ALL_WEIGHTS:
        adapter = f"r={rank},alpha=32,targets=all-linear"
    policy = LMPolicy.load(model, lora=adapter, seed=seed)

    # Training
    config = dataclasses.replace(presets.TEXT, num_episodes=32, minibatch_size=16, learning_rate=rate, seed=seed)
    agent = PPO(make_environment(rows[TEST_PROMPTS:], policy.tokenizer), policy, config)
    returns = [row["episode/return"] for row in agent.learn(total_steps)]

    # Evaluation: one greedy answer to each sum, and four drawn ones
    env = make_environment(rows[:TEST_PROMPTS], policy.tokenizer)
    estimates = evaluate(env, policy, k=(1, 4), seed=1000).pass_rates.estimates()
    figures = {name: statistics.mean(estimates[name].values) for name in ("greedy", "pass@1")}
    return figures | {"training": returns}


def pass_rates(model, total_steps):
    """pass@1 of each run of this model and length, by rank, rate and seed."""
    return {
        (run["rank"], run["rate"], run["seed"]): run["pass@1"]
        for run in RUNS.read().values()
        if (run["model"], run["total_steps"]) == (model, total_steps)
    }


def best_rate(rank, results):
    """The rate with the highest pass@1 in the grid; of equal ones, the lowest."""
    measured = [rate for rate in rates(rank) if (rank, rate, CHOICE_SEED) in results]
    return max(measured, key=lambda rate: results[rank, rate, CHOICE_SEED])


def grid_table(results):
    """Columns and rows: pass@1 by rank and rate."""
    columns = sorted({rate for rank in RANKS for rate in rates(rank)})
    rows = []
    for rank in RANKS:
        cells = [rank_name(rank)]
        for rate in columns:
            value = results.get((rank, rate, CHOICE_SEED))
            cells.append("" if value is None else f"{value:.3f}")
        rows.append(cells)
    return ["", *(f"{rate:g}" for rate in columns)], rows


def best_table(results):
    """Columns and rows: pass@1 of each rank at its best rate, by seed."""
    rows = []
    for rank in RANKS:
        rate = best_rate(rank, results)
        values = [results[rank, rate, seed] for seed in SEEDS if (rank, rate, seed) in results]
        each = ", ".join(f"{value:.3f}" for value in values)
        rows.append([rank_name(rank), f"{rate:g}", f"{statistics.mean(values):.3f} ({each})"])
    return ["", "rate", f"pass@1, mean of {len(SEEDS)} seeds (each)"], rows


def rank_name(rank):
    """What the tables call a rank."""
    return "all weights" if rank == ALL_WEIGHTS else f"rank {rank}"


def draw(path):
    """Draw the page's grid: pass@1 by rate, a line for each rank."""
    columns, rows = read_table(DATA / "lora.json")
    figure, axes = new_figure("lora", size=(7, 4.2))
    for colour, (name, cells) in zip(COLOURS, rows.items(), strict=False):
        points = [(float(rate), *cell) for rate, cell in zip(columns, cells, strict=True) if cell]
        style = "--" if name == rank_name(ALL_WEIGHTS) else "-"
        axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", label=name)
    axes.set(xscale="log", ylim=(0, 1), xlabel="learning rate", ylabel="pass@1 on sums that it never saw")
    axes.legend(frameon=False)
    save(figure, path)


def main():
    """Run what is missing, or print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--best", action="store_true", help="the best rate of each rank, with further seeds")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--total-steps", type=int, default=TOTAL_STEPS, help="tokens to write in each training")
    parser.add_argument("--table", action="store_true", help="print the runs so far")
    parser.add_argument("--json", type=Path, help="write the runs so far to this file of docs/results/data")
    parser.add_argument("--figure", type=Path, help="draw the grid of docs/results into this SVG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.figure is not None:
        draw(options.figure)
        return

    # The runs so far
    results = pass_rates(options.model, options.total_steps)
    if options.best or options.table or options.json is not None:
        absent = [rank for rank in RANKS if not any((rank, rate, CHOICE_SEED) in results for rate in rates(rank))]
        if absent:
            names = ", ".join(map(rank_name, absent))
            parser.exit(2, f"{RUNS.path} has no grid of {names}: run `python examples/studies/lora.py` first\n")
    if options.table or options.json is not None:
        columns, rows = best_table(results) if options.best else grid_table(results)
        if options.table:
            print_table(columns, rows)
        else:
            command = "python examples/studies/lora.py" + " --best" * options.best
            save_table_of_runs(options.json, columns, rows, command, kinds=["text"])
        return

    # Missing runs
    chosen = {"model": options.model, "total_steps": options.total_steps}
    if options.best:
        trainings = [(rank, best_rate(rank, results), seed) for seed in SEEDS for rank in RANKS]
    else:
        trainings = [(rank, rate, CHOICE_SEED) for rank in RANKS for rate in rates(rank)]
    settings = [{"rank": rank, "rate": rate, "seed": seed, **chosen} for rank, rate, seed in trainings]
    for run in RUNS.run_missing(settings, measure):
        print(f"{rank_name(run['rank'])}, {run['rate']:g}, seed {run['seed']}: pass@1 {run['pass@1']:.3f}", flush=True)


if __name__ == "__main__":
    main()
