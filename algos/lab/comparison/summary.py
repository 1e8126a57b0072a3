"""Metrics of a comparison: the same for every environment and algorithm, with their spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from algos import presets
from algos.config import Config, PolicyGradientConfig
from algos.lab.comparison.games import game_of
from algos.recipe import Recipe
from algos.statistics.intervals import Estimate, estimate, interquartile_mean
from algos.statistics.pass_rates import PASS_RATE
from textenv.importing import name_of, read_module

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv
    from tensordict import TensorDict

    from algos.agent import Agent
    from algos.policies.policy import Policy
    from textenv.kl.coefficients import CoefficientLike

GRID_POINTS = 101
"""Points of a curve over the budget, from 0 to 1."""
FULL_LENGTH_FRACTION = 0.9
"""Runs of at least this fraction of the longest are drawn to the same end: their last iterations differ in length."""
AFTER_AN_END = "Beyond the end of a seed: means of the others, without intervals"
"""What figures say if there are runs that `ended_early`."""
REACHED_SCORE = 0.9
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
    "dynamics/kl/quarter_1": "KL, nats per token, quarter 1 of the answers",
    "dynamics/kl/quarter_4": "KL, nats per token, quarter 4 of the answers",
    "dynamics/entropy/quarter_1": "entropy, nats per token, quarter 1 of the answers",
    "dynamics/entropy/quarter_4": "entropy, nats per token, quarter 4 of the answers",
    "dynamics/value_error/quarter_1": "squared value error, quarter 1 of the answers",
    "dynamics/value_error/quarter_4": "squared value error, quarter 4 of the answers",
}
"""Metrics plotted over the training, with their labels, keyed by the names in the log."""


@dataclass(frozen=True, init=False)
class Case:
    """A case to train: a recipe and its name.

    Functions must be importable (defined in a module), unless everything runs in one process.

    Args:
        env: Gymnasium id, ``module:id``, which imports the module, or a function of the number of slots.
        algorithm: name of an algorithm, or a class of your own, which inherits `Agent`; by default ``"ppo"``.
        policy: name of a policy (`algos.policies.registry`), or a function of environment and seed; None: the recipe's.
        config, total_steps, num_envs, kl_coef, env_kwargs: fields of the recipe to replace; None leaves them.
            ``env_kwargs`` has ``wrappers`` too; those of a preset stay, unless they are given, too.
        name: name in tables, figures and files; by default environment and algorithm, and the policy, if it is named
            and not the recipe's own. Cases of several environments may share a name, such as "λ = .9": a figure for a
            paper then puts those of different games together.
        recipe: what to train; by default the one that `algos.presets.recipe` finds for environment, algorithm and
            policy.

    Raises:
        TypeError: unless there is either an environment or a recipe.
        ValueError: if the algorithm is unknown or not for text, or the module cannot be imported.
    """

    recipe: Recipe = field(hash=False)
    name: str = ""
    _game: str = field(init=False, repr=False, compare=False)
    own_wrappers: bool = field(init=False, repr=False, compare=False)
    """Whether the environment's wrappers were given, and are not those of a preset."""

    def __init__(
        self,
        env: str | Callable[[int], VectorEnv] | None = None,
        algorithm: str | type[Agent[Any]] | None = None,
        policy: str | Callable[[VectorEnv, int], Policy] | None = None,
        config: Config | None = None,
        total_steps: int | None = None,
        num_envs: int | None = None,
        kl_coef: CoefficientLike | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        name: str = "",
        *,
        recipe: Recipe | None = None,
    ) -> None:
        if (env is None) == (recipe is None) or (algorithm is not None and recipe is not None):
            raise TypeError("a case has either an environment (and an algorithm), such as 'CartPole-v1', or a recipe")

        # The recipe; the module registers the environment, and so says whether it is one of text
        own_wrappers = recipe is not None or "wrappers" in (env_kwargs or {})
        if recipe is None:
            env_id = env if isinstance(env, str) else ""
            module, _, _ = env_id.rpartition(":")
            if module:
                read_module(module)
            policy_name = policy if isinstance(policy, str) else "auto"
            recipe = presets.recipe(env_id, algorithm or "ppo", policy=policy_name, env_kwargs=env_kwargs)
            env_kwargs = {**recipe.env_kwargs, **(env_kwargs or {})}

        # What differs from it
        settings = {
            "env": env,
            "policy": policy,
            "config": config,
            "total_steps": total_steps,
            "num_envs": num_envs,
            "kl_coef": kl_coef,
            "env_kwargs": env_kwargs,
        }
        changes: dict[str, Any] = {setting: value for setting, value in settings.items() if value is not None}
        object.__setattr__(self, "recipe", replace(recipe, **changes))
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "own_wrappers", own_wrappers)
        # Now, because a training may change the state of a reward, and the working folder
        object.__setattr__(self, "_game", game_of(self.env_id, self.recipe.env_kwargs))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in ("env", "algorithm", "policy", "config", "total_steps", "num_envs", "kl_coef", "env_kwargs"):
                raise AttributeError(f"Case.{name} is now Case.recipe.{name}")
            raise AttributeError(f"'Case' object has no attribute {name!r}")

    def __str__(self) -> str:
        if self.name:
            return self.name
        return case_name(self.env_name, self.algorithm_name, self.recipe.policy)

    @property
    def env_name(self) -> str:
        """Id of the environment with its module, if it was given, or name of its function."""
        env = self.recipe.env
        return env if isinstance(env, str) else _name_of(env)

    @property
    def env_id(self) -> str:
        """Id of the environment without a module, or name of its function."""
        return self.env_name.rpartition(":")[2]

    @property
    def game(self) -> str:
        """Name of the game that the environment is (`algos.lab.comparison.games.game_of`)."""
        return self._game

    @property
    def algorithm_name(self) -> str:
        """Name of the algorithm, or of its class."""
        algorithm = self.recipe.algorithm
        return algorithm if isinstance(algorithm, str) else _name_of(algorithm)


def _name_of(made: Callable[..., object]) -> str:
    """Return the name of a function or class without its module; of an object, that of its class."""
    return name_of(made).rpartition(":")[2]


def case_name(env: str, algorithm: str, policy: object) -> str:
    """Return the name of a case without a name of its own: ``ENV:ALGO``, or ``ENV:ALGO:POLICY``.

    Args:
        env: id of the environment, which may have a module, or name of its function.
        algorithm: name of the algorithm, or of its class.
        policy: the recipe's; only a name that is not what the recipe of environment and algorithm has is shown.
    """
    name = f"{env}:{algorithm}"
    if not isinstance(policy, str) or policy in ("auto", presets.usual_policy(env, algorithm)):
        return name
    return f"{name}:{policy}"


@dataclass
class RunResult:
    """One training run and its evaluations."""

    env: str
    algorithm: str
    seed: int
    policy: str
    parameters: int
    best: float | None
    """Return at which the game counts as solved; None if none is known (`algos.lab.comparison.games.solved_return`)."""
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
    game: str = ""
    """Game that the environment is, as `algos.lab.comparison.games.game_of` names it; empty if ``env`` names it."""
    trained_parameters: int | None = None
    """Number of parameters that are trained; None if it is not known."""

    @property
    def case(self) -> str:
        """Name of the case."""
        return self.name or f"{self.env}:{self.algorithm}"

    @property
    def game_name(self) -> str:
        """Name of the game; cases of one game share a panel and a scale of scores."""
        return self.game or self.env

    @property
    def describes_its_game(self) -> bool:
        """True if the environment is not the game's own, but tells it in words."""
        return self.game_name != self.env and not self.game_name.startswith(f"{self.env} (")

    @property
    def line(self) -> str:
        """Name of the case where its environment is said already, as in a panel of a figure; but see `lines_of`."""
        if self.label:
            return self.label
        if self.describes_its_game:
            # A case of the game's own environment has the same algorithm
            return self.case
        _, named_by_env, ending = self.case.rpartition(f"{self.env}:")
        if named_by_env and (ending == self.algorithm or ending.startswith(f"{self.algorithm}:")):
            return ending
        return self.case


def name_cases(runs: Sequence[RunResult]) -> None:
    """Give cases their names in tables: their own; where several environments or games share one, with these.

    Changes ``name`` of runs that have a ``label``.
    """
    environments: dict[str, set[str]] = {}
    games: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        environments.setdefault(run.label, set()).add(run.env)
        games.setdefault((run.label, run.env), set()).add(run.game_name)
    for run in runs:
        if run.label:
            run.name = run.label
            if len(environments[run.label]) > 1:
                run.name += f", {run.env}"
            if len(games[run.label, run.env]) > 1:
                run.name += f", {run.game_name}"


def by_case(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Return the runs of each case, in the order of the cases' first runs."""
    cases: dict[str, list[RunResult]] = {}
    for run in runs:
        cases.setdefault(run.case, []).append(run)
    return cases


def lines_of(runs: Sequence[RunResult]) -> dict[str, str]:
    """Return the name of each case's line in figures, by case: `RunResult.line`, which cases of several games may have.

    If a game's own environment and its description in words share it, that of the description has its environment, too.
    """
    cases = {case: of_case[0] for case, of_case in by_case(runs).items()}
    in_words = {(run.game_name, run.line) for run in cases.values() if run.describes_its_game}
    as_they_are = {(run.game_name, run.line) for run in cases.values() if not run.describes_its_game}
    shared_lines = {line for _, line in in_words & as_they_are}

    lines = {}
    for case, run in cases.items():
        lines[case] = run.line
        if run.describes_its_game and run.line in shared_lines:
            lines[case] += f", {run.env}"
    return lines


def update_kl(agent: Agent, rollout: TensorDict) -> dict[str, float]:
    """Estimate KL(old‖new) of an update, nats per step, by k3 (Schulman 2020).

    A ``diagnose`` for `algos.training.loop.learn`, which calls it after the update. The same for every algorithm; empty
    for Q-learning, which updates no distribution.
    """
    import torch

    from textenv.kl.estimators import k3

    if not isinstance(agent.config, PolicyGradientConfig):
        return {}
    with torch.no_grad():
        log_ratio = agent.policy.evaluate(rollout).log_prob - rollout["log_prob"]
        return {"update/kl": k3(-log_ratio[rollout["mask"]]).mean().item()}


Score = Callable[[float], float]


def normalise(runs: Sequence[RunResult], *, study: Sequence[RunResult] = ()) -> Score | None:
    """Return a function from a case's returns to scores: 0 is the untrained policy, 1 is solved.

    All cases of one game (`RunResult.game_name`) in the whole study share the scale; a wrapper that may change rewards
    makes another game. The untrained return is the lowest of their returns before training, each a mean over the seeds;
    the solved one is Gymnasium's ``reward_threshold`` or, without one, the best evaluation of the game. None if the
    solved return is not above the untrained one, if that is NaN, or if a run of the case was not evaluated.
    """
    if not all(run.before and run.after for run in runs):
        return None
    of_game = [run for run in _runs_of_game(runs, study) if run.before and run.after]
    returns_before = []
    for of_case in by_case(of_game).values():
        returns_before.append(float(np.mean([run.before["mean_return"] for run in of_case])))
    untrained = float(np.min(returns_before))
    solved = runs[0].best
    if solved is None:
        returns_after = [run.after["mean_return"] for run in of_game]
        solved = max((value for value in returns_after if not math.isnan(value)), default=math.nan)
    scale = solved - untrained

    def score(value: float) -> float:
        return (value - untrained) / scale

    if solved > untrained:
        return score
    return None


def _runs_of_game(runs: Sequence[RunResult], study: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs of a case, and those of the study that play the same game."""
    others = [run for run in study if not any(run is own_run for own_run in runs)]
    return [run for run in (*runs, *others) if run.game_name == runs[0].game_name]


def _shared_budget(runs: Sequence[RunResult], study: Sequence[RunResult]) -> float:
    """Return the steps up to which every case of the game has a run."""
    cases = by_case(_runs_of_game(runs, study))
    return min(max(run.history[-1]["steps"] for run in of_case) for of_case in cases.values())


def curve(run: RunResult, name: str, score: Score | None) -> list[tuple[float, float]]:
    """Return a quantity of a run over the fraction of its budget; empty if the run has no such quantity."""
    scale: Score = float
    if name == "normalised score":
        if score is None:
            return []
        name = "episode/return"
        scale = score
    budget = run.history[-1]["steps"]
    points = []
    for row in run.history:
        if name in row and math.isfinite(row[name]):
            points.append((row["steps"] / budget, scale(row[name])))
    return points


def ended_early(runs: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs of a case that ended before `FULL_LENGTH_FRACTION` of the longest."""
    longest = max(run.history[-1]["steps"] for run in runs)
    return [run for run in runs if run.history[-1]["steps"] < FULL_LENGTH_FRACTION * longest]


def steps_grid(runs: Sequence[RunResult]) -> np.ndarray:
    """Return `GRID_POINTS` steps from 0 up to the longest run's last."""
    return np.linspace(0, max(run.history[-1]["steps"] for run in runs), GRID_POINTS)


def on_grid(runs: Sequence[RunResult], name: str, score: Score | None = None) -> np.ndarray:
    """Return a quantity on `steps_grid`, ``[seeds, GRID_POINTS]``; NaN before a run's first and after its last value.

    A run of at least `FULL_LENGTH_FRACTION` of the longest is extended to the same end. ``score`` is applied to the
    values.
    """
    grid = steps_grid(runs)
    values = np.full((len(runs), GRID_POINTS), np.nan)
    for row, run in zip(values, runs, strict=True):
        points = [(line["steps"], line[name]) for line in run.history if np.isfinite(line.get(name, np.nan))]
        if not points:
            continue
        steps, measured = np.array(points, dtype=float).T
        row[:] = np.interp(grid, steps, measured, left=np.nan)
        if steps[-1] < FULL_LENGTH_FRACTION * grid[-1]:
            row[grid > steps[-1]] = np.nan
    if score is None:
        return values
    return np.vectorize(score)(values)


def summary(runs: Sequence[RunResult], *, study: Sequence[RunResult] = ()) -> dict[str, Estimate]:
    """Summarize the quantities of one case over its seeds; a quantity that one of the runs lacks is left out.

    The area under the curve ends at the steps that all cases of the game in the study have.
    """
    score = normalise(runs, study=study)
    shared_budget = _shared_budget(runs, study)
    rows = [_quantities(run, score, shared_budget=shared_budget) for run in runs]
    shared = [name for name in rows[0] if all(name in row for row in rows)]
    columns = {name: [row[name] for row in rows] for name in shared}
    estimates = {name: estimate(column) for name, column in columns.items()}
    if "normalised score" in columns:
        score_column = columns["normalised score"]
        estimates["normalised score, interquartile mean"] = estimate(score_column, interquartile_mean)
    return estimates


def _quantities(run: RunResult, score: Score | None, *, shared_budget: float) -> dict[str, float]:
    """Return one run's evaluations, and means over its iterations."""
    metrics: dict[str, float] = {}
    total_steps = run.history[-1]["steps"]

    # Returns
    if run.after:
        metrics["return before"] = run.before["mean_return"]
        metrics["mean_return"] = run.after["mean_return"]
    returns = [row["episode/return"] for row in run.history if "episode/return" in row]
    if returns:
        tenth = math.ceil(len(returns) / 10)
        metrics["last return"] = _mean_of_last_tenth(returns)
        metrics["first return"] = float(np.mean(returns[:tenth]))

    # Pass rates of prompts that were sampled several times
    for name, value in run.after.items():
        if PASS_RATE.fullmatch(name) and name in run.before:
            metrics[f"{name} before"] = run.before[name]
            metrics[name] = value

    # Normalised scores, after the training and during it
    if score is not None:
        metrics["normalised score"] = score(run.after["mean_return"])
    learning_curve = curve(run, "normalised score", score)
    if learning_curve:
        fractions, scores = np.array(learning_curve, dtype=float).T
        grid = np.linspace(0, shared_budget, GRID_POINTS)
        metrics["area under the curve"] = float(np.interp(grid, fractions * total_steps, scores).mean())
        steps_when_reached = [x * total_steps for x, y in learning_curve if y >= REACHED_SCORE]
        metrics[f"reached {REACHED_SCORE}"] = float(bool(steps_when_reached))
        if steps_when_reached:
            metrics[f"steps to {REACHED_SCORE}"] = steps_when_reached[0]

    # Means of what was logged
    for name in QUANTITIES:
        if name == "normalised score":
            continue  # see above
        points = curve(run, name, score)
        if points:
            metrics[name] = float(np.mean([y for _, y in points]))
    kls = [row["reference/kl"] for row in run.history if "reference/kl" in row]
    if kls:
        metrics["last kl"] = run.after.get("kl", _mean_of_last_tenth(kls))

    # Time
    phases = ("collect", "penalty", "update")
    seconds_by_phase = {phase: sum(row.get(f"time/{phase}", 0.0) for row in run.history) for phase in phases}
    seconds = sum(seconds_by_phase.values())
    metrics["steps"] = total_steps
    metrics["seconds"] = seconds
    if all("time/processor" in row for row in run.history):
        metrics["processor seconds"] = sum(row["time/processor"] for row in run.history)
    if seconds:
        metrics["steps_per_second"] = total_steps / seconds
        for phase in phases:
            metrics[f"time fraction: {phase}"] = seconds_by_phase[phase] / seconds

    # Size of the policy
    if run.parameters:
        metrics["parameters"] = run.parameters
    if run.trained_parameters is not None:
        metrics["trained parameters"] = run.trained_parameters
    return metrics


def _mean_of_last_tenth(values: Sequence[float]) -> float:
    return float(np.mean(values[len(values) * 9 // 10 :]))
