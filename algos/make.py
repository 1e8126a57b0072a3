"""Environments, policies and agents by name."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from algos.config import find_config
from algos.envs.flatten import flat_shape
from algos.envs.wrapping import NO_LIMIT, VECTOR_ONLY, CopiesFinalObservation, Wrapper, make_wrapped
from algos.policies.registry import make_policy as make_policy
from algos.storage.run_reader import AgentRecord, EnvironmentRecord
from algos.storage.saved_environment import check_known_environment, saved_arguments
from textenv.embedded.folder import EMBEDDED
from textenv.embedded.gguf import SMOLLM2
from textenv.importing import absolute_name, load_function, name_of, read_module
from textenv.optional import package

if TYPE_CHECKING:
    from algos.agent import Agent

PROMPTS = "textenv/Prompts-v0"
"""Environment of one's own prompts and rewards."""
logger = logging.getLogger(__name__)
STRING_ARGUMENTS = ("model", "split", "kl_coef", "env_wrappers", "pay_at", "history", "chat")
"""Arguments of an environment with Text spaces that are not its own, besides those of `TextVectorEnv`."""
READY_MODELS = (EMBEDDED, SMOLLM2)
"""Names of models that are no paths."""
WORDS = "textenv/Words-v0"
"""Environment of any Gymnasium environment in words."""
_HAS_TEXT_SPACES: dict[tuple[str, object, str], bool] = {}
"""Environments that were made to see whether they have Text spaces, by id, entry point and arguments."""
ATARI = "ALE/"
"""How ids of Atari games begin, which the package ale_py registers."""
ATARI_ARGUMENTS: dict[str, object] = {"reward_clipping": False, "autoreset_mode": AutoresetMode.SAME_STEP.value}
"""Arguments of ale_py's vector environment: rewards are points, which an algorithm may clip (``clip_rewards``), and no
step is spent on a reset."""
PATH_ARGUMENTS = ("model", "prompts", "eval_prompts", "reward", "wrappers", "env_wrappers", "describe")
"""Arguments of an environment that may name a file or folder, or several."""
TEXTS_IN_LISTS = ("prompts", "eval_prompts")
"""Those of them of which a list holds the texts themselves."""


def make_vector_environment(
    env_id: str,
    num_envs: int,
    *,
    seed_each: bool = False,
    process_timeout: float | None = None,
    wrappers: Sequence[Wrapper] = (),
    **arguments: Any,
) -> VectorEnv:
    """Make a vector environment: the native one if there is one, else one that steps single environments.

    Args:
        env_id: Gymnasium id; ``module:id`` first imports the module that registers it.
        num_envs: slots.
        seed_each: True if each slot needs its own reset seed (control); native environments do not support it.
        process_timeout: seconds after which a step counts as failed (control). Each environment then runs in its own
            process (`SubprocessVectorEnv`). None: all run in this process.
        wrappers: functions that wrap each environment, the innermost first, or their names,
            ``package.module:function`` or ``file.py:function`` (control; for textenv/Words-v0 and environments with
            Text spaces, before they are put into words).
        arguments: further arguments of the environment. One with Text spaces takes those of textenv/Words-v0, too, such
            as ``model``.

    Raises:
        ValueError: if the module or environment is unknown, an argument is not accepted, or the observations have no
            fixed size; if process_timeout or wrappers are given for a text environment; or if a wrapper fails.
    """
    # Import what may register the environment: its module, and packages of wrappers
    module, _, env_id = env_id.rpartition(":")
    if env_id.startswith(ATARI):
        package("ale_py", "atari")
    if module:
        read_module(module)
    for wrapper in wrappers:
        if isinstance(wrapper, str):
            load_function(wrapper)

    arguments = absolute_paths(arguments)
    wrappers = absolute_paths({"wrappers": wrappers})["wrappers"]
    is_text_env = is_text(env_id, arguments)
    _check_limit(arguments, is_text_env=is_text_env)
    leaves_out_limit = arguments.get("max_episode_steps") == NO_LIMIT
    registered = gymnasium.registry.get(env_id)
    if leaves_out_limit and registered is not None and registered.max_episode_steps is None:
        del arguments["max_episode_steps"]  # there is none
        leaves_out_limit = False
    if process_timeout is not None and is_text_env:
        raise ValueError(f"process_timeout is {process_timeout}, expected None for a text environment ({env_id})")
    is_string_env = has_text_spaces(env_id, arguments)
    if wrappers and is_text_env and not (is_string_env or env_id == WORDS):
        raise ValueError(f"wrappers are for control, but {env_id} is text: its episodes are not played step by step")

    try:
        spec = gymnasium.spec(env_id)
        if env_id.startswith(ATARI) and (wrappers or process_timeout is not None):
            logger.warning(
                "%s is made as single games, because of its wrappers or process_timeout: they have no stacked, "
                "grey and smaller images, which ale_py's vector environment makes. Wrap them yourself, or leave these "
                "options out",
                env_id,
            )
        make_single = partial(make_wrapped, spec, wrappers, **arguments)
        env: VectorEnv
        if is_string_env or env_id == WORDS:
            env_wrappers = [*arguments.get("env_wrappers", ()), *wrappers]
            env = _words_environment(env_id, num_envs, **(arguments | {"env_wrappers": env_wrappers}))
        elif process_timeout is not None:
            from algos.envs.subprocess_env import SubprocessVectorEnv

            env = SubprocessVectorEnv([make_single] * num_envs, timeout=process_timeout)
        elif wrappers or not spec.vector_entry_point or leaves_out_limit or (seed_each and not is_text_env):
            # SAME_STEP spends no step on a reset. Native environments take "no limit" for a number of steps
            def make_copying() -> gymnasium.Env:
                return CopiesFinalObservation(make_single())

            env = SyncVectorEnv([make_copying] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        else:
            if env_id.startswith(ATARI):
                arguments = ATARI_ARGUMENTS | arguments
            env = gymnasium.make_vec(env_id, num_envs=num_envs, **arguments)
        if not is_text_env:
            flat_shape(env.single_observation_space)  # raises now if no policy can read the observations
    except gymnasium.error.DependencyNotInstalled as error:
        raise ValueError(f"cannot make environment {env_id!r}, which needs a package: {error}") from error
    except gymnasium.error.Error as error:
        text_env_ids = ", ".join(sorted(name for name in gymnasium.registry if name.startswith("textenv/")))
        raise ValueError(
            f"cannot make environment {env_id!r}: {error} Text environments are {text_env_ids}; "
            "gymnasium.pprint_registry() lists the others. Give your own, or a package's, as module:id, such as "
            "minigrid:MiniGrid-Empty-5x5-v0, or evaluate a saved agent with algos.evaluate(env, algos.load(folder))."
        ) from error

    # What is saved with an agent: id and arguments of its environment, wrappers, and the module that registers it
    env.spec = dataclasses.replace(spec, kwargs=spec.kwargs | arguments | {"wrappers": wrappers})
    vars(env.spec)["module"] = module or None
    return env


def _check_limit(arguments: dict[str, Any], *, is_text_env: bool) -> None:
    """Raise a ValueError on a wrong limit of steps; remove one that is None, which is the default.

    Some native environments compare None with their steps.
    """
    limit = arguments.get("max_episode_steps")
    if limit is None:
        arguments.pop("max_episode_steps", None)
        return
    if limit == NO_LIMIT and not is_text_env:
        return
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(
            f"max_episode_steps is {limit!r}, expected an integer of at least 1, None (the default) or, for control, "
            f"{NO_LIMIT} (no limit)"
        )


def _words_environment(env_id: str, num_envs: int, **arguments: Any) -> VectorEnv:
    """Make textenv/Words-v0, or an environment with Text spaces, whose own arguments stand among the others."""
    from textenv.registration import make_vector_env

    if env_id == WORDS:
        return make_vector_env("Words", num_envs, **arguments)
    env_kwargs = _arguments_of_strings(arguments)
    text_arguments = {name: value for name, value in arguments.items() if name not in env_kwargs}
    return make_vector_env("Words", num_envs, env=env_id, env_kwargs=env_kwargs, **text_arguments)


def _arguments_of_strings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an environment with Text spaces that are its own, not those of textenv/Words-v0."""
    from textenv.envs.vector_env import TextVectorEnv  # loads torch

    names_of_text = {*inspect.signature(TextVectorEnv).parameters, *STRING_ARGUMENTS, *VECTOR_ONLY}
    return {name: value for name, value in arguments.items() if name not in names_of_text}


def absolute_paths(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return arguments of an environment with absolute paths, because a reward may change the working folder.

    Example:
        >>> absolute_paths({"reward": ["missing.py:f", len], "model": "embedded", "split": "test"})
        {'reward': ['missing.py:f', <built-in function len>], 'model': 'embedded', 'split': 'test'}
    """
    absolute = dict(arguments)
    for name in PATH_ARGUMENTS:
        value = arguments.get(name)
        if isinstance(value, (list, tuple)):
            if name in TEXTS_IN_LISTS:
                continue
            absolute[name] = type(value)(absolute_name(x) if isinstance(x, str) else x for x in value)
        elif isinstance(value, (str, Path)) and value not in READY_MODELS:
            absolute[name] = absolute_name(str(value))
    return absolute


def is_ours(env_id: str) -> bool:
    """True for ids of this kit's text environments, which take a model, a KL coefficient and a split."""
    return _without_module(env_id).startswith("textenv/")


def takes_model(env_id: str, env_kwargs: Mapping[str, Any] | None = None) -> bool:
    """True for environments that are made for a language model: this kit's, and those of `has_text_spaces`."""
    return is_ours(env_id) or has_text_spaces(env_id, env_kwargs)


def has_text_spaces(env_id: str, env_kwargs: Mapping[str, Any] | None = None) -> bool:
    """True for environments that read and write strings, and have no vector entry point of their own.

    Their spaces are known once one is made. If that fails, the answer is False.

    Args:
        env_id: Gymnasium id, or ``module:id``.
        env_kwargs: arguments of the environment, among those of textenv/Words-v0, which make no difference.
    """
    module, _, bare_id = env_id.rpartition(":")
    if module:
        with suppress(ValueError):  # raised again when the environment is made in earnest
            read_module(module)
    spec = gymnasium.registry.get(bare_id)
    if spec is None or spec.vector_entry_point is not None:
        return False
    entry_point: Any = spec.entry_point
    if str(entry_point).startswith("gymnasium.envs."):  # none of these does
        return False

    # Make it, unless one of the same arguments was made before
    arguments = _arguments_of_strings(env_kwargs) if env_kwargs else {}
    try:
        all_arguments = json.dumps({**spec.kwargs, **arguments}, sort_keys=True)
    except TypeError:  # objects, which may be other ones next time
        return bool(_makes_text(spec.id, arguments))
    key = (spec.id, entry_point, all_arguments)
    if key not in _HAS_TEXT_SPACES:
        makes_text = _makes_text(spec.id, arguments)
        if makes_text is None:
            return False
        _HAS_TEXT_SPACES[key] = makes_text
    return _HAS_TEXT_SPACES[key]


def _makes_text(env_id: str, arguments: Mapping[str, Any]) -> bool | None:
    """Make an environment, to see whether it has Text spaces; return None if that fails."""
    try:
        env = gymnasium.make(env_id, **arguments)
    except Exception:  # of anybody's environment; making it in earnest says what is wrong
        return None
    is_string_env = isinstance(env.observation_space, spaces.Text) and isinstance(env.action_space, spaces.Text)
    env.close()
    return is_string_env


def is_text(env_id: str, env_kwargs: Mapping[str, Any] | None = None) -> bool:
    """True for text: this kit's ids, `has_text_spaces`, and ids whose vector entry point is an EpisodeEnv.

    Args:
        env_id: Gymnasium id, or ``module:id``.
        env_kwargs: arguments of the environment; see `has_text_spaces`.
    """
    if takes_model(env_id, env_kwargs):
        return True
    spec = gymnasium.registry.get(_without_module(env_id))
    entry_point: Any = None if spec is None else spec.vector_entry_point

    # The entry point is the class itself, or a function: then its return annotation is the class, or the class's name
    env_type = entry_point
    if callable(entry_point) and not isinstance(entry_point, type):
        env_type = None
        if inspect.isfunction(entry_point):
            env_type = entry_point.__annotations__.get("return")
        if isinstance(env_type, str):
            env_type = entry_point.__globals__.get(env_type)
    if not isinstance(env_type, type):
        return False
    from textenv.rollout import EpisodeEnv  # loads torch

    return issubclass(env_type, EpisodeEnv)


def _without_module(env_id: str) -> str:
    """``id`` of ``module:id``."""
    return env_id.rpartition(":")[2]


def find_algorithm(algorithm: object) -> type[Agent]:
    """Find the class of an algorithm by its name; a class is returned as it is. Raises as `find_config` does."""
    config_type = find_config(algorithm)
    if isinstance(algorithm, type):
        return algorithm
    class_name = config_type.__name__.removesuffix("Config")
    return resolve_name(f"algos.{algorithm}:{class_name}")


def remake_environment(
    description: AgentRecord,
    *,
    num_envs: int,
    env_id: str | None = None,
    reward: Sequence[str] = (),
    prompts: str | Path | None = None,
    wrappers: Sequence[str] = (),
    env_kwargs: Mapping[str, object] | None = None,
) -> VectorEnv:
    """Make the environment of a saved agent; our text environments use the test split and measure the KL.

    Args:
        description: what `algos.training.save.read_description` returned.
        num_envs: slots.
        env_id: another environment, or the same one with the module that registers it.
        reward: reward functions of textenv/Prompts-v0, named as for ``make_vec``.
        prompts: other prompts for textenv/Prompts-v0.
        wrappers: wrappers of each environment, as for `make_vector_environment`.
        env_kwargs: arguments of the environment that replace the saved ones.

    Raises:
        DamagedRunError: if a saved argument is of another type than it must be.
        ValueError: if the saved environment has no id; or if a module would be imported for it, its arguments, its
            reward or its wrappers, because a saved file must not cause imports.
    """
    saved = description["environment"]
    if saved is None and env_id is None:
        raise ValueError(
            "this agent was trained in an environment without an id: give one with --env, or call "
            "algos.evaluate(env, policy)"
        )

    # Id and arguments: the saved ones, if no other environment is named
    arguments: dict[str, Any] = dict(env_kwargs or {})
    if saved is not None and (env_id is None or _without_module(env_id) == saved["id"]):
        if env_id is None:
            _check_imports_nothing(saved)
            env_id = saved["id"]
        if not wrappers and saved.get("vector_wrappers"):
            names_of_wrappers = ", ".join(saved["vector_wrappers"])
            raise ValueError(
                f"this agent's environment has wrappers of all slots at once ({names_of_wrappers:.300}), which cannot "
                "be made again: call algos.evaluate(env, algos.load(folder)) with an environment that is wrapped "
                "alike, or name a function that does the same to each environment: --wrapper file.py:function"
            )
        if not wrappers and saved.get("wrappers"):
            flags = _flags_for("--wrapper", saved["wrappers"])
            raise ValueError(f"what wraps this agent's environment is run only if you name it: {flags:.300}")
        replaced = {"reward", *arguments}
        if prompts:
            replaced |= {"prompts", "eval_prompts"}
        arguments = saved_arguments(saved, replaced=replaced) | arguments
        if not saved.get("vector_wrappers"):
            _warn_of_other_wrappers(wrappers, saved.get("wrappers", []))
    assert env_id is not None
    if takes_model(env_id, arguments):
        # A coefficient of 0 measures the KL and charges nothing
        arguments |= {"split": "test", "kl_coef": arguments.get("kl_coef") or 0.0}

    # Rewards and prompts
    if _without_module(env_id) == PROMPTS:
        if not reward:
            names: object = "rewards.py:function"
            if saved is not None:
                names = saved["kwargs"].get("reward", names)
            flags = _flags_for("--reward", names)
            raise ValueError(f"the file of this agent's reward is run only if you name it: {flags:.300}")
        arguments["reward"] = reward
        if prompts:
            arguments |= {"prompts": prompts, "eval_prompts": prompts}
    elif reward or prompts:
        raise ValueError(f"--reward and --prompts are for agents of {PROMPTS}, not of {env_id}: omit them")
    return make_vector_environment(env_id, num_envs, **{**arguments, "wrappers": wrappers})


def _check_imports_nothing(saved: EnvironmentRecord) -> None:
    """Raise a ValueError if a module would be imported for a saved agent's environment."""
    module = saved.get("module")
    if module:
        hint = f"the module is imported only if you name it: --env {module}:{saved['id']}"
        raise ValueError(f"this agent was trained on {saved['id']} from the module {module!r:.100}; {hint:.300}")
    check_known_environment(saved["id"])


def _warn_of_other_wrappers(wrappers: Sequence[Wrapper], names_of_run: Sequence[str]) -> None:
    """Log a warning if an environment has other wrappers than that of the training, or in another order.

    Modules and files are not compared: a function may have several names, and a file is elsewhere on another machine.
    """
    names = [wrapper if isinstance(wrapper, str) else name_of(wrapper) for wrapper in wrappers]
    if [name.rpartition(":")[2] for name in names] != [name.rpartition(":")[2] for name in names_of_run]:
        logger.warning(
            "this agent was trained with the wrappers %s, and this environment has %s: the policy may read other "
            "observations, or act otherwise, than it has learnt",
            ", ".join(names_of_run) or "none",
            ", ".join(names),
        )


def _flags_for(flag: str, names: object) -> str:
    """Write ``flag name`` for each of the names, or for a single one."""
    if not isinstance(names, list):
        names = [names]
    return " ".join(f"{flag} {shlex.quote(str(name))}" for name in names)
