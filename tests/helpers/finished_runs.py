"""Results of runs that never ran."""

import json

from algos.lab.comparison.summary import RunResult


def run_of(seed, *, returns, after, before=0.0, best=10.0, **columns):
    """A run whose iterations take 100 steps each and pay these returns."""
    history = [
        {"steps": 100 * (i + 1), "episode/return": paid, "time/collect": 1.0, "time/penalty": 0.0, "time/update": 3.0}
        | {name: values[i] for name, values in columns.items()}
        for i, paid in enumerate(returns)
    ]
    figures = [{"mean_return": x} for x in (before, after)]
    return RunResult("Some-v0", "ppo", seed, "MLPPolicy", 10, best, *figures, history)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder, *, seed=1, returns=(0.0, 0.5, 1.0), samples=2, words="good film", **config):
    """A text run of 100 steps an iteration, with samples of each, as a training writes them."""
    folder.mkdir(parents=True)
    env = {"id": "textenv/Reviews-v0", "kwargs": {"model": "embedded", "kl_coef": 0.1}, "module": None}
    told = {"environment": env, "algorithm": "PPO", "policy": "LMPolicy", "policy_arguments": {}, "format": 4}
    (folder / "config.json").write_text(json.dumps(told | {"config": {"seed": seed, "learning_rate": 1e-3} | config}))
    metrics, rows, tokens = [], [], []
    for i, paid in enumerate(returns):
        place = {"iteration": i + 1, "steps": 100 * (i + 1)}
        rewards = {"episode/return": paid, "reward/a": paid / 2, "reward/b": paid / 2, "reward/failed": 0}
        texts = {"reference/kl": 0.1 * i, "episode/length": 7.0, "text/distinct_2": 0.5 - 0.2 * i}
        metrics.append(place | rewards | texts | {"time/seconds": 60.0 * (i + 1)})
        for row in range(samples):
            said = {"prompt": f"prompt {row}", "completion": f" {words} {i}.{row}", "score": paid + row, "parts": {}}
            rows.append(place | said)
            shade = {name: [0.5 * row, -1.0] for name in ("log_ratio", "advantage", "value", "entropy")}
            tokens.append(place | {"row": row, "text": [" good", " film"], "chosen": [True, True]} | shade)
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "samples.jsonl", rows)
    write_lines(folder / "tokens.jsonl", tokens)
