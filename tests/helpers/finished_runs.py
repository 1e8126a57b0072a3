"""Results of runs that never ran."""

from algos.comparison.summary import (
    RunResult,
)


def run_of(seed, *, returns, after, before=0.0, best=10.0, **columns):
    """A run whose iterations take 100 steps each and pay these returns."""
    history = [
        {"steps": 100 * (i + 1), "episode/return": paid, "time/collect": 1.0, "time/penalty": 0.0, "time/update": 3.0}
        | {name: values[i] for name, values in columns.items()}
        for i, paid in enumerate(returns)
    ]
    figures = [{"mean_return": x} for x in (before, after)]
    return RunResult("Some-v0", "ppo", seed, "MLPPolicy", 10, best, *figures, history)
