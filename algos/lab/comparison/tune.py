"""Hyper-parameter search by Optuna: ranges of fields, trials, and the best configuration as a file."""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from algos.config import field_values
from algos.evaluation import EvaluateEvery
from algos.lab.comparison.fingerprint import fingerprint
from algos.lab.comparison.record import CODE, changed_settings
from algos.recipe import Recipe
from algos.storage.run_folder import lock_run_folder, replacing
from algos.storage.run_reader import options_text
from textenv.optional import install_command

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend
except ImportError as error:
    raise ImportError(f"the search needs optuna: {install_command('tune')}") from error

JOURNAL = "study.log"
"""File with Optuna's journal, in the folder of a search."""
BEST_RECIPE = "best.yaml"
"""File with the recipe of the best trial so far."""
EVALUATIONS = 10
"""Evaluations of a training, at equal distances; it ends early if one lies below the median of earlier trials."""
COMPLEMENTS = ("gamma", "gae_lambda")
"""Fields whose range is that of 1 minus their value."""
RANGES = {
    "learning_rate": (1e-5, 1e-2),
    "ent_coef": (1e-8, 0.1),
    "kl_coef": (1e-4, 0.5),
    "clip_range": (0.1, 0.4),
    "vf_coef": (0.1, 1.0),
    "max_grad_norm": (0.3, 2.0),
    "max_kl": (1e-3, 0.1),
    "exploration_fraction": (0.01, 0.5),
    "final_exploration": (0.01, 0.2),
    "gamma": (1e-4, 0.03),
    "gae_lambda": (1e-4, 0.1),
}
"""Logarithmic ranges, mostly those of rl-baselines3-zoo (``hyperparams_opt.py``); a recipe's value widens its range."""
SIZES = (
    "num_steps",
    "num_episodes",
    "group_size",
    "minibatch_size",
    "num_epochs",
    "critic_epochs",
    "batch_size",
    "gradient_steps",
    "target_update_gradient_steps",
)
"""Fields that are multiplied by a power of two, from 1/4 to 4."""


def searched_fields(recipe: Recipe) -> dict[str, float]:
    """Return the fields that are searched, with the recipe's values: those that have a range and are in use."""
    values = field_values(recipe.config) | {"kl_coef": None}
    if isinstance(recipe.kl_coef, (int, float)) and recipe.kl_coef:  # not a changing one
        values["kl_coef"] = recipe.kl_coef
    if recipe.algorithm == "trpo":
        del values["ent_coef"]
    return {name: values[name] for name in (*RANGES, *SIZES) if values.get(name) is not None}


def start_of(name: str, value: float) -> float:
    """Return the recipe's value in Optuna's coordinates; the lower end of a logarithmic range stands for 0."""
    if name in SIZES:
        return 0
    if name in COMPLEMENTS:
        value = 1 - value
    lowest, _ = RANGES[name]
    return value or lowest


def _suggest(trial: optuna.Trial, name: str, value: float) -> float:
    """Let Optuna choose a field's value, near the recipe's ``value``."""
    # Sizes: a power of two times the recipe's
    if name in SIZES:
        exponent = trial.suggest_int(name, -2, 2)
        smallest = 1
        if name == "group_size":
            smallest = 2
        return max(smallest, int(value * 2.0**exponent))

    # Other fields: a logarithmic range
    start = start_of(name, value)
    low, high = RANGES[name]
    suggested = trial.suggest_float(name, min(low, start), max(high, start), log=True)
    if suggested == start:
        return value  # 1 - (1 - value) would be rounded, and 0 has no logarithm
    if name in COMPLEMENTS:
        return 1 - suggested
    return suggested


def suggested_recipe(trial: optuna.Trial, recipe: Recipe) -> Recipe:
    """Return the recipe with suggested values; a schedule ends at the same fraction of its start as before."""
    searched = searched_fields(recipe)
    values: dict[str, Any] = {name: _suggest(trial, name, value) for name, value in searched.items()}

    # Whole groups
    if "group_size" in values:
        num_groups = math.ceil(values["num_episodes"] / values["group_size"])
        values["num_episodes"] = num_groups * values["group_size"]

    # Ends of schedules
    for name, end in field_values(recipe.config).items():
        start = name.removeprefix("final_")
        is_end = start != name and start in searched
        if is_end and end and values[start] != searched[start]:
            values[name] = end * values[start] / searched[start]

    kl_coef = values.pop("kl_coef", recipe.kl_coef)
    return replace(recipe, config=replace(recipe.config, **values), kl_coef=kl_coef)


def tune(
    recipe: Recipe,
    *,
    run_dir: str | Path,
    trials: int = 50,
    seeds: int = 1,
    num_episodes: int = 20,
    quiet: bool = False,
) -> dict[str, Any]:
    """Search for hyper-parameters with a high mean return in evaluation; the first trial is the recipe itself.

    Args:
        recipe: environment, algorithm and budget; see `algos.presets.recipe`.
        run_dir: folder for ``study.log`` (Optuna's journal) and ``best.yaml``, for ``algos train --config``. The same
            call continues the search in it.
        trials: finished trials in the end, those of earlier calls included, failed or ended early too.
        seeds: training seeds 1, 2, … of each trial; its value is their mean.
        num_episodes: episodes of each evaluation (text: prompts of the test split).
        quiet: print nothing.

    Returns:
        Mean return of the best trial and of the recipe, numbers of trials by outcome, path of ``best.yaml``, and
        number, result and hyper-parameters of the ten best trials.

    Raises:
        ImportError: if Optuna is not installed.
        ValueError: if a number is below 1, the folder holds another search, or no trial was completed.
    """
    counts = {"trials": trials, "seeds": seeds, "num_episodes": num_episodes, "total_steps": recipe.total_steps}
    if min(counts.values()) < 1:
        raise ValueError(f"the search has {counts}, expected at least 1 of each")
    agent = recipe.build(seed=1)  # raises now if environment, policy and config do not fit
    agent.env.close()

    recipe = replace(recipe, config=agent.config).with_absolute_paths()
    run_dir = Path(run_dir).absolute()

    options: dict[str, Any] = {"seeds": seeds, "num_episodes": num_episodes}
    with lock_run_folder(run_dir, resumed=(run_dir / JOURNAL).exists()):
        study = _study(run_dir, recipe.to_dict() | options | {CODE: fingerprint(recipe)})
        finished = _finished(study)
        while len(finished) < trials:
            # A loss that is not finite, an invariant, no memory; a ValueError of the recipe itself is wrong input
            failures: tuple[type[Exception], ...] = (ArithmeticError, RuntimeError)
            if finished:
                failures = (*failures, ValueError)
            else:
                start = {name: start_of(name, value) for name, value in searched_fields(recipe).items()}
                study.enqueue_trial(start)

            # With a seed of its own, a trial does not depend on where the search was interrupted
            study.sampler = optuna.samplers.TPESampler(seed=len(finished))
            objective = partial(_objective, recipe, failures, **options)
            study.optimize(objective, n_trials=1, catch=failures)

            finished = _finished(study)
            last = finished[-1]
            if not quiet:
                print(f"trial {len(finished)} of {trials}: " + "; ".join(_described(last)), flush=True)
            if last.state.name == "COMPLETE":
                _write_best(study, run_dir)

        complete = [trial for trial in finished if trial.state.name == "COMPLETE"]
        if not complete:
            error = finished[-1].user_attrs["error"]
            raise ValueError(f"none of {trials} trials was completed, the last failed: {error}")
        _write_best(study, run_dir)  # also if an earlier call was killed before it did, or the file was removed

    complete.sort(key=attrgetter("value"), reverse=True)
    count = Counter(trial.state.name for trial in finished)
    return {
        "mean_return": study.best_value,
        "recipe_mean_return": finished[0].value,
        "trials": len(finished),
        "ended_early": count["PRUNED"],
        "failed": count["FAIL"],
        "best": str(run_dir / BEST_RECIPE),
        "best_trials": [(finished.index(trial) + 1, *_described(trial)) for trial in complete[:10]],
    }


def _write_best(study: optuna.Study, run_dir: Path) -> None:
    """Write the options of the best trial so far."""
    with replacing(run_dir / BEST_RECIPE) as new:
        new.write_text(options_text(study.best_trial.user_attrs["flags"]), encoding="utf-8")


def _study(run_dir: Path, settings: Mapping[str, object]) -> optuna.Study:
    """Open or begin the study of a folder; raise a ValueError if it has other settings."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(run_dir / JOURNAL))),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2),
        study_name="tune",
        direction="maximize",
        load_if_exists=True,
    )

    # Trials that have finished were of their settings; before the first one, any are right
    stored = settings
    if _finished(study):
        stored = study.user_attrs["settings"]
    for name, value in settings.items():
        changes = changed_settings({name: stored.get(name)}, {name: value})
        if changes and name == CODE:
            raise ValueError(
                f"{run_dir} holds a search with other code or files ({'; '.join(changes)}): give another folder"
            )
        if changes:
            raise ValueError(
                f"{run_dir} holds a search with {name}={stored[name]!r:.200}, not {value!r:.200}: repeat its "
                "arguments, or give another folder"
            )
    study.set_user_attr("settings", settings)
    return study


def _finished(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Trials that ended by themselves, failed ones included."""
    ended = ("COMPLETE", "PRUNED")
    return [trial for trial in study.trials if trial.state.name in ended or "error" in trial.user_attrs]


def _objective(
    recipe: Recipe, failures: tuple[type[Exception], ...], trial: optuna.Trial, *, seeds: int, num_episodes: int
) -> float:
    """Train with suggested values, report each evaluation, and return the mean of the last ones.

    ``failures`` are noted in the trial and raised again.
    """
    steps_between = math.ceil(recipe.total_steps / EVALUATIONS)
    scores: list[float] = []  # of the seeds so far

    def report(metrics: dict[str, float]) -> None:
        """Report an evaluation to Optuna, except the last; raise if the trial is worse than most."""
        if "eval/mean_return" not in metrics or metrics["steps"] >= recipe.total_steps:
            return
        evaluation_number = len(scores) * EVALUATIONS + int(metrics["steps"] // steps_between)
        trial.report(metrics["eval/mean_return"], evaluation_number)
        if trial.should_prune():
            raise optuna.TrialPruned

    # A training for each seed
    try:
        recipe = suggested_recipe(trial, recipe)
        trial.set_user_attr("flags", recipe.to_dict())
        for seed in range(1, seeds + 1):
            agent = recipe.build(seed)
            num_envs = min(num_episodes, 64)
            with closing(agent.env), closing(recipe.environment(num_envs, split="test")) as env:
                evaluation = EvaluateEvery(env, steps_between, num_episodes=num_episodes, seed=seed)
                history = agent.learn(recipe.total_steps, callbacks=[evaluation], on_iteration=report, sample_every=0)
            scores.append(history[-1]["eval/mean_return"])
            trial.set_user_attr("kl", history[-1].get("eval/kl"))
        if not math.isfinite(sum(scores)):
            raise ArithmeticError(f"the mean return is {sum(scores) / seeds}")
    except failures as error:
        trial.set_user_attr("error", f"{type(error).__name__}: {error}"[:500])
        raise
    return sum(scores) / seeds


def _described(trial: optuna.trial.FrozenTrial) -> tuple[str, str]:
    """Result and hyper-parameters of a trial, as texts."""
    flags = trial.user_attrs.get("flags", {"config": {}})
    values = []
    for name, value in (flags | flags["config"]).items():
        if name in trial.params:
            text = str(value)
            if not isinstance(value, int):
                text = format(value, ".4g")
            values.append(f"{name}={text}")
    hyper_parameters = " ".join(values)

    if "error" in trial.user_attrs:
        return f"failed: {trial.user_attrs['error']}", hyper_parameters
    result = f"{trial.value:.4g}"
    if trial.state.name == "PRUNED":
        result += " (ended early)"
    kl = trial.user_attrs.get("kl")
    if kl is not None:
        result += f", KL {kl:.3g}"
    return result, hyper_parameters
