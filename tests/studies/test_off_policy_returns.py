"""Returns of SAC and TD3 beside Stable-Baselines3's: equal hyper-parameters, the table by hand, and a pair of runs."""

import dataclasses
import json

import numpy as np
import pytest

from algos import presets
from tests.helpers.models import load_example
from tests.helpers.packages import lazy_import

lazy_import("stable_baselines3")


@pytest.fixture
def benchmark_script():
    return load_example("benchmarks/off_policy_returns")


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_their_agent_has_the_hyper_parameters_of_the_recipe(benchmark_script, algorithm):
    """Each is set to a number that is nobody's default."""
    recipe = presets.recipe("Pendulum-v1", algorithm)
    fields = {"learning_rate": 0.002, "buffer_size": 777, "learning_starts": 33, "batch_size": 55}
    fields |= {"gamma": 0.9, "target_rate": 0.02}
    config = dataclasses.replace(recipe.config, **fields)
    if algorithm == "td3":
        config = dataclasses.replace(config, exploration_noise=0.3)
    recipe = dataclasses.replace(recipe, config=config, policy_kwargs={"hidden": [12, 34]})
    agent = benchmark_script.their_agent(recipe, "Pendulum-v1", seed=5)
    assert agent.learning_rate == 0.002 and agent.buffer_size == 777 and agent.learning_starts == 33
    assert (agent.gamma, agent.tau, agent.batch_size, agent.seed) == (0.9, 0.02, 55, 5)
    assert agent.policy.net_arch == [12, 34]
    if algorithm == "td3":
        draws = np.array([agent.action_noise() for _ in range(2_000)])
        assert draws.std() == pytest.approx(0.3, rel=0.1) and draws.mean() == pytest.approx(0.0, abs=0.03)
        assert (agent.policy_delay, agent.target_policy_noise, agent.target_noise_clip) == (
            config.policy_delay, config.target_noise, config.target_noise_clip,
        )  # fmt: skip


def test_a_rate_that_falls_to_0_falls_linearly(benchmark_script):
    recipe = presets.recipe("Pendulum-v1", "sac")
    recipe = dataclasses.replace(recipe, config=dataclasses.replace(recipe.config, final_learning_rate=0.0))
    agent = benchmark_script.their_agent(recipe, "Pendulum-v1", seed=1)
    rates = [agent.lr_schedule(remaining) for remaining in (1.0, 0.25, 0.0)]
    assert rates == pytest.approx([1e-3, 0.25e-3, 0.0])


def test_the_table_has_the_mean_of_each_seed(benchmark_script, call, tmp_path):
    """Of lines as earlier versions wrote them, seeds in any order."""
    (tmp_path / "runs").mkdir()
    beginning = '{"env": "Pendulum-v1", "algorithm": "sac", "steps": 5000, '
    lines = [
        beginning + '"seed": 2, "library": "ours", "returns": [-100.0, -300.0], "seconds": 10}',
        beginning + '"seed": 1, "library": "ours", "returns": [-2000.0, -1000.0], "seconds": 13}',
        beginning + '"seed": 1, "library": "Stable-Baselines3", "returns": [-50.0, -150.0], "seconds": 20}',
    ]
    (tmp_path / "runs" / "off-policy.jsonl").write_text("\n".join(lines) + "\n")
    assert call(benchmark_script, "--table").splitlines()[2] == (
        "| Pendulum-v1, SAC, 5,000 steps | -850.0 (-1,500.0, -200.0) | 12 | -100.0 (-100.0) | 20 |"
    )
    call(benchmark_script, "--json", tmp_path / "table.json")
    data = json.loads((tmp_path / "table.json").read_text())
    assert data["rows"][0][1] == "-850.0 (-1,500.0, -200.0)" and data["runs"] == list(map(json.loads, lines))


def test_of_many_seeds_the_table_has_the_interval_of_the_mean(benchmark_script):
    """Of the numbers 1 to 20, the deviation of a mean is √(33.25/20) = 1.29: the interval is 10.5 ± 2.5."""
    run = {"env": "Pendulum-v1", "algorithm": "td3", "steps": 9, "library": "ours", "seconds": 2}
    runs = [run | {"seed": seed, "returns": [seed]} for seed in range(1, 21)]
    _, ((_, ours, _, theirs, _),) = benchmark_script.table(runs)
    mean, low, high = ours.replace("[", "").replace(",", "").replace("]", "").split()[:3]
    assert ours.endswith("], 20 seeds") and mean == "10.5" and theirs == "–"
    assert float(low) == pytest.approx(8.0, abs=0.2) and float(high) == pytest.approx(13.0, abs=0.2)


@pytest.mark.long
def test_a_pair_of_runs_of_pendulum_is_not_repeated(benchmark_script, call, monkeypatch):
    monkeypatch.setattr(benchmark_script, "EPISODES", 2)
    options = ["--env", "Pendulum-v1", "--algo", "sac", "--steps", 48, "--seeds", "3"]
    first_output = call(benchmark_script, *options)
    assert call(benchmark_script, *options) == ""
    runs = benchmark_script.RUNS.read()
    assert list(runs) == [("Pendulum-v1", "sac", 48, 3, library) for library in ("ours", "Stable-Baselines3")]
    # An episode has 200 steps, each of which costs at most π² + .1 · 8² + .001 · 2²
    for (*_, library), run in runs.items():
        assert len(run["returns"]) == 2 and -200 * (np.pi**2 + 6.404) <= min(run["returns"]) <= max(run["returns"]) < 0
        mean = np.mean(run["returns"])
        assert f"{library} {mean:.1f}" in first_output and f"{mean:,.1f} ({mean:,.1f})" in call(
            benchmark_script, "--table"
        )
