"""Text as a Gymnasium environment: prefixes are states, tokens are actions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from textenv.registration import register_envs

if TYPE_CHECKING:
    from textenv.checker import check_text_env
    from textenv.env import TextEnv
    from textenv.kl import KLPenalty
    from textenv.kl_coefficients import AdaptiveCoefficient, ScheduledCoefficient
    from textenv.kl_estimators import k1, k2, k3
    from textenv.kl_wrappers import KLReward, ReferenceReward
    from textenv.lm.classifier import Classifier
    from textenv.lm.model import LanguageModel
    from textenv.prompt_files import load_prompts
    from textenv.prompts import Prompt, PromptList, check_no_overlap, split_prompts
    from textenv.reasoning_gym import ReasoningGym
    from textenv.rendering import render_rollout
    from textenv.task import TRUNCATED, Conversation, FunctionTask, Task, Turn
    from textenv.tasks import make_task
    from textenv.token_env import StringGames, TokenEnv, TokenVectorEnv
    from textenv.torchrl_adapter import from_torchrl, to_torchrl
    from textenv.vector_env import TextVectorEnv

# Where each public name lives. Imported at first use: a control run never pays for transformers.
_HOMES = {
    "AdaptiveCoefficient": "textenv.kl_coefficients",
    "Classifier": "textenv.lm.classifier",
    "Conversation": "textenv.task",
    "FunctionTask": "textenv.task",
    "KLPenalty": "textenv.kl",
    "KLReward": "textenv.kl_wrappers",
    "LanguageModel": "textenv.lm.model",
    "Prompt": "textenv.prompts",
    "PromptList": "textenv.prompts",
    "ReasoningGym": "textenv.reasoning_gym",
    "ReferenceReward": "textenv.kl_wrappers",
    "ScheduledCoefficient": "textenv.kl_coefficients",
    "StringGames": "textenv.token_env",
    "TRUNCATED": "textenv.task",
    "Task": "textenv.task",
    "TextEnv": "textenv.env",
    "TextVectorEnv": "textenv.vector_env",
    "TokenEnv": "textenv.token_env",
    "TokenVectorEnv": "textenv.token_env",
    "Turn": "textenv.task",
    "check_no_overlap": "textenv.prompts",
    "check_text_env": "textenv.checker",
    "from_torchrl": "textenv.torchrl_adapter",
    "k1": "textenv.kl_estimators",
    "k2": "textenv.kl_estimators",
    "k3": "textenv.kl_estimators",
    "load_prompts": "textenv.prompt_files",
    "make_task": "textenv.tasks",
    "render_rollout": "textenv.rendering",
    "split_prompts": "textenv.prompts",
    "to_torchrl": "textenv.torchrl_adapter",
}
__all__ = [
    "AdaptiveCoefficient", "Classifier", "Conversation", "FunctionTask", "KLPenalty", "KLReward", "LanguageModel",
    "Prompt", "PromptList", "ReasoningGym", "ReferenceReward", "ScheduledCoefficient", "StringGames", "TRUNCATED",
    "Task", "TextEnv", "TextVectorEnv", "TokenEnv", "TokenVectorEnv", "Turn", "check_no_overlap", "check_text_env",
    "from_torchrl", "k1", "k2", "k3", "load_prompts", "make_task", "render_rollout", "split_prompts", "to_torchrl",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'textenv' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


register_envs()
