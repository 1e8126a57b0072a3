"""A modular kit: one interface that trains control policies and language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algos import presets
    from algos.checkpoint import load
    from algos.cnn import CNNPolicy
    from algos.collection import Cursor, collect
    from algos.evaluation import evaluate
    from algos.fine_tuning import SFTConfig, sft
    from algos.lm import LMPolicy
    from algos.lstm import LSTMPolicy
    from algos.mlp import MLPPolicy
    from algos.ppo import PPO, PPOConfig
    from algos.reward_modelling import RewardModelConfig, train_reward_model
    from algos.text_stream import TextLoss

# Where each public name lives. Imported at first use: a control run never pays for transformers.
_HOMES = {
    "CNNPolicy": "algos.cnn",
    "Cursor": "algos.collection",
    "LMPolicy": "algos.lm",
    "LSTMPolicy": "algos.lstm",
    "MLPPolicy": "algos.mlp",
    "PPO": "algos.ppo",
    "PPOConfig": "algos.ppo",
    "RewardModelConfig": "algos.reward_modelling",
    "SFTConfig": "algos.fine_tuning",
    "TextLoss": "algos.text_stream",
    "collect": "algos.collection",
    "evaluate": "algos.evaluation",
    "load": "algos.checkpoint",
    "sft": "algos.fine_tuning",
    "train_reward_model": "algos.reward_modelling",
}
__all__ = [
    "CNNPolicy", "Cursor", "LMPolicy", "LSTMPolicy", "MLPPolicy", "PPO", "PPOConfig", "RewardModelConfig",
    "SFTConfig", "TextLoss", "collect", "evaluate", "load", "presets", "sft", "train_reward_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "presets":
        return importlib.import_module("algos.presets")
    if name not in _HOMES:
        raise AttributeError(f"module 'algos' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
