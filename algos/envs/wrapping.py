"""Single environments by their specification, and their wrappers by function or by name."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import DictInfoToList, HumanRendering, RecordEpisodeStatistics, RecordVideo

VECTOR_ONLY = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")
"""Arguments of a vector environment's spec that the environment itself does not have."""
NO_LIMIT = -1
"""The ``max_episode_steps`` of `gymnasium.make` that leaves out a registered limit."""
WRAPPERS_THAT_WATCH = (DictInfoToList, HumanRendering, RecordEpisodeStatistics, RecordVideo)
"""Wrappers of a vector environment that change nothing of what is observed, acted or rewarded."""
Wrapper = str | Callable[[gymnasium.Env], gymnasium.Env]
"""Function that gets an environment and returns a wrapped one, or its name (``module:name``, ``file.py:name``)."""


class CopiesFinalObservation(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Copies the observation that ends an episode, because the reset that follows may write into the same arrays.

    Gymnasium's ``SyncVectorEnv`` does not in SAME_STEP mode, where it resets before it returns that observation.
    """

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            observation = copy.deepcopy(observation)
        return observation, reward, terminated, truncated, info


def make_wrapped(spec: EnvSpec | str, wrappers: Sequence[Wrapper], **arguments: Any) -> gymnasium.Env:
    """Make an environment and wrap it, the innermost wrapper first.

    Raises:
        ValueError: if a wrapper is unknown, fails, or returns no environment.
    """
    env = gymnasium.make(spec, **arguments)
    for wrapper in wrappers:
        from textenv.importing import load_function  # a worker without wrappers does not load textenv

        if isinstance(wrapper, str):
            wrap = load_function(wrapper)
        else:
            wrap = wrapper
        try:
            wrapped = wrap(env)
        except Exception as error:  # a user's function may raise anything
            raise ValueError(f"wrapper {wrapper!r} cannot wrap {env}: {error!r}") from error
        if not isinstance(wrapped, gymnasium.Env):
            raise ValueError(f"wrapper {wrapper!r} returned {wrapped!r:.100}, expected the wrapped gymnasium.Env")
        env = wrapped
    return env


def vector_wrappers(env: VectorEnv) -> list[type[VectorWrapper]]:
    """Return the classes that wrap all slots at once, the innermost first, but for `WRAPPERS_THAT_WATCH`.

    Gymnasium's specification of a wrapped vector environment does not have them.
    """
    wrapper_classes = []
    part = env
    while isinstance(part, VectorWrapper):
        if type(part) not in WRAPPERS_THAT_WATCH:
            wrapper_classes.append(type(part))
        part = part.env
    wrapper_classes.reverse()
    return wrapper_classes


def single_environment(env: VectorEnv, **arguments: Any) -> gymnasium.Env:
    """Make a single environment of the kind that a vector environment has.

    Args:
        env: the vector environment, which has a specification (``spec``).
        arguments: further arguments of the environment.

    Raises:
        ValueError: as `make_wrapped`; or if there are `vector_wrappers`, which a single environment would lack.
    """
    lacking = vector_wrappers(env)
    if lacking:
        names = ", ".join(wrapper_class.__name__ for wrapper_class in lacking)
        raise ValueError(
            f"{env} has wrappers of all slots at once ({names}), which a single environment would lack: wrap each "
            "environment instead, gymnasium.make_vec(id, num_envs=8, wrappers=[...])"
        )
    spec = env.spec
    assert spec is not None
    own_arguments = {name: value for name, value in spec.kwargs.items() if name not in VECTOR_ONLY}
    single_spec = dataclasses.replace(spec, kwargs={})
    return make_wrapped(single_spec, spec.kwargs.get("wrappers", ()), **(own_arguments | arguments))
