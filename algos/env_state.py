"""What an environment is in the middle of, where that can be told from its attributes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from algos.state import attributes, set_attributes

logger = logging.getLogger(__name__)
KNOWN = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text", "gymnasium.vector", "gymnasium.wrappers",
         "textenv", "algos")  # fmt: skip
"""Packages whose environments are what their attributes say. Of others (a simulator's memory) nobody knows."""

_TOLD: WeakSet[Any] = WeakSet()
"""Environments that cannot be saved and of which this was said."""


def env_state(env: Any) -> list[dict[str, Any]] | None:
    """State of an environment, wrapper by wrapper, single environments inside a vector included.

    Args:
        env: a `gymnasium.Env` or `gymnasium.vector.VectorEnv`. One with ``state_dict`` and ``load_state_dict`` says
            itself what it is; of the others the attributes that are numbers, text, arrays and random generators.

    Returns:
        What `set_env_state` takes; None if a part is of a package where attributes are not known to be all, or
        runs in another process. Such an environment is reset when a run goes on.
    """
    state = []
    for part in _parts(env):
        if hasattr(part, "state_dict"):
            state.append({"class": _name(part), "state": part.state_dict()})
        elif _name(part).startswith(KNOWN) and not hasattr(part, "processes"):
            state.append({"class": _name(part), "state": attributes(part)})
        else:
            if env not in _TOLD:
                _TOLD.add(env)
                logger.warning(
                    "%s cannot be saved in mid-episode: a run that goes on resets it, and differs", _name(part)
                )
            return None
    return state


def set_env_state(env: Any, state: list[dict[str, Any]]) -> None:
    """Put an environment into the middle of what another one of its kind was in.

    Args:
        env: made as the other was; it is reset first, for what it makes then.
        state: from `env_state`.

    Raises:
        ValueError: if it is wrapped or built otherwise.
    """
    env.reset(seed=0)
    parts = list(_parts(env))
    if [_name(part) for part in parts] != [saved["class"] for saved in state]:
        raise ValueError(
            f"the environment is {' > '.join(map(_name, parts))}, the saved one was "
            f"{' > '.join(saved['class'] for saved in state)}: make it as the run made it"
        )
    for part, saved in zip(parts, state, strict=True):
        if hasattr(part, "load_state_dict"):
            part.load_state_dict(saved["state"])
        else:
            set_attributes(part, saved["state"])


def _parts(env: Any) -> Iterator[Any]:
    """The environment, what it wraps, and the single environments inside."""
    yield env
    inner = vars(env).get("envs", None)
    for single in inner if inner is not None else [vars(env)["env"]] if "env" in vars(env) else []:
        yield from _parts(single)


def _name(part: Any) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
