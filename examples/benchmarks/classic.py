"""Classic control beside published figures: every preset, several seeds, deterministic evaluation of 100 episodes."""

from pathlib import Path

import numpy as np

from algos.lab.comparison.compare import train_all
from algos.lab.comparison.summary import MIN_SEEDS, Case, bootstrap_interval, interquartile_mean

EPISODES = 100
PUBLISHED = {
    Case("CartPole-v1", "ppo"): (500.0, "rl-zoo, 100 k steps"),
    Case("CartPole-v1", "a2c"): (500.0, "rl-zoo, 500 k"),
    Case("CartPole-v1", "trpo"): (500.0, "rl-zoo, 100 k"),
    Case("CartPole-v1", "dqn"): (500.0, "rl-zoo, 50 k"),
    Case("CartPole-v1", "reinforce"): (None, ""),
    Case("CartPole-v1", "rloo"): (None, ""),
    Case("CartPole-v1", "grpo"): (None, ""),
    Case("Acrobot-v1", "ppo"): (-73.5, "rl-zoo, 1 M"),
    Case("Pendulum-v1", "ppo"): (-172.0, "rl-zoo, 100 k"),
    Case("MountainCarContinuous-v0", "ppo"): (88.3, "rl-zoo, 20 k"),
    Case("MountainCar-v0", "ppo"): (-110.0, "rl-zoo, 1 M"),
    Case("LunarLander-v3", "ppo"): (242.0, "rl-zoo, 1 M"),
}
"""Mean returns, from ``../shared/REFERENCES.md``."""


def classic(*, seeds, chosen):
    """Rows of the table: one a case, in the order above."""
    rows = []
    for case, (published, source) in PUBLISHED.items():
        if not chosen(str(case)):
            continue
        runs = train_all(
            [case],
            seeds=seeds,
            run_dir=Path("runs/classic"),
            num_episodes=EPISODES,
            deterministic=True,
            quiet=True,
            overwrite=True,
        )
        returns = np.array([run.after["mean_return"] for run in runs])
        low, high = bootstrap_interval(returns) if seeds >= MIN_SEEDS else (None, None)
        rows.append(
            {
                "suite": "classic",
                "case": str(case),
                "seeds": seeds,
                "mean": float(returns.mean()),
                "IQM": float(interquartile_mean(returns)),
                "low": low if low is None else float(low),
                "high": high if high is None else float(high),
                "worst": float(returns.min()),
                "published": published,
                "source": source,
                "steps": int(np.mean([run.history[-1]["steps"] for run in runs])),
                "seconds": float(np.median([run.history[-1]["time/seconds"] for run in runs])),
                "values": returns.tolist(),
            }
        )
        print(f"{case}: {returns.mean():.1f} ({', '.join(f'{x:.1f}' for x in returns)})", flush=True)
    return rows
