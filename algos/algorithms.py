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
CONTROL_POLICIES = {
    "mlp": "algos.mlp:MLPPolicy", "cnn": "algos.cnn:CNNPolicy", "lstm": "algos.lstm:LSTMPolicy",
    "q": "algos.q_network:QPolicy",
}  # fmt: skip
"""Where the policies live that one file of weights and JSON arguments restore."""
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


def find_policy(name: str) -> Any:
    """The class of a control policy, by its name in `CONTROL_POLICIES` or its class's; raises a ValueError."""
    for short, home in CONTROL_POLICIES.items():
        module, _, own = home.partition(":")
        if name in (short, own):
            return getattr(importlib.import_module(module), own)
    raise ValueError(f"policy is {name!r}, expected auto, {', '.join(CONTROL_POLICIES)}")


def make_agent(name: str, env: Any, policy: Any, config: Config, *, kl_coefficient: float | None = None) -> Agent:
    """An algorithm by name, on an environment and with a policy and a config of its kind.

    With a coefficient, a text environment that carries no penalty is charged for the KL to the policy as it is now.
    """
    from algos.learning import choose_penalty
    from textenv.rollout import is_episode_env

    more = {}
    if kl_coefficient is not None and is_episode_env(env) and choose_penalty(env, None) is None:
        from textenv.kl import KLPenalty

        more["penalty"] = KLPenalty(policy.reference(), kl_coefficient)
    return find_algorithm(name)(env, policy, config, **more)
