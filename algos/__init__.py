"""A modular kit: one interface that trains control policies and language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algos import presets
    from algos.checkpoint import load
    from algos.cnn import CNNPolicy
    from algos.collection import Cursor, collect
    from algos.critic import Critic
    from algos.evaluation import evaluate
    from algos.lm import LMPolicy
    from algos.lstm import LSTMPolicy
    from algos.mlp import MLPPolicy
    from algos.ppo import PPO, PPOConfig

# Where each public name lives. Imported at first use: a control run never pays for transformers.
_HOMES = {
    "CNNPolicy": "algos.cnn",
    "Critic": "algos.critic",
    "Cursor": "algos.collection",
    "LMPolicy": "algos.lm",
    "LSTMPolicy": "algos.lstm",
    "MLPPolicy": "algos.mlp",
    "PPO": "algos.ppo",
    "PPOConfig": "algos.ppo",
    "collect": "algos.collection",
    "evaluate": "algos.evaluation",
    "load": "algos.checkpoint",
}
__all__ = [
    "CNNPolicy", "Critic", "Cursor", "LMPolicy", "LSTMPolicy", "MLPPolicy", "PPO", "PPOConfig", "collect", "evaluate",
    "load", "presets",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "presets":
        return importlib.import_module("algos.presets")
    if name not in _HOMES:
        raise AttributeError(f"module 'algos' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
