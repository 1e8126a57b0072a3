"""Environments, policies and agents by name."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from algos.config import find_config
from algos.envs.flatten import flat_shape
from algos.envs.wrapping import Wrapper, make_wrapped
from algos.policies.registry import make_policy as make_policy
from algos.storage.run_reader import AgentRecord, EnvironmentRecord
from algos.storage.saved_environment import check_known_environment, saved_arguments
from textenv.importing import absolute_name, load_function, read_module

if TYPE_CHECKING:
    from algos.agent import Agent

PROMPTS = "textenv/Prompts-v0"
"""Environment of one's own prompts and rewards."""
READY_MODELS = ("embedded", "smollm2")
"""Names of models that are no paths."""
PATHS = ("model", "prompts", "eval_prompts", "reward", "wrappers")
"""Arguments of an environment that may name a file or folder, or several."""


def make_vector_environment(
    env_id: str, num_envs: int, *, seed_each: bool = False, process_timeout: float | None = None,
    wrappers: Sequence[Wrapper] = (), **arguments: Any,
) -> VectorEnv:  # fmt: skip
    """Make the native vector environment, if any, else one that steps single environments in this process.

    Args:
        env_id: Gymnasium id; ``module:id`` first imports the module that registers it.
        num_envs: slots.
        seed_each: True if each slot needs its own reset seed (control); native environments do not support it.
        process_timeout: seconds after which a step counts as failed, in control; each environment then runs in its own
            process (`SubprocessVectorEnv`). None: all run in this process.
        wrappers: functions that wrap each environment, the innermost first, or names of them,
            ``package.module:function`` or ``file.py:function``; for control.
        arguments: further arguments of the environment.

    Raises:
        ValueError: if the module or environment is unknown, an argument is not accepted, or the observations have no
            fixed size; if process_timeout or wrappers are given for a text environment; or if a wrapper fails.
    """
    module, _, env_id = env_id.rpartition(":")
    if module:
        read_module(module)
    for name in wrappers:
        if isinstance(name, str):
            load_function(name)  # its package may register the environment
    arguments = absolute_paths(arguments)
    wrappers = absolute_paths({"wrappers": wrappers})["wrappers"]
    limit = arguments.get("max_episode_steps")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"max_episode_steps is {limit!r}, expected an integer of at least 1, or None (the default)")
    if process_timeout is not None and is_text(env_id):
        raise ValueError(f"process_timeout is {process_timeout}, expected None for a text environment ({env_id})")
    if wrappers and is_text(env_id):
        raise ValueError(f"wrappers are for control, but {env_id} is text: its episodes are not played step by step")
    try:
        spec = gymnasium.spec(env_id)
        single = partial(make_wrapped, spec, wrappers, **arguments)
        if process_timeout is not None:
            from algos.envs.subprocess_env import SubprocessVectorEnv

            env: VectorEnv = SubprocessVectorEnv([single] * num_envs, timeout=process_timeout)
        elif wrappers or not spec.vector_entry_point or (seed_each and not is_text(env_id)):
            # SAME_STEP spends no step on a reset.
            env = SyncVectorEnv([single] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        else:
            env = gymnasium.make_vec(env_id, num_envs=num_envs, **arguments)
        if not is_text(env_id):
            flat_shape(env.single_observation_space)  # raises now if no policy can read the observations
        env.spec = dataclasses.replace(spec, kwargs=spec.kwargs | arguments | {"wrappers": wrappers})  # for saving
        vars(env.spec)["module"] = module or None
        return env
    except gymnasium.error.Error as error:
        known = ", ".join(sorted(name for name in gymnasium.registry if name.startswith("textenv/")))
        raise ValueError(
            f"cannot make environment {env_id!r}: {error} Text environments are {known}; "
            "gymnasium.pprint_registry() lists the others. Give your own, or a package's, as module:id, such as "
            "minigrid:MiniGrid-Empty-5x5-v0, or evaluate a saved agent with algos.evaluate(env, algos.load(folder))."
        ) from error


def absolute_paths(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of an environment with absolute paths, as a reward may change the working folder.

    Example:
        >>> absolute_paths({"reward": ["missing.py:f", len], "model": "embedded", "split": "test"})
        {'reward': ['missing.py:f', <built-in function len>], 'model': 'embedded', 'split': 'test'}
    """
    located = dict(arguments)
    for name in PATHS:
        value = arguments.get(name)
        if isinstance(value, (list, tuple)):
            located[name] = type(value)(absolute_name(x) if isinstance(x, str) else x for x in value)
        elif isinstance(value, (str, Path)) and value not in READY_MODELS:
            located[name] = absolute_name(str(value))
    return located


def is_ours(env_id: str) -> bool:
    """True if the id is a text environment of this kit, which takes a model, a KL coefficient and a split."""
    return env_id.rpartition(":")[2].startswith("textenv/")


def is_text(env_id: str) -> bool:
    """True for our text environments, and if the vector entry point is an EpisodeEnv or returns one."""
    spec = gymnasium.registry.get(env_id.rpartition(":")[2])
    entry: Any = None if spec is None else spec.vector_entry_point
    if callable(entry) and not isinstance(entry, type):
        kind = entry.__annotations__.get("return") if inspect.isfunction(entry) else None
        entry = entry.__globals__.get(kind) if isinstance(kind, str) else kind
    if is_ours(env_id) or not isinstance(entry, type):
        return is_ours(env_id)
    from textenv.rollout import EpisodeEnv

    return issubclass(entry, EpisodeEnv)


def find_algorithm(algorithm: Any) -> type[Agent]:
    """Find the class of an algorithm by its name; a class is its own. Raises as `find_config` does."""
    config = find_config(algorithm)
    if isinstance(algorithm, type):
        return algorithm
    return resolve_name(f"algos.{algorithm}:{config.__name__.removesuffix('Config')}")


def remake_environment(
    description: AgentRecord, *, num_envs: int, env_id: str | None = None, reward: Sequence[str] = (),
    prompts: str | Path | None = None, wrappers: Sequence[str] = (), env_kwargs: Mapping[str, Any] | None = None,
) -> VectorEnv:  # fmt: skip
    """Make the environment of a saved agent; our text environments use the test split and measure the KL.

    Args:
        description: the agent's, from `algos.training.save.read_description`.
        num_envs: slots.
        env_id: another environment, or the same one with the module that registers it.
        reward: reward functions of textenv/Prompts-v0, named as for ``make_vec``.
        prompts: other prompts for textenv/Prompts-v0.
        wrappers: wrappers of each environment, as for `make_vector_environment`.
        env_kwargs: arguments of the environment that replace the saved ones.

    Raises:
        DamagedRunError: if a saved argument is of another type than it must be.
        ValueError: if the saved environment has no id, or a module would be imported for it, its arguments, its reward
            or its wrappers: a saved file must not cause imports.
    """
    saved = description["environment"]
    if saved is None and env_id is None:
        hint = "give one with --env, or call algos.evaluate(env, policy)"
        raise ValueError(f"this agent was trained in an environment without an id: {hint}")
    given = dict(env_kwargs or {})
    if env_id is not None and (saved is None or env_id.rpartition(":")[2] != saved["id"]):
        wanted, arguments = env_id, given
    else:
        assert saved is not None
        wanted = saved["id"] if env_id is None else env_id
        if env_id is None:
            _check_named(saved)
        if not wrappers and saved.get("wrappers"):
            flags = _flags_for("--wrapper", saved["wrappers"])
            raise ValueError(f"what wraps this agent's environment is run only if you name it: {flags:.300}")
        arguments = saved_arguments(saved, renamed={"reward", *given}) | given
    if is_ours(wanted):
        arguments |= {"split": "test", "kl_coef": arguments.get("kl_coef") or 0.0}
    if wanted.rpartition(":")[2] == PROMPTS:
        if not reward:
            names = "rewards.py:function" if saved is None else saved["kwargs"].get("reward", "rewards.py:function")
            flags = _flags_for("--reward", names)
            raise ValueError(f"the file of this agent's reward is run only if you name it: {flags:.300}")
        arguments |= {"reward": reward} | ({"prompts": prompts, "eval_prompts": prompts} if prompts else {})
    elif reward or prompts:
        raise ValueError(f"--reward and --prompts are for agents of {PROMPTS}, not of {wanted}: omit them")
    return make_vector_environment(wanted, num_envs, **{**arguments, "wrappers": wrappers})


def _check_named(saved: EnvironmentRecord) -> None:
    """Raise a ValueError if a module would be imported for a saved agent's environment."""
    module = saved.get("module")
    if module:
        hint = f"the module is imported only if you name it: --env {module}:{saved['id']}"
        raise ValueError(f"this agent was trained on {saved['id']} from the module {module!r:.100}; {hint:.300}")
    check_known_environment(saved["id"])


def _flags_for(flag: str, names: Any) -> str:
    each = names if isinstance(names, list) else [names]
    return " ".join(f"{flag} {shlex.quote(str(name))}" for name in each)
