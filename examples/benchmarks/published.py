"""Returns after training beside published figures: presets, several seeds, 100 episodes each.

A run of the same code that is there already, in ``runs/published``, is not repeated.
"""

import json
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from page import depends

from algos import presets
from algos.lab.comparison.compare import train_all
from algos.lab.comparison.summary import Case
from algos.statistics.intervals import MIN_SEEDS, bootstrap_interval, interquartile_mean

EPISODES = 100
RUNS = Path("runs/published")
ZOO = "rl-zoo, one run"
CLEANRL = "CleanRL, v4, 3 seeds, last 100 episodes of the training"


class Published(NamedTuple):
    """A published mean return."""

    value: float | None
    source: str
    spread: float | None = None
    """Standard deviation over the seeds."""


CLASSIC = {
    Case("CartPole-v1", "ppo"): Published(500.0, "rl-zoo, 100 k steps"),
    Case("CartPole-v1", "a2c"): Published(500.0, "rl-zoo, 500 k"),
    Case("CartPole-v1", "trpo"): Published(500.0, "rl-zoo, 100 k"),
    Case("CartPole-v1", "dqn"): Published(500.0, "rl-zoo, 50 k"),
    Case("CartPole-v1", "reinforce"): Published(None, ""),
    Case("CartPole-v1", "rloo"): Published(None, ""),
    Case("CartPole-v1", "grpo"): Published(None, ""),
    Case("Acrobot-v1", "ppo"): Published(-73.5, "rl-zoo, 1 M"),
    Case("Pendulum-v1", "ppo"): Published(-172.0, "rl-zoo, 100 k"),
    Case("MountainCarContinuous-v0", "ppo"): Published(88.3, "rl-zoo, 20 k"),
    Case("MountainCar-v0", "ppo"): Published(-110.0, "rl-zoo, 1 M"),
    Case("LunarLander-v3", "ppo"): Published(242.0, "rl-zoo, v2, 1 M"),
}
"""rl-baselines3-zoo, ``benchmark.md``."""
MINIGRID = {
    Case("minigrid:MiniGrid-DoorKey-5x5-v0"): Published(0.964, f"{ZOO}, 100 k"),
    Case("minigrid:MiniGrid-Unlock-v0"): Published(0.963, f"{ZOO}, 100 k"),
    Case("minigrid:MiniGrid-Empty-Random-5x5-v0"): Published(0.968, f"{ZOO}, 100 k"),
    Case("minigrid:MiniGrid-KeyCorridorS3R1-v0"): Published(0.949, f"{ZOO}, 500 k"),
}
"""rl-baselines3-zoo, ``benchmark.md``."""
OFF_POLICY = {
    Case("Pendulum-v1", "sac"): Published(-157.0, f"{ZOO}, 20 k"),
    Case("Pendulum-v1", "td3"): Published(-151.9, f"{ZOO}, 20 k"),
    Case("MountainCarContinuous-v0", "sac"): Published(94.7, f"{ZOO}, 50 k"),
    Case("MountainCarContinuous-v0", "td3"): Published(93.5, f"{ZOO}, 300 k"),
    Case("LunarLanderContinuous-v3", "sac"): Published(260.4, f"{ZOO}, v2, 500 k"),
    Case("LunarLanderContinuous-v3", "td3"): Published(207.5, f"{ZOO}, v2, 300 k"),
}
"""rl-baselines3-zoo, ``benchmark.md``."""
_MUJOCO = {
    "HalfCheetah": Published(1442.6, CLEANRL, 46.0),
    "Walker2d": Published(2287.9, CLEANRL, 572.0),
    "Hopper": Published(2382.9, CLEANRL, 272.0),
    "InvertedPendulum": Published(963.1, CLEANRL, 22.0),
    "Pusher": Published(-40.4, CLEANRL, 7.0),
}
MUJOCO = {
    Case(recipe=replace(presets.recipe(f"{game}-v5"), env=f"{game}-{version}")): published
    for game, published in _MUJOCO.items()
    for version in ("v4", "v5")
    if (game, version) != ("Pusher", "v4")  # which wants mujoco < 3
}
"""CleanRL's documentation of ``ppo_continuous_action.py``."""


def beside_published(cases, suite, *, deterministic=True, seeds, chosen):
    """Rows of the table: one a case, in the order of the cases."""
    # Runs of other code are not taken for runs of this one
    code = json.dumps(depends("algorithms"), sort_keys=True)
    run_dir = RUNS / f"{suite}-{sha256(code.encode()).hexdigest()[:8]}"
    rows = []
    for case, published in cases.items():
        if not chosen(str(case)):
            continue
        runs = train_all(
            [case], seeds=seeds, run_dir=run_dir, num_episodes=EPISODES, deterministic=deterministic, quiet=True
        )
        returns = np.array([run.after["mean_return"] for run in runs])
        train_returns = np.array([last_episodes(run.history) for run in runs])
        low, high = bootstrap_interval(returns) if seeds >= MIN_SEEDS else (None, None)
        rows.append(
            {
                "suite": suite,
                "case": str(case),
                "seeds": seeds,
                "mean": float(returns.mean()),
                "IQM": float(interquartile_mean(returns)),
                "low": low if low is None else float(low),
                "high": high if high is None else float(high),
                "worst": float(returns.min()),
                "training": float(train_returns.mean()),
                "training, deviation": float(train_returns.std()),
                "published": published.value,
                "deviation": published.spread,
                "source": published.source,
                "steps": int(np.mean([run.history[-1]["steps"] for run in runs])),
                "CPU seconds": float(np.median([sum(row["time/processor"] for row in run.history) for run in runs])),
                "values": returns.tolist(),
            }
        )
        print(f"{case}: {returns.mean():.1f} ({', '.join(f'{x:.1f}' for x in returns)})", flush=True)
    return rows


def last_episodes(history):
    """Mean return of about the last `EPISODES` episodes of a training, as CleanRL reports it."""
    returns = []
    weights = []
    for before, row in reversed(list(pairwise([{"steps": 0}, *history]))):
        if "episode/return" not in row:
            continue
        returns.append(row["episode/return"])
        weights.append((row["steps"] - before["steps"]) / row["episode/length"])
        if sum(weights) >= EPISODES:
            break
    return float(np.average(returns, weights=weights))


classic = partial(beside_published, CLASSIC, "classic")
# As the zoo evaluates: by sampled actions in MiniGrid (`rl_zoo3/enjoy.py`), by the most probable ones elsewhere
minigrid = partial(beside_published, MINIGRID, "minigrid", deterministic=False)
mujoco = partial(beside_published, MUJOCO, "mujoco")
off_policy = partial(beside_published, OFF_POLICY, "off-policy")
