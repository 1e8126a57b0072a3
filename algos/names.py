"""Names that were changed, or that other libraries use: an unknown one is refused with the name that it has here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OURS = {
    "adam_epsilon": "adam_eps", "anneal_lr": "final_learning_rate", "batch_size": "minibatch_size",
    "beta": "kl_coefficient", "betas": "adam_betas", "callback": "on_iteration", "callbacks": "on_iteration",
    "clip_coef": "clip_range", "clip_eps": "clip_range", "clip_range_vf": "value_clip_range",
    "cliprange": "clip_range", "cliprange_value": "value_clip_range", "discount": "gamma",
    "ent_coef": "entropy_coefficient", "entropy_coef": "entropy_coefficient", "env_id": "env", "eps": "adam_eps",
    "epsilon": "clip_range", "exploration_final_eps": "final_exploration", "exploration_fraction": "exploration_share",
    "hidden_sizes": "hidden", "init_kl_coef": "kl_coefficient", "kl_coef": "kl_coefficient", "lam": "gae_lambda",
    "log_dir": "run_dir", "lr": "learning_rate", "max_episodes": "episodes", "max_steps": "total_steps",
    "mini_batch_size": "minibatch_size", "model_path": "model", "n_envs": "num_envs", "n_epochs": "epochs",
    "n_eval_episodes": "episodes", "n_steps": "steps", "net_arch": "hidden", "norm_adv": "normalize_advantage",
    "norm_reward": "normalize_rewards", "num_episodes": "episodes", "num_epochs": "epochs",
    "num_generations": "group_size", "num_ppo_epochs": "epochs", "num_steps": "steps", "output_dir": "run_dir",
    "per_device_train_batch_size": "minibatch_size", "ppo_epochs": "epochs", "progress_bar": "progress",
    "scale_rewards": "scale_by_std", "target_network_frequency": "target_every",
    "target_update_interval": "target_every", "tensorboard_log": "run_dir", "timesteps": "total_steps",
    "total_timesteps": "total_steps", "update_epochs": "epochs", "verbose": "progress", "vf_coef": "value_coefficient",
    "vf_lr": "value_learning_rate", "warmup_ratio": "warmup", "whiten_advantages": "normalize_advantage",
}  # fmt: skip
"""Former and foreign names (Stable-Baselines3, CleanRL, TRL), and ours."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one most likely means, by `OURS` or by its spelling; None if there is none."""
    known = list(known)
    if OURS.get(name) in known:
        return OURS[name]
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def refuse_unknown(names: Iterable[str], known: Iterable[str], *, owner: str) -> None:
    """Raise a TypeError that suggests our name, unless all names are known.

    Example:
        >>> refuse_unknown(["lr"], ["learning_rate", "gamma"], owner="PPOConfig")
        Traceback (most recent call last):
            ...
        TypeError: PPOConfig has no 'lr': did you mean 'learning_rate'? It has learning_rate, gamma
    """
    known = list(known)
    for name in names:
        if name not in known:
            ours = nearest(name, known)
            suggestion = "" if ours is None else f": did you mean {ours!r}?"
            raise TypeError(f"{owner} has no {name!r}{suggestion or '.'} It has {', '.join(known)}")


def check_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that an unknown keyword is refused by `refuse_unknown`."""
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        refuse_unknown(options, known, owner=function.__qualname__.removesuffix(".__init__"))
        return function(*args, **options)

    return checked


class NamedFields:
    """Base of config dataclasses, which refuse an unknown field by `refuse_unknown`."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """See the class."""
        refuse_unknown(values, [field.name for field in fields(cls)], owner=cls.__name__)  # type: ignore[arg-type]
        return super().__new__(cls)
