"""What PPO reaches on MuJoCo beside a program in the manner of CleanRL's, on the same version of a game.

    python examples/benchmarks/mujoco_returns.py --env Pusher-v5 --seeds 1,2,3
    python examples/benchmarks/mujoco_returns.py --table

The program is that of `mujoco_speed`: both have CleanRL's settings and a million steps. The return is the mean of the
last 100 episodes of the training, as CleanRL reports it. A run takes up to half an hour of a core, so each is a line of
runs/mujoco-returns.jsonl, and is not repeated.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from mujoco_speed import ITERATIONS, CleanRLStyle
from page import save_table_of_runs
from published import last_episodes
from recorded_runs import RunFile, print_table

from algos import presets

RUNS = RunFile(Path("runs/mujoco-returns.jsonl"), ("env", "seed", "library"))
OURS = "ours"
THEIRS = "CleanRL-style"


def our_return(env_id, seed):
    """Train ours."""
    recipe = presets.recipe(env_id)
    return last_episodes(recipe.build(seed=seed).learn(recipe.total_steps))


def their_return(env_id, seed):
    """Train the program in CleanRL's manner."""
    program = CleanRLStyle(env_id, seed)
    for _ in range(ITERATIONS):
        program.train()
    return program.last_return()


def run(*, env, seed, library):
    """Train one of the two; return the return and the processor seconds."""
    train = {OURS: our_return, THEIRS: their_return}[library]
    start = time.process_time()
    mean_return = train(env, seed)
    return {"return": mean_return, "seconds": round(time.process_time() - start)}


def table(runs):
    """Columns and rows: a row for each game."""
    rows = []
    for env in sorted({run["env"] for run in runs}):
        cells = [env]
        for library in (OURS, THEIRS):
            chosen = [run for run in runs if (run["env"], run["library"]) == (env, library)]
            cells += _return_and_seconds(sorted(chosen, key=lambda run: run["seed"]))
        rows.append(cells)
    return ["game", OURS, "processor seconds", THEIRS, "processor seconds"], rows


def _return_and_seconds(runs):
    """Two cells: the mean return ± its deviation over the seeds, with each seed's, and the mean seconds."""
    if not runs:
        return ["–", "–"]
    returns = np.array([run["return"] for run in runs])
    each = ", ".join(f"{value:,.1f}" for value in returns)
    seconds = np.mean([run["seconds"] for run in runs])
    return [f"{returns.mean():,.1f} ± {returns.std():,.1f} ({each})", f"{seconds:,.0f}"]


def main():
    """Run what is missing, or print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Pusher-v5")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--libraries", nargs="+", choices=[OURS, THEIRS], default=[OURS, THEIRS])
    parser.add_argument("--table", action="store_true", help="print the runs so far")
    parser.add_argument("--json", type=Path, help="write the runs so far to this file of docs/results/data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table or options.json is not None:
        runs = list(RUNS.read().values())
        if options.table:
            print_table(*table(runs))
        else:
            games = " and ".join(sorted({run["env"] for run in runs}))
            command = f"python examples/benchmarks/mujoco_returns.py --env {games}"
            save_table_of_runs(options.json, *table(runs), command, kinds=["control"], raw={"runs": runs})
        return
    settings = [
        {"env": options.env, "seed": seed, "library": library}
        for seed in map(int, options.seeds.split(","))
        for library in options.libraries
    ]
    for entry in RUNS.run_missing(settings, run):
        names = [entry[name] for name in RUNS.settings]
        print(*names, f"{entry['return']:.1f}", f"{entry['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
