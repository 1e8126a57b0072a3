"""Save and restore mid-episode state of Gymnasium environments."""

import logging
from collections.abc import Iterator
from enum import Enum
from typing import Any
from weakref import WeakSet

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from algos.training.serialization import Stateful, attributes, set_attributes

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
