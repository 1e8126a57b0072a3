"""Algorithms and policies by name: for the command line, comparisons, saved agents and benchmarks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

from algos.config import A2CConfig, Config, DQNConfig, GRPOConfig, PPOConfig, REINFORCEConfig, RLOOConfig, TRPOConfig

if TYPE_CHECKING:
    from algos.agent import Agent

AlgorithmName = Literal["ppo", "a2c", "reinforce", "rloo", "grpo", "trpo", "dqn"]
"""What ``--algo`` takes."""
CONFIGS: dict[str, type[Config]] = {
    "ppo": PPOConfig, "a2c": A2CConfig, "reinforce": REINFORCEConfig, "rloo": RLOOConfig, "grpo": GRPOConfig,
    "trpo": TRPOConfig, "dqn": DQNConfig,
}  # fmt: skip
"""Config of each algorithm."""
PolicyName = Literal["auto", "mlp", "cnn", "lstm", "q"]
"""What ``--policy`` takes; ``auto`` is a CNN for images and two perceptrons for other control, ``q`` is DQN's."""
GROUPED = ("rloo", "grpo")
"""Those that compare episodes with one start, so that a control environment is reset by a seed for each slot."""


def find_config(name: str) -> type[Config]:
    """The config class of an algorithm.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in CONFIGS:
        raise ValueError(f"algorithm is {name!r}, expected one of {', '.join(CONFIGS)}")
    return CONFIGS[name]


def find_algorithm(name: str) -> type[Agent]:
    """The class of an algorithm; raises as `find_config` does."""
    own = find_config(name).__name__.removesuffix("Config")
    return getattr(importlib.import_module(f"algos.{name}"), own)


def make_agent(name: str, env: Any, policy: Any, config: Config) -> Agent:
    """An algorithm by name, on an environment and with a policy and a config of its kind."""
    return find_algorithm(name)(env, policy, config)
