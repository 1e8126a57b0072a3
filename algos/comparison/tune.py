"""Hyper-parameter search by Optuna: ranges of fields, trials, and the best configuration as a file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from algos.config import TRPOConfig, field_values
from algos.presets import Recipe
from algos.training.run_folder import check_new, hold, replacing
from algos.training.save import describe

if TYPE_CHECKING:
    import optuna

TENTHS = 10
"""Parts of a training; it is evaluated after each, and ends early if it lies below the median of earlier trials."""
RANGES = {
    "learning_rate": (1e-5, 1e-2), "ent_coef": (1e-8, 0.1), "kl_coef": (1e-4, 0.5), "clip_range": (0.1, 0.4),
    "vf_coef": (0.1, 1.0), "max_grad_norm": (0.3, 2.0), "max_kl": (1e-3, 0.1), "exploration_fraction": (0.01, 0.5),
    "final_exploration": (0.01, 0.2),
}  # fmt: skip
"""Logarithmic ranges, mostly those of rl-baselines3-zoo (``hyperparams_opt.py``); a recipe's value widens its range."""
COMPLEMENTS = {"gamma": (1e-4, 0.03), "gae_lambda": (1e-4, 0.1)}
"""Logarithmic ranges of 1 minus the field, of rl-baselines3-zoo."""
SIZES = (
    "num_steps", "num_episodes", "group_size", "minibatch_size", "num_epochs", "critic_epochs", "batch_size",
    "gradient_steps", "target_update_gradient_steps",
)  # fmt: skip
"""Fields that are multiplied by a power of two, from 1/4 to 4."""


def searched_fields(recipe: Recipe) -> dict[str, float]:
    """Return the fields that are searched, with the recipe's values: those that have a range and are in use."""
    own = field_values(recipe.config) | ({"kl_coef": recipe.kl_coef} if recipe.kl_coef else {})
    unused = {"ent_coef"} if isinstance(recipe.config, TRPOConfig) else set()
    names = [name for name in (*RANGES, *COMPLEMENTS, *SIZES) if name not in unused]
    return {name: own[name] for name in names if own.get(name) is not None}


def start_of(name: str, own: float) -> float:
    """Return the recipe's value in Optuna's coordinates; the lower end of a logarithmic range stands for 0."""
    if name in SIZES:
        return 0
    return own or RANGES[name][0] if name in RANGES else (1 - own) or COMPLEMENTS[name][0]


def _suggest(trial: optuna.Trial, name: str, own: float) -> float:
    if name in SIZES:
        return max(2 if name == "group_size" else 1, int(own * 2.0 ** trial.suggest_int(name, -2, 2)))
    start, (low, high) = start_of(name, own), RANGES.get(name) or COMPLEMENTS[name]
    found = trial.suggest_float(name, min(low, start), max(high, start), log=True)
    return own if found == start else found if name in RANGES else 1 - found


def suggested_recipe(trial: optuna.Trial, recipe: Recipe) -> Recipe:
    """Return the recipe with suggested values; a schedule ends at the same fraction of its start as before."""
    own = searched_fields(recipe)
    values: dict[str, Any] = {name: _suggest(trial, name, value) for name, value in own.items()}
    if "group_size" in values:  # whole groups
        values["num_episodes"] = math.ceil(values["num_episodes"] / values["group_size"]) * values["group_size"]
    for name, end in field_values(recipe.config).items():
        start = name.removeprefix("final_")
        if start != name and end and values.get(start, own.get(start)) != own.get(start):
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
        ValueError: if a number is below 1, the folder holds another search, or no trial was completed.
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
        study = _study(run_dir, _flags(recipe) | {"seeds": seeds, "num_episodes": num_episodes, "seed": seed})
        done = _finished(study)
        while len(done) < trials:
            if not done:
                study.enqueue_trial({name: start_of(name, own) for name, own in searched_fields(recipe).items()})
            # With its own seed, a trial does not depend on where the search was interrupted.
            study.sampler = optuna.samplers.TPESampler(seed=10_000 * seed + len(done))
            _run_trial(study, recipe, seeds=seeds, num_episodes=num_episodes)
            done = _finished(study)
            if not quiet:
                print(f"trial {len(done)} of {trials}: " + "; ".join(_described(done[-1])), flush=True)
            if done[-1].state.name == "COMPLETE":
                with replacing(run_dir / "best.yaml") as new:
                    flags = study.best_trial.user_attrs["flags"]
                    new.write_text(yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")
    if all(trial.state.name != "COMPLETE" for trial in done):
        raise ValueError(
            f"none of {len(done)} trials was completed, the last failed with {done[-1].user_attrs['error']}"
        )
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
    before = study.user_attrs.get("settings", settings) if _finished(study) else settings
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


def _flags(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as flags of ``algos train``."""
    flags = {name: value for name, value in field_values(recipe).items() if value is not None}
    config = field_values(flags.pop("config"))
    del config["seed"]
    for name in ("policy_kwargs", "env_kwargs"):
        flags[name] = {key: value for key, value in flags[name].items() if value is not None}
    flags["config"] = config
    return json.loads(json.dumps({"env": flags["env"], "algo": flags.pop("algorithm")} | flags, default=describe))


def _finished(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Trials that ended by themselves, failed ones included."""
    ended = ("COMPLETE", "PRUNED")
    return [trial for trial in study.get_trials() if trial.state.name in ended or "error" in trial.user_attrs]


def _run_trial(study: optuna.Study, recipe: Recipe, *, seeds: int, num_episodes: int) -> None:
    """Train with suggested values, and record the outcome in the study."""
    import optuna

    trial = study.ask()
    try:
        given = suggested_recipe(trial, recipe)
        trial.set_user_attr("flags", _flags(given))
        score = sum(_train(given, trial, seed=seed, num_episodes=num_episodes) for seed in range(1, seeds + 1)) / seeds
        if not math.isfinite(score):
            raise ArithmeticError(f"the mean return is {score}")
        study.tell(trial, score)
    except optuna.TrialPruned:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    except (ValueError, ArithmeticError, RuntimeError) as error:  # not finite, an invariant, no memory
        if isinstance(error, ValueError) and not any(each.value is not None for each in study.get_trials()):
            raise  # wrong input, which fails in every trial
        trial.set_user_attr("error", f"{type(error).__name__}: {error}"[:500])
        study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _train(recipe: Recipe, trial: optuna.Trial, *, seed: int, num_episodes: int) -> float:
    """Train once, report each evaluation, and return the last mean return."""
    import optuna

    from algos.evaluation import EvaluateEvery

    every = math.ceil(recipe.total_steps / TENTHS)

    def report(metrics: dict[str, float]) -> None:
        if "eval/mean_return" in metrics and metrics["steps"] < recipe.total_steps:
            trial.report(metrics["eval/mean_return"], (seed - 1) * TENTHS + int(metrics["steps"] // every))
            if trial.should_prune():
                raise optuna.TrialPruned

    agent = recipe.build(seed)
    with closing(agent.env), closing(recipe.environment(min(num_episodes, 64), split="test")) as env:
        evaluation = EvaluateEvery(env, every, num_episodes=num_episodes, seed=seed)
        history = agent.learn(recipe.total_steps, callbacks=[evaluation], on_iteration=report, sample_every=0)
    trial.set_user_attr("kl", history[-1].get("eval/kl"))
    return history[-1]["eval/mean_return"]


def _described(trial: optuna.trial.FrozenTrial) -> tuple[str, str]:
    """Outcome and hyper-parameters of a trial."""
    outcome = {"COMPLETE": "", "PRUNED": " (ended early)", "FAIL": f"failed: {trial.user_attrs.get('error')}"}
    value = "" if trial.value is None else f"{trial.value:.4g}"
    if (kl := trial.user_attrs.get("kl")) is not None:
        value += f", KL {kl:.3g}"
    flags = trial.user_attrs.get("flags", {"config": {}})
    values = ((name, (flags | flags["config"]).get(name)) for name in trial.params)
    shown = (f"{name}={x if isinstance(x, int) else format(x, '.4g')}" for name, x in values if x is not None)
    return value + outcome[trial.state.name], " ".join(shown)


def _print_table(done: Sequence[optuna.trial.FrozenTrial]) -> None:
    """Print the ten best trials."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("trial", "mean return", "hyper-parameters", title="Best trials; trial 1 is the recipe")
    table.columns[2].overflow = "fold"
    complete = [(trial.value, -place, trial) for place, trial in enumerate(done, 1) if trial.state.name == "COMPLETE"]
    for _, place, trial in sorted(complete, reverse=True)[:10]:
        table.add_row(*map(Text, (str(-place), *_described(trial))))
    Console().print(table)
