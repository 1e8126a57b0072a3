"""The algorithms by name: for the command line, comparisons and benchmarks."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from algos.agent import Agent
from algos.config import Config

AlgorithmName = Literal["ppo", "a2c", "reinforce", "rloo", "grpo", "trpo", "dqn"]
"""What ``--algo`` takes."""
_CLASSES = {
    "ppo": "PPO", "a2c": "A2C", "reinforce": "REINFORCE", "rloo": "RLOO", "grpo": "GRPO", "trpo": "TRPO", "dqn": "DQN",
}  # fmt: skip
GROUPED = ("rloo", "grpo")
"""Those that compare episodes with one start, so that a control environment is reset by a seed for each slot."""


def find_algorithm(name: str) -> type[Agent]:
    """The class of an algorithm.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in _CLASSES:
        raise ValueError(f"algorithm is {name!r}, expected one of {', '.join(_CLASSES)}")
    return getattr(importlib.import_module(f"algos.{name}"), _CLASSES[name])


def make_agent(name: str, env: Any, policy: Any, config: Config) -> Agent:
    """An algorithm by name, on an environment and with a policy and a config of its kind."""
    return find_algorithm(name)(env, policy, config)
