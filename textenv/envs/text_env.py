"""`TextEnv`: `TextVectorEnv` with one slot, as a `gymnasium.Env`."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.core import RenderFrame
from gymnasium.vector import AutoresetMode

from textenv.envs.episode_batch import Info
from textenv.envs.task import Task
from textenv.envs.vector_env import RENDER_MODES, TextObservation, TextVectorEnv


class TextEnv(gymnasium.Env[TextObservation, np.int64]):
    """Text generation, one token per step: state = prefix, action = next token, score at the end.

    Arguments and errors are those of `TextVectorEnv`, without ``num_envs`` and ``autoreset_mode``.

    Example:
        >>> env = gymnasium.make("textenv/Periods-v0")  # doctest: +SKIP
        >>> observation, info = env.reset(seed=1)  # doctest: +SKIP
    """

    metadata = {"render_modes": RENDER_MODES, "render_fps": 10}

    def __init__(self, task: Task | None = None, **arguments: Any) -> None:
        self.vector = TextVectorEnv(task, autoreset_mode=AutoresetMode.DISABLED, **arguments)
        """Vector environment with one slot, which does the work."""
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space
        self.max_length = self.vector.max_length
        self.render_mode = self.vector.render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[TextObservation, Info]:
        """Begin an episode."""
        super().reset(seed=seed)
        observation, info = self.vector.reset(seed=seed, options=options)
        return _first(observation), _first(info)

    def step(self, action: np.int64 | int) -> tuple[TextObservation, float, bool, bool, Info]:
        """Append one token; see `TextVectorEnv.step`."""
        observation, reward, terminated, truncated, info = self.vector.step(np.asarray([action]))
        return (
            _first(observation),
            float(reward[0]),
            bool(terminated[0]),
            bool(truncated[0]),
            _first(info),
        )

    def render(self) -> RenderFrame | None:
        """Render the text so far; see `TextVectorEnv.render`."""
        frames = self.vector.render()
        if frames is None:
            return None
        return frames[0]

    def close(self) -> None:
        """Close the environment; a later `reset` or `step` raises."""
        self.vector.close()


def _first(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return slot 0 of a dictionary of arrays, without Gymnasium's ``_name`` masks; numbers as arrays of shape ()."""
    values = {}
    for name, column in batch.items():
        if name.startswith("_"):
            continue
        value = column[0]
        if np.ndim(value) == 0 and column.dtype != object:
            value = np.asarray(value)
        values[name] = value
    return values
