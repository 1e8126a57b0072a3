"""Hyper-parameter search by Optuna: ranges beside the fields' names, trials, and the best configuration as a file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from algos.config import field_values
from algos.presets import Recipe
from algos.training.run_folder import check_new, hold, replacing
from algos.training.save import describe

if TYPE_CHECKING:
    import optuna

TENTHS = 10
"""Evaluations per training; a trial is ended at one of them if it lies below the median of the finished trials."""
RANGES = {
    "learning_rate": (1e-5, 1e-2), "ent_coef": (1e-8, 0.1), "kl_coef": (1e-4, 0.5), "clip_range": (0.1, 0.4),
    "vf_coef": (0.1, 1.0), "max_grad_norm": (0.3, 2.0), "max_kl": (1e-3, 0.1), "exploration_fraction": (0.01, 0.5),
    "final_exploration": (0.01, 0.2),
}  # fmt: skip
"""Ranges of fields, logarithmic, mostly those of rl-baselines3-zoo (``hyperparams_opt.py``); the recipe's value widens
its range, unless it is 0."""
COMPLEMENTS = {"gamma": (1e-4, 0.03), "gae_lambda": (1e-4, 0.1)}
"""Ranges of 1 minus the field, logarithmic, of rl-baselines3-zoo."""
SIZES = (
    "num_steps", "num_episodes", "group_size", "minibatch_size", "num_epochs", "critic_epochs", "batch_size",
    "gradient_steps", "target_update_gradient_steps",
)  # fmt: skip
"""Fields that are multiplied by a power of two, from 1/4 to 4."""


def suggest(trial: optuna.trial.BaseTrial, name: str, own: float) -> float:
    """Suggest a value of a field.

    Args:
        trial: Optuna's trial.
        name: a field of `RANGES`, `COMPLEMENTS` or `SIZES`.
        own: the recipe's value; the value of the first trial.
    """
    start = _coordinate(name, own)
    if name in SIZES:
        return max(2 if name == "group_size" else 1, int(own * 2.0 ** trial.suggest_int(name, -2, 2)))
    low, high = RANGES.get(name) or COMPLEMENTS[name]
    found = trial.suggest_float(name, min(low, start), max(high, start), log=True)
    if found == start:  # exact, and own may be 0, which a logarithm does not have
        return own
    return found if name in RANGES else 1 - found


def _coordinate(name: str, own: float) -> float:
    """Coordinate of the recipe's value in Optuna's space."""
    if name in SIZES:
        return 0
    return own or RANGES[name][0] if name in RANGES else (1 - own) or COMPLEMENTS[name][0]


def searched_fields(recipe: Recipe) -> dict[str, float]:
    """Return the fields that are searched, with the recipe's values: those that have a range and are in use."""
    own = field_values(recipe.config) | ({"kl_coef": recipe.kl_coef} if recipe.kl_coef else {})
    found = {name: own[name] for name in (*RANGES, *COMPLEMENTS, *SIZES) if own.get(name) is not None}
    entropy: dict[str, Any] = {"ent_coef": 0.01}
    try:
        replace(recipe.config, **entropy)
    except (TypeError, ValueError):  # DQN has none, TRPO refuses it
        found.pop("ent_coef", None)
    return found


def suggested_recipe(trial: optuna.trial.BaseTrial, recipe: Recipe) -> Recipe:
    """Return the recipe with suggested values; a schedule ends at the same fraction of its start as before."""
    own = searched_fields(recipe)
    values: dict[str, Any] = {name: suggest(trial, name, value) for name, value in own.items()}
    if "group_size" in values:  # whole groups
        values["num_episodes"] = math.ceil(values["num_episodes"] / values["group_size"]) * values["group_size"]
    for name, end in field_values(recipe.config).items():
        start = name.removeprefix("final_")
        if start != name and end and start in values and values[start] != own[start]:
            values[name] = end * values[start] / own[start]
    kl_coef = values.pop("kl_coef", recipe.kl_coef)
    return replace(recipe, config=replace(recipe.config, **values), kl_coef=kl_coef)


def tune(
    recipe: Recipe,
    *,
    run_dir: str | Path,
    trials: int = 50,
    seeds: int = 1,
    num_episodes: int = 20,
    seed: int = 1,
    quiet: bool = False,
) -> dict[str, Any]:
    """Search for hyper-parameters with a high mean return in evaluation, starting from a recipe's.

    The first trial is the recipe itself. Weak trials are ended early; a trial that fails is counted.

    Args:
        recipe: environment, algorithm and budget; see `algos.presets.recipe`.
        run_dir: folder for ``study.log`` (Optuna's journal) and ``best.yaml``, for ``algos train --config``. The same
            call continues the search in it.
        trials: finished trials in the end, those of earlier calls included.
        seeds: training seeds 1, 2, … of each trial; its value is their mean.
        num_episodes: episodes of each evaluation (text: prompts of the test split).
        seed: seed of the search.
        quiet: print nothing.

    Returns:
        Mean return of the best trial and of the recipe, numbers of trials by outcome, path of ``best.yaml``.

    Raises:
        ImportError: if Optuna is not installed.
        ValueError: if a number is below 1, or the folder holds another search.
        RuntimeError: if every trial failed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError("the search needs optuna: pip install 'textenv[tune]'") from error
    if min(trials, seeds, num_episodes, recipe.total_steps) < 1:
        raise ValueError(
            f"trials is {trials}, seeds {seeds}, num_episodes {num_episodes} and total_steps {recipe.total_steps}, "
            "expected at least 1 of each"
        )
    agent = recipe.build(seed=1)  # raises now if environment, policy and config do not fit
    recipe = replace(recipe, config=agent.config)
    agent.env.close()
    run_dir = Path(run_dir)
    if not (run_dir / "study.log").exists():
        check_new(run_dir)
    with hold(run_dir, resumed=True):
        study = _study(run_dir, _settings(recipe) | {"seeds": seeds, "num_episodes": num_episodes, "seed": seed})
        done = _finished(study)
        while len(done) < trials:
            if not done:
                study.enqueue_trial({name: _coordinate(name, own) for name, own in searched_fields(recipe).items()})
            # With its own seed, a trial does not depend on where the search was interrupted.
            study.sampler = optuna.samplers.TPESampler(seed=10_000 * seed + len(done))
            _run_trial(study, recipe, seeds=seeds, num_episodes=num_episodes)
            done = _finished(study)
            if not quiet:
                print(f"trial {len(done)} of {trials}: " + "; ".join(_described(done[-1])), flush=True)
            _write_best(study, run_dir / "best.yaml", recipe)
    if not quiet:
        _print_table(done)
    count = Counter(trial.state.name for trial in done)
    return {
        "mean_return": study.best_value,
        "recipe_mean_return": done[0].value,
        "trials": len(done),
        "ended_early": count["PRUNED"],
        "failed": count["FAIL"],
        "best": str(run_dir / "best.yaml"),
    }


def _study(run_dir: Path, settings: dict[str, Any]) -> optuna.Study:
    """Open or begin the study of a folder; a trial that was interrupted no longer counts."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(run_dir / "study.log"))),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2),
        study_name="tune",
        direction="maximize",
        load_if_exists=True,
    )
    settings = json.loads(json.dumps(settings, default=describe))
    before = study.user_attrs.get("settings", settings)
    for name in settings | before:
        was, now = before.get(name), settings.get(name)
        if was != now:
            raise ValueError(
                f"{run_dir} holds a search with {name}={was!r:.200}, not {now!r:.200}: repeat its arguments, or give "
                "another folder"
            )
    study.set_user_attr("settings", settings)
    for left in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(left.number, state=optuna.trial.TrialState.FAIL)
    return study


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as flags of ``algos train``."""
    flags = {name: value for name, value in field_values(recipe).items() if name not in ("algorithm", "config")}
    flags |= {"policy_kwargs": dict(recipe.policy_kwargs), "env_kwargs": dict(recipe.env_kwargs)}
    config = {name: value for name, value in field_values(recipe.config).items() if name != "seed"}
    given = {name: value for name, value in flags.items() if value is not None}
    return {"env": recipe.env, "algo": recipe.algorithm} | given | {"config": config}


def _finished(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Trials that ended by themselves, failed ones included."""
    ended = ("COMPLETE", "PRUNED")
    return [trial for trial in study.get_trials() if trial.state.name in ended or "error" in trial.user_attrs]


def _run_trial(study: optuna.Study, recipe: Recipe, *, seeds: int, num_episodes: int) -> None:
    import optuna

    trial = study.ask()
    try:
        given = suggested_recipe(trial, recipe)
        values = field_values(given.config) | {"kl_coef": given.kl_coef}
        trial.set_user_attr("values", {name: values[name] for name in searched_fields(recipe)})
        scores = []
        for index in range(seeds):

            def report(score: float, tenth: int, first: int = index * TENTHS) -> None:
                trial.report(score, first + tenth)
                if trial.should_prune():
                    raise optuna.TrialPruned

            scores.append(_train(given, seed=index + 1, num_episodes=num_episodes, report=report))
    except optuna.TrialPruned:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    except (ValueError, ArithmeticError, RuntimeError) as error:  # not finite, an invariant, no memory
        trial.set_user_attr("error", f"{type(error).__name__}: {error}"[:500])
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        done = _finished(study)
        if len(done) >= 5 and all("error" in each.user_attrs for each in done):
            raise ValueError(f"all of the first {len(done)} trials failed, the last with {error}") from error
    else:
        study.tell(trial, sum(scores) / seeds)


def _train(recipe: Recipe, *, seed: int, num_episodes: int, report: Callable[[float, int], None]) -> float:
    """Train once, report the mean return after every tenth, and return the last."""
    from algos.evaluation import summarise

    agent, score, tenth = recipe.build(seed), math.nan, 0

    with closing(agent.env), closing(recipe.environment(min(num_episodes, 64), split="test")) as test_env:

        def look(metrics: dict[str, float]) -> None:
            nonlocal score, tenth
            now = min(TENTHS, int(TENTHS * metrics["steps"] / recipe.total_steps))
            if now > tenth:
                tenth = now
                score = summarise(test_env, agent.policy, num_episodes=num_episodes, seed=seed)["mean_return"]
                report(score, tenth)

        agent.learn(recipe.total_steps, on_iteration=look)
    if not math.isfinite(score):
        raise ValueError(f"the mean return is {score}")
    return score


def _write_best(study: optuna.Study, path: Path, recipe: Recipe) -> None:
    """Write the best trial so far as flags of ``algos train``."""
    import optuna

    if not study.get_trials(states=(optuna.trial.TrialState.COMPLETE,)):
        return
    best = suggested_recipe(optuna.trial.FixedTrial(study.best_trial.params), recipe)
    with replacing(path) as new:
        flags = json.loads(json.dumps(_settings(best), default=describe))
        new.write_text(yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")


def _described(trial: optuna.trial.FrozenTrial) -> tuple[str, str]:
    """Outcome and hyper-parameters of a trial."""
    outcome = {"COMPLETE": "", "PRUNED": " (ended early)", "FAIL": f"failed: {trial.user_attrs.get('error')}"}
    value = "" if trial.value is None else f"{trial.value:.4g}"
    values = trial.user_attrs.get("values", {})
    shown = (f"{name}={x if isinstance(x, int) else format(x, '.4g')}" for name, x in values.items())
    return value + outcome[trial.state.name], " ".join(shown)


def _print_table(done: Sequence[optuna.trial.FrozenTrial]) -> None:
    """Print the ten best trials."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("trial", "mean return", "hyper-parameters", title="Best trials; trial 1 is the recipe")
    complete = [(trial.value, -place, trial) for place, trial in enumerate(done, 1) if trial.state.name == "COMPLETE"]
    for _, place, trial in sorted(complete, reverse=True)[:10]:
        table.add_row(*map(Text, (str(-place), *_described(trial))))
    Console().print(table)
