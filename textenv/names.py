"""Former names and names of other libraries: an unknown name raises an error that suggests ours."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, ParamSpec, Self, TypeVar

from textenv.plain import plain

P = ParamSpec("P")
R = TypeVar("R")

OURS = {
    "adam_epsilon": "adam_eps", "anneal_lr": "final_learning_rate", "asker": "annotator",
    "batch_size": "minibatch_size", "beta": "kl_coef", "betas": "adam_betas", "callback": "on_iteration",
    "callbacks": "on_iteration", "clip_coef": "clip_range", "clip_eps": "clip_range", "cliprange": "clip_range",
    "cliprange_value": "clip_range_vf", "coefficient": "coef", "discount": "gamma", "entropy_coef": "ent_coef",
    "entropy_coefficient": "ent_coef", "env_id": "env", "episodes": "num_episodes", "epochs": "num_epochs",
    "eps": "adam_eps", "epsilon": "clip_range", "exploration_final_eps": "final_exploration",
    "exploration_share": "exploration_fraction", "held_out_share": "held_out_fraction", "hidden_sizes": "hidden",
    "init_kl_coef": "kl_coef", "kl_coefficient": "kl_coef", "lam": "gae_lambda", "log_dir": "run_dir",
    "lr": "learning_rate", "max_episodes": "num_episodes", "max_steps": "total_steps",
    "max_completion_length": "max_new_tokens", "max_prompt_length": "max_prompt_tokens",
    "model_name_or_path": "model", "reward_funcs": "reward", "report_to": "logger", "dataset_name": "prompts",
    "mini_batch_size": "minibatch_size", "model_path": "model", "n_envs": "num_envs", "n_epochs": "num_epochs",
    "n_eval_episodes": "num_episodes", "n_steps": "num_steps", "net_arch": "hidden", "norm_adv": "normalize_advantage",
    "norm_reward": "normalize_rewards", "num_generations": "group_size", "num_ppo_epochs": "num_epochs",
    "otherwise": "fallback", "output_dir": "run_dir", "per_device_train_batch_size": "minibatch_size",
    "ppo_epochs": "num_epochs", "progress_bar": "progress", "scale_rewards": "scale_by_std", "share": "fraction",
    "steps": "num_steps", "target_every": "target_update_gradient_steps",
    "target_network_frequency": "target_update_gradient_steps",
    "target_update_interval": "target_update_gradient_steps", "tensorboard_log": "run_dir", "timesteps": "total_steps",
    "total_timesteps": "total_steps", "update_epochs": "num_epochs", "value_clip_range": "clip_range_vf",
    "value_coefficient": "vf_coef", "verbose": "progress", "vf_lr": "value_learning_rate", "warmup": "warmup_ratio",
    "whiten_advantages": "normalize_advantage", "epsilon_high": "clip_higher", "loss_type": "aggregation",
    "importance_sampling_level": "policy_loss", "multi_objective_aggregation": "normalize_each_reward",
    "vllm_importance_sampling_clip_max": "max_importance_weight",
}  # fmt: skip
"""Our name for each former name and each name of Stable-Baselines3, CleanRL and TRL."""
ELSEWHERE = {"sde_sample_freq": "GSDEPolicy has it", "use_sde": "use a GSDEPolicy", "cursor": "use algos.Collector"}
"""Advice for former names, and for names of other libraries, that no field replaces."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to an unknown one, by `OURS` or by spelling; None if no name is close."""
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
            suggestion = f": {ELSEWHERE[name]}." if name in ELSEWHERE else f": did you mean {ours!r}?" if ours else "."
            raise TypeError(f"{owner} has no {name!r}{suggestion} It has {', '.join(known)}")


def check_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that checks a function's keywords by `refuse_unknown`, unless the function accepts any keyword.

    NumPy scalars among the arguments become Python numbers (`textenv.plain.plain`).
    """
    parameters = inspect.signature(function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.name not in ("self", "cls")]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        if not takes_any:
            refuse_unknown(options, known, owner=owner)
        plain_args = [plain(value) for value in args]
        plain_options = {name: plain(value) for name, value in options.items()}
        return function(*plain_args, **plain_options)

    return checked


class NamedFields:
    """Base of config dataclasses; `refuse_unknown` checks the field names."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Refuse unknown fields."""
        refuse_unknown(values, [field.name for field in fields(cls)], owner=cls.__name__)  # type: ignore[arg-type]
        return super().__new__(cls)
