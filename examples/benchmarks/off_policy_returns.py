"""What SAC and TD3 reach beside Stable-Baselines3's, on the same game, with the same seeds, steps and hyper-parameters.

    python examples/benchmarks/off_policy_returns.py --env HalfCheetah-v5 --seeds 1
    python examples/benchmarks/off_policy_returns.py --table

A pair of runs takes up to hours on one core, so each run is a line of runs/off-policy.jsonl, and is not repeated. The
hyper-parameters are those of `algos.presets`, which are rl-baselines3-zoo's. The return is that of 50 episodes without
noise after the training, which begin in the same states for both.
"""

import argparse
import time
from pathlib import Path

import gymnasium
import numpy as np
import stable_baselines3
import torch
from page import save_table_of_runs
from recorded_runs import RunFile, print_table
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.utils import LinearSchedule

import algos
from algos import presets
from algos.statistics.intervals import bootstrap_interval

RUNS = RunFile(Path("runs/off-policy.jsonl"), ("env", "algorithm", "steps", "seed", "library"))
EPISODES = 50
EVALUATION_SEED = 1_000
SEEDS_IN_FULL = 5
"""Largest number of seeds of which the table has each."""
OURS = "ours"
THEIRS = "Stable-Baselines3"


def our_run(recipe, env_id, steps, seed):
    """Train ours; return the returns of the episodes after it and the processor seconds of the training."""
    config = recipe.config
    env = gymnasium.make_vec(env_id, num_envs=1, **recipe.env_kwargs)
    agent_type = getattr(algos, recipe.algorithm.upper())
    policy = algos.make_policy(env, policy=recipe.policy, **recipe.policy_kwargs, seed=seed)
    agent = agent_type(env, policy, config, seed=seed)
    start = time.process_time()
    agent.learn(steps)
    seconds = time.process_time() - start
    return play(policy, env_id, recipe), seconds


def their_run(recipe, env_id, steps, seed):
    """The same by Stable-Baselines3."""
    agent = their_agent(recipe, env_id, seed)
    start = time.process_time()
    agent.learn(steps)
    seconds = time.process_time() - start
    return play(agent, env_id, recipe), seconds


def their_agent(recipe, env_id, seed):
    """Stable-Baselines3's agent with the hyper-parameters of a recipe."""
    config = recipe.config
    env = gymnasium.make(env_id, **recipe.env_kwargs)
    options = {
        "learning_rate": config.learning_rate,
        "buffer_size": config.buffer_size,
        "learning_starts": config.learning_starts,
        "gamma": config.gamma,
        "tau": config.target_rate,
        "batch_size": config.batch_size,
        "policy_kwargs": {"net_arch": list(recipe.policy_kwargs.get("hidden", (256, 256)))},
    }
    if config.final_learning_rate == 0:
        options["learning_rate"] = LinearSchedule(config.learning_rate, 0.0, end_fraction=1.0)

    # TD3 explores by noise, which Stable-Baselines3 has not by default
    if recipe.algorithm == "td3":
        size = env.action_space.shape
        options["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, config.exploration_noise))
    agent_type = getattr(stable_baselines3, recipe.algorithm.upper())
    return agent_type("MlpPolicy", env, seed=seed, device="cpu", **options)


def play(player, env_id, recipe):
    """Return the return of each episode that a player (ours or theirs, by its ``predict``) plays without noise."""
    env = gymnasium.make(env_id, **recipe.env_kwargs)
    returns = []
    for episode in range(EPISODES):
        observation, _ = env.reset(seed=EVALUATION_SEED + episode)
        rewards = []
        ended = False
        while not ended:
            action, _ = player.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(action)
            rewards.append(float(reward))
            ended = terminated or truncated
        returns.append(sum(rewards))
    return returns


def run(*, env, algorithm, steps, seed, library):
    """Train one of the two; return the returns after the training, and its processor seconds."""
    train = {OURS: our_run, THEIRS: their_run}[library]
    returns, seconds = train(presets.recipe(env, algorithm), env, steps, seed)
    return {"returns": returns, "seconds": round(seconds)}


def table(runs):
    """Columns and rows: a row for each game, algorithm and number of steps."""
    rows = []
    for env, algorithm, steps in sorted({(run["env"], run["algorithm"], run["steps"]) for run in runs}):
        cells = [f"{env}, {algorithm.upper()}, {steps:,} steps"]
        for library in (OURS, THEIRS):
            settings = (env, algorithm, steps, library)
            names = ("env", "algorithm", "steps", "library")
            chosen = [run for run in runs if tuple(run[name] for name in names) == settings]
            cells += _returns_and_seconds(sorted(chosen, key=lambda run: run["seed"]))
        rows.append(cells)
    return ["game, algorithm, steps", OURS, "processor seconds", THEIRS, "processor seconds"], rows


def _returns_and_seconds(runs):
    """Two cells: the mean return with each seed's, and the mean seconds; dashes where there are none.

    For more than `SEEDS_IN_FULL` seeds, the 95 % confidence interval of the mean takes the place of the seeds.
    """
    if not runs:
        return ["–", "–"]
    means = np.array([np.mean(run["returns"]) for run in runs])
    if len(means) > SEEDS_IN_FULL:
        low, high = bootstrap_interval(means)
        spread = f"[{low:,.1f}, {high:,.1f}], {len(means)} seeds"
    else:
        spread = "(" + ", ".join(f"{mean:,.1f}" for mean in means) + ")"
    seconds = [run["seconds"] for run in runs if run["seconds"] is not None]  # None: of a run that was resumed
    mean_seconds = f"{np.mean(seconds):,.0f}" if seconds else "–"
    return [f"{means.mean():,.1f} {spread}", mean_seconds]


def run_missing(options):
    """Run ours and theirs in turn, for each seed, unless they are there."""
    chosen = {"env": options.env, "algorithm": options.algo, "steps": options.steps}
    settings = [
        chosen | {"seed": seed, "library": library}
        for seed in map(int, options.seeds.split(","))
        for library in (OURS, THEIRS)
    ]
    for entry in RUNS.run_missing(settings, run):
        names = [entry[name] for name in RUNS.settings]
        print(*names, f"{np.mean(entry['returns']):.1f}", f"{entry['seconds']} s", flush=True)


def main():
    """Run what is missing, or print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--algo", choices=["sac", "td3"], default="sac")
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--table", action="store_true", help="print the runs so far")
    parser.add_argument("--json", type=Path, help="write the runs so far to this file of docs/results/data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = list(RUNS.read().values())
    if options.table:
        print_table(*table(runs))
    elif options.json is not None:
        steps = " and ".join(sorted({str(run["steps"]) for run in runs}))
        command = f"python examples/benchmarks/off_policy_returns.py --env HalfCheetah-v5 --steps {steps} (and so on)"
        # The runs too, so that a table can grow where runs/ is not there any more
        save_table_of_runs(options.json, *table(runs), command, kinds=["algorithms"], raw={"runs": runs})
    else:
        run_missing(options)


if __name__ == "__main__":
    main()
