"""Hyper-parameter search by Optuna: ranges of fields, trials, and the best configuration as a file."""

import json
import math
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from algos.config import field_values
from algos.evaluation import EvaluateEvery
from algos.make import absolute_paths
from algos.presets import Recipe
from algos.storage.run_folder import lock_run_folder, replacing
from algos.training.save import describe

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend
except ImportError as error:
    raise ImportError("the search needs optuna: pip install 'textenv[tune]'") from error

TENTHS = 10
"""Parts of a training; it is evaluated after each, and ends early if it lies below the median of earlier trials."""
COMPLEMENTS = ("gamma", "gae_lambda")
"""Fields whose range is that of 1 minus their value."""
RANGES = {
    "learning_rate": (1e-5, 1e-2), "ent_coef": (1e-8, 0.1), "kl_coef": (1e-4, 0.5), "clip_range": (0.1, 0.4),
    "vf_coef": (0.1, 1.0), "max_grad_norm": (0.3, 2.0), "max_kl": (1e-3, 0.1), "exploration_fraction": (0.01, 0.5),
    "final_exploration": (0.01, 0.2), "gamma": (1e-4, 0.03), "gae_lambda": (1e-4, 0.1),
}  # fmt: skip
"""Logarithmic ranges, mostly those of rl-baselines3-zoo (``hyperparams_opt.py``); a recipe's value widens its range."""
SIZES = (
    "num_steps", "num_episodes", "group_size", "minibatch_size", "num_epochs", "critic_epochs", "batch_size",
    "gradient_steps", "target_update_gradient_steps",
)  # fmt: skip
"""Fields that are multiplied by a power of two, from 1/4 to 4."""


def searched_fields(recipe: Recipe) -> dict[str, float]:
    """Return the fields that are searched, with the recipe's values: those that have a range and are in use."""
    own = field_values(recipe.config) | {"kl_coef": None}
    if isinstance(recipe.kl_coef, (int, float)) and recipe.kl_coef:  # not a changing one
        own["kl_coef"] = recipe.kl_coef
    if recipe.algorithm == "trpo":
        del own["ent_coef"]
    return {name: own[name] for name in (*RANGES, *SIZES) if own.get(name) is not None}


def start_of(name: str, own: float) -> float:
    """Return the recipe's value in Optuna's coordinates; the lower end of a logarithmic range stands for 0."""
    if name in SIZES:
        return 0
    return (1 - own if name in COMPLEMENTS else own) or RANGES[name][0]


def _suggest(trial: optuna.Trial, name: str, own: float) -> float:
    if name in SIZES:
        return max(2 if name == "group_size" else 1, int(own * 2.0 ** trial.suggest_int(name, -2, 2)))
    start, (low, high) = start_of(name, own), RANGES[name]
    found = trial.suggest_float(name, min(low, start), max(high, start), log=True)
    if found == start:
        return own
    return 1 - found if name in COMPLEMENTS else found


def suggested_recipe(trial: optuna.Trial, recipe: Recipe) -> Recipe:
    """Return the recipe with suggested values; a schedule ends at the same fraction of its start as before."""
    own = searched_fields(recipe)
    values: dict[str, Any] = {name: _suggest(trial, name, value) for name, value in own.items()}
    if "group_size" in values:  # whole groups
        values["num_episodes"] = math.ceil(values["num_episodes"] / values["group_size"]) * values["group_size"]
    for name, end in field_values(recipe.config).items():
        start = name.removeprefix("final_")
        if start != name and end and start in own and values[start] != own[start]:
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
    # Absolute paths, as an environment may change the working folder.
    env_kwargs = absolute_paths({"model": recipe.model} | dict(recipe.env_kwargs))
    recipe = replace(recipe, config=agent.config, model=env_kwargs.pop("model"), env_kwargs=env_kwargs)
    run_dir = Path(run_dir).absolute()
    options: dict[str, Any] = {"seeds": seeds, "num_episodes": num_episodes}
    with lock_run_folder(run_dir, resumed=(run_dir / "study.log").exists()):
        study = _study(run_dir, _flags(recipe) | options)
        while len(done := _finished(study)) < trials:
            if not done:
                study.enqueue_trial({name: start_of(name, own) for name, own in searched_fields(recipe).items()})
            # With its own seed, a trial does not depend on where the search was interrupted.
            study.sampler = optuna.samplers.TPESampler(seed=len(done))
            # A loss that is not finite, an invariant, no memory; a ValueError of the recipe itself is wrong input.
            failures = (ArithmeticError, RuntimeError, *([ValueError] if done else []))
            study.optimize(partial(_objective, recipe, failures, **options), n_trials=1, catch=failures)
            last = _finished(study)[-1]
            if not quiet:
                print(f"trial {len(done) + 1} of {trials}: " + "; ".join(_described(last)), flush=True)
            if last.state.name == "COMPLETE":
                with replacing(run_dir / "best.yaml") as new:
                    best = study.best_trial.user_attrs["flags"]
                    new.write_text(yaml.safe_dump(best, sort_keys=False), encoding="utf-8")
    complete = [trial for trial in done if trial.state.name == "COMPLETE"]
    if not complete:
        raise ValueError(f"none of {trials} trials was completed, the last failed: {done[-1].user_attrs['error']}")
    complete.sort(key=attrgetter("value"), reverse=True)
    count = Counter(trial.state.name for trial in done)
    return {
        "mean_return": study.best_value,
        "recipe_mean_return": done[0].value,
        "trials": len(done),
        "ended_early": count["PRUNED"],
        "failed": count["FAIL"],
        "best": str(run_dir / "best.yaml"),
        "best_trials": [(done.index(trial) + 1, *_described(trial)) for trial in complete[:10]],
    }


def _study(run_dir: Path, settings: dict[str, Any]) -> optuna.Study:
    """Open or begin the study of a folder; raise a ValueError if it has other settings."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(run_dir / "study.log"))),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2),
        study_name="tune",
        direction="maximize",
        load_if_exists=True,
    )
    before = study.user_attrs["settings"] if _finished(study) else settings
    for name, now in settings.items():
        if before[name] != now:
            raise ValueError(
                f"{run_dir} holds a search with {name}={before[name]!r:.200}, not {now!r:.200}: repeat its arguments, "
                "or give another folder"
            )
    study.set_user_attr("settings", settings)
    return study


def _flags(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as flags of ``algos train``."""
    own = field_values(recipe)
    config = {name: x for name, x in field_values(own.pop("config")).items() if name != "seed"}
    flags = {"env": own.pop("env"), "algo": own.pop("algorithm")} | own | {"config": config}
    return json.loads(json.dumps(flags, default=describe))


def _finished(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Trials that ended by themselves, failed ones included."""
    ended = ("COMPLETE", "PRUNED")
    return [trial for trial in study.trials if trial.state.name in ended or "error" in trial.user_attrs]


def _objective(
    recipe: Recipe, failures: tuple[type[Exception], ...], trial: optuna.Trial, *, seeds: int, num_episodes: int
) -> float:
    """Train with suggested values, report each evaluation, and return the mean of the last ones."""
    every = math.ceil(recipe.total_steps / TENTHS)
    scores: list[float] = []

    def report(metrics: dict[str, float]) -> None:
        if "eval/mean_return" in metrics and metrics["steps"] < recipe.total_steps:
            trial.report(metrics["eval/mean_return"], len(scores) * TENTHS + int(metrics["steps"] // every))
            if trial.should_prune():
                raise optuna.TrialPruned

    try:
        recipe = suggested_recipe(trial, recipe)
        trial.set_user_attr("flags", _flags(recipe))
        for seed in range(1, seeds + 1):
            agent = recipe.build(seed)
            with closing(agent.env), closing(recipe.environment(min(num_episodes, 64), split="test")) as env:
                evaluation = EvaluateEvery(env, every, num_episodes=num_episodes, seed=seed)
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
    """Result and hyper-parameters of a trial."""
    flags = trial.user_attrs.get("flags", {"config": {}})
    own = {name: x for name, x in (flags | flags["config"]).items() if name in trial.params}
    values = " ".join(f"{name}={x if isinstance(x, int) else format(x, '.4g')}" for name, x in own.items())
    if "error" in trial.user_attrs:
        return f"failed: {trial.user_attrs['error']}", values
    kl = trial.user_attrs.get("kl")
    early = " (ended early)" if trial.state.name == "PRUNED" else ""
    return f"{trial.value:.4g}{early}" + ("" if kl is None else f", KL {kl:.3g}"), values
