"""A modular kit: one interface that trains control policies and language models."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algos import presets
    from algos.a2c import A2C, A2CConfig
    from algos.agent import Agent
    from algos.checkpoint import load
    from algos.cnn import CNNPolicy
    from algos.collection import Cursor, collect
    from algos.critic import Critic
    from algos.dqn import DQN, DQNConfig
    from algos.evaluation import evaluate
    from algos.fine_tuning import SFTConfig, sft
    from algos.grpo import GRPO, GRPOConfig
    from algos.lm import LMPolicy
    from algos.lstm import LSTMPolicy
    from algos.mlp import MLPPolicy
    from algos.ppo import PPO, PPOConfig
    from algos.q_network import QPolicy
    from algos.reinforce import REINFORCE, REINFORCEConfig
    from algos.reward_modelling import RewardModelConfig, train_reward_model
    from algos.rloo import RLOO, RLOOConfig
    from algos.text_stream import TextLoss
    from algos.trpo import TRPO, TRPOConfig

# Where each public name lives. Imported at first use: a control run never pays for transformers.
_HOMES = {
    "A2C": "algos.a2c",
    "A2CConfig": "algos.a2c",
    "Agent": "algos.agent",
    "CNNPolicy": "algos.cnn",
    "Critic": "algos.critic",
    "Cursor": "algos.collection",
    "DQN": "algos.dqn",
    "DQNConfig": "algos.dqn",
    "GRPO": "algos.grpo",
    "GRPOConfig": "algos.grpo",
    "LMPolicy": "algos.lm",
    "LSTMPolicy": "algos.lstm",
    "MLPPolicy": "algos.mlp",
    "PPO": "algos.ppo",
    "PPOConfig": "algos.ppo",
    "QPolicy": "algos.q_network",
    "REINFORCE": "algos.reinforce",
    "REINFORCEConfig": "algos.reinforce",
    "RLOO": "algos.rloo",
    "RLOOConfig": "algos.rloo",
    "RewardModelConfig": "algos.reward_modelling",
    "SFTConfig": "algos.fine_tuning",
    "TRPO": "algos.trpo",
    "TRPOConfig": "algos.trpo",
    "TextLoss": "algos.text_stream",
    "collect": "algos.collection",
    "evaluate": "algos.evaluation",
    "load": "algos.checkpoint",
    "sft": "algos.fine_tuning",
    "train_reward_model": "algos.reward_modelling",
}
__all__ = [
    "A2C", "A2CConfig", "Agent", "CNNPolicy", "Critic", "Cursor", "DQN", "DQNConfig", "GRPO", "GRPOConfig", "LMPolicy",
    "LSTMPolicy", "MLPPolicy", "PPO", "PPOConfig", "QPolicy", "REINFORCE", "REINFORCEConfig", "RLOO", "RLOOConfig",
    "RewardModelConfig", "SFTConfig", "TRPO", "TRPOConfig", "TextLoss", "collect", "evaluate", "load", "presets", "sft",
    "train_reward_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if not name.startswith("_") and importlib.util.find_spec(f"algos.{name}") is not None:
        return importlib.import_module(f"algos.{name}")
    raise AttributeError(f"module 'algos' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
