"""Text as a Gymnasium environment: prefixes are states, tokens are actions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from textenv.registration import register_envs

if TYPE_CHECKING:
    from textenv.env import TextEnv
    from textenv.kl import KLPenalty, k1
    from textenv.kl_wrappers import KLReward, ReferenceReward
    from textenv.lm.classifier import Classifier
    from textenv.lm.model import LanguageModel
    from textenv.task import FunctionTask, Prompt, PromptList, Task, Turn
    from textenv.tasks import make_task
    from textenv.vector_env import TextVectorEnv

# Where each public name lives. Imported at first use: a control run never pays for transformers.
_HOMES = {
    "Classifier": "textenv.lm.classifier",
    "FunctionTask": "textenv.task",
    "KLPenalty": "textenv.kl",
    "KLReward": "textenv.kl_wrappers",
    "LanguageModel": "textenv.lm.model",
    "Prompt": "textenv.task",
    "PromptList": "textenv.task",
    "ReferenceReward": "textenv.kl_wrappers",
    "Task": "textenv.task",
    "TextEnv": "textenv.env",
    "TextVectorEnv": "textenv.vector_env",
    "Turn": "textenv.task",
    "k1": "textenv.kl",
    "make_task": "textenv.tasks",
}
__all__ = [
    "Classifier", "FunctionTask", "KLPenalty", "KLReward", "LanguageModel", "Prompt", "PromptList",
    "ReferenceReward", "Task", "TextEnv", "TextVectorEnv", "Turn", "k1", "make_task",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'textenv' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


register_envs()
