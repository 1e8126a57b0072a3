"""PPO on PettingZoo's simple_spread beside Stable-Baselines3 with SuperSuit: return and seconds, in turn.

    pip install mpe2 && python examples/benchmarks/spread.py
    python examples/benchmarks/spread.py --seeds 3 --steps 300000

Three agents cover three landmarks, with one policy for all. Both sides have the same hyper-parameters, 8 games and one
thread. Return: mean of an agent's rewards in 200 games of 25 steps with the most probable actions; before the training
it is that of random weights. Seconds are of the processor.
"""

import argparse
import statistics
import time

import numpy as np
import stable_baselines3
import supersuit
import torch
from mpe2 import simple_spread_v3

import algos
from textenv import from_pettingzoo

GAMES = 8
AGENTS = 3
SETTINGS = dict(gamma=0.95, gae_lambda=0.95, clip_range=0.2, ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5)
"""Hyper-parameters with the same name on both sides."""
RATE, STEPS, BATCH, EPOCHS = 1e-3, 125, 500, 10


def make_game():
    """Make a game of 25 steps."""
    return simple_spread_v3.parallel_env(N=AGENTS, max_cycles=25)


def mean_return(act, *, seed, games=200):
    """Return of an agent, on average over games; ``act`` gives actions for observations ``[N, d]``."""
    env = from_pettingzoo(make_game, num_envs=GAMES)
    observation, _ = env.reset(seed=seed)
    total = 0.0
    for _ in range(games // GAMES * 26):  # a step of each game resets it
        observation, reward, *_ = env.step(act(observation))
        total += float(np.sum(reward))
    env.close()
    return total / (games // GAMES * GAMES * AGENTS)


def ours(seed, steps):
    """Train ours; return before and after, seconds."""
    env = from_pettingzoo(make_game, num_envs=GAMES)
    policy = algos.MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(64, 64), seed=seed)

    def act(observation):
        return policy.predict(observation, deterministic=True)[0]

    before = mean_return(act, seed=seed + 1000)
    agent = algos.PPO(
        env, policy, num_steps=STEPS, minibatch_size=BATCH, num_epochs=EPOCHS, learning_rate=RATE, seed=seed, **SETTINGS
    )
    start = time.process_time()
    agent.learn(steps)
    seconds = time.process_time() - start
    env.close()
    return before, mean_return(act, seed=seed + 1000), seconds


def theirs(seed, steps):
    """Train Stable-Baselines3's; return before and after, seconds."""
    games = supersuit.pettingzoo_env_to_vec_env_v1(make_game())
    env = supersuit.concat_vec_envs_v1(games, GAMES, num_cpus=1, base_class="stable_baselines3")
    torch.manual_seed(seed)  # SuperSuit's environment has no seed() that the library could call
    model = stable_baselines3.PPO(
        "MlpPolicy", env, n_steps=STEPS, batch_size=BATCH, n_epochs=EPOCHS, learning_rate=RATE, device="cpu", **SETTINGS
    )

    def act(observation):
        return model.predict(observation, deterministic=True)[0]

    before = mean_return(act, seed=seed + 1000)
    start = time.process_time()
    model.learn(steps)
    seconds = time.process_time() - start
    env.close()
    return before, mean_return(act, seed=seed + 1000), seconds


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300_000, help="actions of all agents")
    options = parser.parse_args()
    torch.set_num_threads(1)

    rows = {"ours": [], "Stable-Baselines3 + SuperSuit": []}
    for seed in range(options.seeds):
        for name, train in zip(rows, (ours, theirs), strict=True):
            rows[name].append(train(seed, options.steps))
            print(name, seed, *(f"{value:.2f}" for value in rows[name][-1]), flush=True)
    print("\n| | return before | after (each seed) | seconds |\n| --- | --- | --- | --- |")
    for name, runs in rows.items():
        before, after, seconds = zip(*runs, strict=True)
        each = ", ".join(f"{value:.2f}" for value in after)
        print(
            f"| {name} | {statistics.mean(before):.2f} | {statistics.mean(after):.2f} ({each}) | "
            f"{statistics.median(seconds):.0f} |"
        )


if __name__ == "__main__":
    main()
