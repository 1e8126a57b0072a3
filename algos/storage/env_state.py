"""Save and restore mid-episode state of Gymnasium environments, and the states of the objects that they call."""

import json
import logging
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any
from weakref import WeakSet

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from algos.storage.run_folder import OBJECTS, remove, replacing
from algos.storage.serialization import attributes, from_json, set_attributes, to_json
from textenv.json_files import parse_json
from textenv.rollout import is_episode_env
from textenv.state import Stateful, copy_states, set_states, states_of

logger = logging.getLogger(__name__)
KNOWN = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text", "gymnasium.vector", "gymnasium.wrappers",
         "textenv", "algos")  # fmt: skip
"""Packages whose environments keep all state in attributes; others may hide some (a simulator's memory)."""

_TOLD: WeakSet[Any] = WeakSet()
"""Environments that cannot be saved and have been warned about."""


def env_state(env: Any) -> list[dict[str, Any]] | None:
    """Return the state of an environment, wrapper by wrapper, including the single environments of a vector.

    Args:
        env: a `gymnasium.Env` or `gymnasium.vector.VectorEnv`. Its ``state_dict`` and ``load_state_dict`` are used if
            it has them; otherwise its attributes that are numbers, text, arrays and random generators, and those of the
            objects that hold such values (running statistics).

    Returns:
        Input for `set_env_state`; None if a part is of a package outside `KNOWN`, holds something that cannot be saved,
        or runs in another process. Such an environment is reset when a run resumes.
    """
    try:
        return [_state_of(part) for part in _parts(env)]
    except TypeError as error:
        if env not in _TOLD:
            _TOLD.add(env)
            logger.warning("%s; so --resume would reset it, and its results would differ", error)
        return None


def _state_of(part: Any) -> dict[str, Any]:
    """Return the state of one wrapper or environment; TypeError if part of it cannot be saved."""
    if isinstance(part, Stateful):
        return {"class": _name(part), "state": part.state_dict()}
    if not _known(part):
        raise TypeError(f"{_name(part)} cannot be saved mid-episode, only local environments of Gymnasium or ours")
    state, objects = attributes(part), {}
    for name, value in vars(part).items():
        if name in state or _inert(value):
            continue
        objects[name] = attributes(value) if _known(value) else {}
        if not objects[name] or objects[name].keys() != vars(value).keys():
            raise TypeError(f"{_name(part)} cannot be saved mid-episode: its {name} is a {type(value).__name__}")
    return {"class": _name(part), "state": state, "objects": objects}


def set_env_state(env: Any, state: list[dict[str, Any]]) -> None:
    """Restore saved mid-episode state in an environment of the same kind.

    Args:
        env: built like the saved one; it is reset first, to create what only a reset creates.
        state: from `env_state`.

    Raises:
        ValueError: if it is wrapped or built differently.
    """
    env.reset(seed=0)
    parts = list(_parts(env))
    if [_name(part) for part in parts] != [saved["class"] for saved in state]:
        raise ValueError(
            f"the environment is {' > '.join(map(_name, parts))}, but the saved one was "
            f"{' > '.join(saved['class'] for saved in state)}: make it in the same way as for the run"
        )
    for part, saved in zip(parts, state, strict=True):
        if isinstance(part, Stateful):
            part.load_state_dict(saved["state"])
        else:
            set_attributes(part, saved["state"])
            for name, values in saved["objects"].items():
                set_attributes(vars(part)[name], values)


def user_objects(env: Any) -> dict[str, Any]:
    """Return the objects that an environment calls, such as its task with the rewards; none in control."""
    return env.user_objects if is_episode_env(env) else {}


def share_objects(training_env: Any, env: Any) -> None:
    """Put the rewards and other objects of an environment for evaluation into the state of the training's."""
    copy_states(user_objects(training_env), user_objects(env))


def restore_objects(env: Any, state: list[dict[str, Any]] | None) -> None:
    """Restore only the states of the objects that an environment calls, from a result of `env_state`."""
    for saved in state or ():
        if isinstance(saved.get("state"), dict):
            set_states(user_objects(env), saved["state"].get("objects", {}))


def save_objects(env: Any, folder: Path) -> None:
    """Write the states of the objects that an environment calls into a folder, if any has a state.

    Raises:
        OSError, SafetensorError: if the file cannot be written.
        TypeError: if a state holds something that cannot be saved.
    """
    from safetensors.torch import save_file

    states = states_of(user_objects(env))
    if not states:
        remove(folder / OBJECTS)
        return
    tensors: dict[str, Any] = {}
    text = json.dumps(to_json(states, tensors))
    with replacing(folder / OBJECTS) as new:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new, metadata={"states": text})


def load_objects(folder: str | Path, env: Any) -> None:
    """Put the rewards and other objects of an environment into the state in which a saved agent was trained.

    An object whose path or class is another than in the training is left as it is, and named in the log.

    Args:
        folder: of the saved agent; without states in it, nothing happens.
        env: for example for an evaluation.

    Raises:
        ValueError: if the file is damaged.
    """
    from safetensors import safe_open

    path = Path(folder) / OBJECTS
    if not path.is_file():
        return
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            states = from_json(parse_json(file.metadata()["states"]), tensors)
        different = set_states(user_objects(env), states)
    except Exception as error:  # complete, but not written by `save_objects`: anything may fail
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if different:
        logger.warning("the state of %s is not that of the training: it begins anew", ", ".join(different))


def _known(part: Any) -> bool:
    return _name(part).startswith(KNOWN)


def _inert(value: Any) -> bool:
    """True for values that hold no episode state, or that are handled separately: spaces, functions, environments."""
    if isinstance(value, (list, tuple)):
        return all(_inert(item) for item in value)
    if isinstance(value, dict):
        return all(_inert(item) for item in value.values())
    kinds = (spaces.Space, EnvSpec, gymnasium.Env, gymnasium.vector.VectorEnv, Enum, str, int, float, type(None))
    return isinstance(value, kinds) or callable(value)


def _parts(env: Any) -> Iterator[Any]:
    """Yield the environment, what it wraps, and the single environments inside."""
    yield env
    inner = vars(env).get("envs", None)
    for single in inner if inner is not None else [vars(env)["env"]] if "env" in vars(env) else []:
        yield from _parts(single)


def _name(part: Any) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
