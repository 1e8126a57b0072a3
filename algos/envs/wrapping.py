"""Single environments by their specification, and their wrappers by function or by name."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

VECTOR_ONLY = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")
"""Arguments of a vector environment's spec that the environment itself does not have."""
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


def single_environment(spec: EnvSpec, **arguments: Any) -> gymnasium.Env:
    """Make a single environment of the kind that a vector environment with this specification has.

    Args:
        spec: specification of the vector environment.
        arguments: further arguments of the environment.

    Raises:
        ValueError: as `make_wrapped`.
    """
    own_arguments = {name: value for name, value in spec.kwargs.items() if name not in VECTOR_ONLY}
    return make_wrapped(spec.id, spec.kwargs.get("wrappers", ()), **(own_arguments | arguments))
