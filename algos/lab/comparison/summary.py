"""Metrics of a comparison: the same for every environment and algorithm, with their spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from algos.config import Config, PolicyGradientConfig

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv
    from tensordict import TensorDict

    from algos.agent import Agent
    from textenv.kl.coefficients import CoefficientLike

POINTS = 101
"""Points of a curve over the budget, from 0 to 1."""
SAME_LENGTH = 0.9
"""Runs of at least this fraction of the longest are drawn to the same end: their last iterations differ in length."""
REACHED = 0.9
"""Normalised training score; the report has the steps until it is first reached."""
QUANTITIES = {
    "normalised score": "normalised score of training episodes: 0 untrained, 1 solved",
    "update/kl": "approximate KL(old‖new) of an update, nats per step (k3)",
    "policy/clip_frac": "clip fraction",
    "value/explained_variance": "explained variance of the value function",
    "policy/entropy": "policy entropy, nats per step",
    "reference/kl": "KL to the reference policy, nats per episode",
    "dynamics/effective_rank": "effective rank of the features (srank)",
    "dynamics/dead_units": "fraction of dead units",
    "dynamics/noise_scale": "gradient noise scale",
    "dynamics/weight_change": "relative change of the weights by an update",
    "dynamics/fit_error": "plasticity: error on a fresh target",
    **{f"dynamics/{name}/quarter_{i}": f"{label}, quarter {i} of the answers" for name, label in (
        ("kl", "KL, nats per token"), ("entropy", "entropy, nats per token"), ("value_error", "squared value error"),
    ) for i in (1, 4)},
}  # fmt: skip
"""Metrics plotted over the training, with their labels, keyed by the names in the log."""


@dataclass(frozen=True)
class Case:
    """A case to train, by default with the recipe of `algos.presets` for environment and algorithm.

    Functions must be importable (defined in a module), unless everything runs in one process.
    """

    env: str | Callable[[int], VectorEnv]
    """Gymnasium id, ``module:id``, or a function of the number of slots."""
    algorithm: str | type[Agent] = "ppo"
    """Name of an algorithm, or a class of your own, which inherits `Agent`."""
    policy: Callable[[VectorEnv, int], Any] | None = None
    """Function of environment and seed; None takes the recipe's policy."""
    config: Config | None = None
    total_steps: int | None = None
    num_envs: int | None = None
    kl_coef: CoefficientLike | None = None
    """Reward charged per nat of KL: a number, a function of the steps so far, or a changing coefficient."""
    env_kwargs: Mapping[str, Any] | None = None
    """Arguments of the environment, if it is given by id; ``wrappers`` too."""
    name: str = ""
    """Name in tables, figures and files; by default environment and algorithm. Cases of several environments may share
    a name, such as "λ = .9": a figure for a paper then puts them together."""

    def __str__(self) -> str:
        return self.name or f"{self.env_name}:{self.algorithm_name}"

    @property
    def env_name(self) -> str:
        """Id of the environment with its module, if it was given, or name of its function."""
        return self.env if isinstance(self.env, str) else self.env.__name__

    @property
    def env_id(self) -> str:
        """Id of the environment without a module, or name of its function."""
        return self.env_name.rpartition(":")[2]

    @property
    def algorithm_name(self) -> str:
        """Name of the algorithm, or of its class."""
        return self.algorithm if isinstance(self.algorithm, str) else self.algorithm.__name__


@dataclass
class RunResult:
    """One training run and its evaluations."""

    env: str
    algorithm: str
    seed: int
    policy: str
    parameters: int
    best: float | None
    """Return at which Gymnasium counts the environment as solved; None if it has no threshold."""
    before: dict[str, float]
    """Evaluation before the training, and after it; empty if there was none."""
    after: dict[str, float]
    history: list[dict[str, float]]
    """Metrics of each iteration, at least one."""
    samples: list[tuple[str, str, str]] = field(default_factory=list)
    """Text only: prompt, answer before, answer after."""
    name: str = ""
    """Name of the case in a table, where no two cases share one; see `name_cases`."""
    folder: str = ""
    """Folder of the run, if it has one."""
    label: str = ""
    """Name that the case was given (`Case.name`), which cases of several environments may share; else empty."""

    @property
    def case(self) -> str:
        """Name of the case."""
        return self.name or f"{self.env}:{self.algorithm}"

    @property
    def line(self) -> str:
        """Name of the case where its environment is said already, as in a panel of a figure."""
        if self.label:
            return self.label
        return self.algorithm if self.case.endswith(f"{self.env}:{self.algorithm}") else self.case


def name_cases(runs: Sequence[RunResult]) -> None:
    """Give cases their names in tables: their own; where several environments have the same one, with the environment.

    Changes ``name`` of runs that have a ``label``.
    """
    environments: dict[str, set[str]] = {}
    for run in runs:
        environments.setdefault(run.label, set()).add(run.env)
    for run in runs:
        if run.label:
            shared = len(environments[run.label]) > 1
            run.name = f"{run.label}, {run.env}" if shared else run.label


def by_case(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Return the runs of each case, in the order of the cases' first runs."""
    return {case: [run for run in runs if run.case == case] for case in dict.fromkeys(run.case for run in runs)}


class Figure(NamedTuple):
    """A quantity over the seeds: mean, limits and values."""

    mean: float
    low: float | None
    """95 % bootstrap limits of the mean; None with fewer than `MIN_SEEDS` seeds."""
    high: float | None
    values: tuple[float, ...]
    """Value of each seed."""


def update_kl(agent: Agent, rollout: TensorDict) -> dict[str, float]:
    """KL(old‖new) of an update, nats per step, by k3 (Schulman 2020): a ``diagnose`` for `algos.training.loop.learn`.

    The same for every algorithm, after the update; empty for Q-learning, which updates no distribution.
    """
    import torch

    from textenv.kl.estimators import k3

    if not isinstance(agent.config, PolicyGradientConfig):
        return {}
    with torch.no_grad():
        change = agent.policy.evaluate(rollout).log_prob - rollout["log_prob"]
        return {"update/kl": k3(-change[rollout["mask"]]).mean().item()}


Score = Callable[[float], float]


def normalise(runs: Sequence[RunResult], *, study: Sequence[RunResult] = ()) -> Score | None:
    """Return a function from a case's returns to scores: 0 is the untrained policy (mean over the seeds), 1 is solved.

    Solved means Gymnasium's ``reward_threshold`` or, without one, the environment's best evaluation in the
    whole study, so that all algorithms share one scale. None if that return is not above the untrained policy's, or if
    there were no evaluations.
    """
    if not all(run.before and run.after for run in runs):
        return None
    zero = float(np.mean([run.before["mean_return"] for run in runs]))
    here = [run for run in (*runs, *study) if run.env == runs[0].env and run.after]
    one = max(run.after["mean_return"] for run in here) if runs[0].best is None else runs[0].best
    return (lambda value: (value - zero) / (one - zero)) if one > zero else None


def curve(run: RunResult, name: str, score: Score | None) -> list[tuple[float, float]]:
    """Return a quantity of a run over the fraction of its budget; empty if the run has no such quantity."""
    key, scale = ("episode/return", score) if name == "normalised score" else (name, float)
    if scale is None:
        return []
    last = run.history[-1]["steps"]
    return [(row["steps"] / last, scale(row[key])) for row in run.history if key in row and math.isfinite(row[key])]


def steps_grid(runs: Sequence[RunResult]) -> np.ndarray:
    """Return `POINTS` steps from 0 up to the longest run's last."""
    return np.linspace(0, max(run.history[-1]["steps"] for run in runs), POINTS)


def on_grid(runs: Sequence[RunResult], name: str, score: Score | None = None) -> np.ndarray:
    """Return a quantity on `steps_grid`, ``[seeds, POINTS]``: NaN before a run's first and after its last measurement.

    A run of at least `SAME_LENGTH` of the longest is extended to the same end. ``score``: applied to the values.
    """
    grid = steps_grid(runs)
    values = np.full((len(runs), POINTS), np.nan)
    for row, run in zip(values, runs, strict=True):
        points = [(line["steps"], line[name]) for line in run.history if np.isfinite(line.get(name, np.nan))]
        if points:
            steps, measured = np.array(points, dtype=float).T
            row[:] = np.interp(grid, steps, measured, left=np.nan)
            if steps[-1] < SAME_LENGTH * grid[-1]:
                row[grid > steps[-1]] = np.nan
    return values if score is None else np.vectorize(score)(values)


def summary(runs: Sequence[RunResult], *, study: Sequence[RunResult] = ()) -> dict[str, Figure]:
    """Summarize every quantity of one case over its seeds; those that a run does not have are left out."""
    score = normalise(runs, study=study)
    rows = [_quantities(run, score) for run in runs]
    columns = {name: [row[name] for row in rows] for name in rows[0] if all(name in row for row in rows)}
    found = {name: _figure(column, np.mean) for name, column in columns.items()}
    if "normalised score" in columns:
        found["normalised score, interquartile mean"] = _figure(columns["normalised score"], interquartile_mean)
    return found


def _figure(column: Sequence[float], statistic: Callable[..., np.ndarray]) -> Figure:
    values = np.array(column)
    low, high = (None, None) if (ends := limits(values, statistic)) is None else map(float, ends)
    return Figure(float(statistic(values, axis=0)), low, high, tuple(values.tolist()))


def _quantities(run: RunResult, score: Score | None) -> dict[str, float]:
    """Return one run's evaluations, and means over its iterations."""
    last, grid = run.history[-1], np.linspace(0, 1, POINTS)
    metrics = {"return before": run.before["mean_return"], "mean_return": run.after["mean_return"]} if run.after else {}
    if returns := [row["episode/return"] for row in run.history if "episode/return" in row]:
        metrics["last return"] = float(np.mean(returns[len(returns) * 9 // 10 :]))
        metrics["first return"] = float(np.mean(returns[: -(-len(returns) // 10)]))
    if score is not None:
        metrics["normalised score"] = score(run.after["mean_return"])
    if learning := curve(run, "normalised score", score):
        metrics["area under the curve"] = float(np.interp(grid, *np.array(learning, dtype=float).T).mean())
        reached = [x * last["steps"] for x, y in learning if y >= REACHED]
        metrics[f"reached {REACHED}"] = float(bool(reached))
        if reached:
            metrics[f"steps to {REACHED}"] = reached[0]
    for name in list(QUANTITIES)[1:]:
        if points := curve(run, name, score):
            metrics[name] = float(np.mean([y for _, y in points]))
    if kls := [row["reference/kl"] for row in run.history if "reference/kl" in row]:
        metrics["last kl"] = run.after.get("kl", float(np.mean(kls[len(kls) * 9 // 10 :])))
    parts = {x: sum(row.get(f"time/{x}", 0.0) for row in run.history) for x in ("collect", "penalty", "update")}
    spent = sum(parts.values())
    metrics |= {"steps": last["steps"], "seconds": spent}
    if not spent:
        return metrics
    metrics["steps_per_second"] = last["steps"] / spent
    return metrics | {f"time fraction: {x}": seconds / spent for x, seconds in parts.items()}


RESAMPLES = 2_000
"""Number of bootstrap resamples; 95 % limits then vary by about a percent of their width."""
MIN_SEEDS = 5
"""Minimum number of seeds for limits; with fewer, they would be about the smallest and the largest value."""


def interquartile_mean(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """Mean of the middle half along an axis, without the lowest and the highest quarter (rounded down).

    >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 3.0, 100.0])))
    2.0
    """
    cut = x.shape[axis] // 4
    return np.sort(x, axis=axis).take(np.arange(cut, x.shape[axis] - cut), axis=axis).mean(axis=axis)


def bootstrap_interval(
    x: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """95 % limits of a statistic (called with ``axis``) over seeds, by the percentile bootstrap (Efron 1979).

    Of ``[seeds, *]``, low and high are ``[*]`` each; with few seeds they mean little. ``seed``: of the resampling.
    """
    chosen = np.random.default_rng(seed).integers(len(x), size=(RESAMPLES, len(x)))
    low, high = np.quantile(statistic(x[chosen], axis=1), [0.025, 0.975], axis=0)
    return low, high


def limits(x: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean) -> tuple[np.ndarray, np.ndarray] | None:
    """`bootstrap_interval`; None with fewer than `MIN_SEEDS` seeds."""
    return bootstrap_interval(x, statistic) if len(x) >= MIN_SEEDS else None
