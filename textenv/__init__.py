"""Text as a Gymnasium environment: prefixes are states, tokens are actions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from textenv.registration import register_envs

if TYPE_CHECKING:
    from textenv.checker import check_text_env
    from textenv.env import TextEnv
    from textenv.kl import KLPenalty, k1
    from textenv.kl_wrappers import KLReward, ReferenceReward
    from textenv.lm.model import LanguageModel
    from textenv.lm.reward_model import RewardModel
    from textenv.prompt_files import load_prompts
    from textenv.prompts import Prompt, PromptList, check_no_overlap, split_prompts
    from textenv.reasoning_gym import ReasoningGym
    from textenv.rendering import render_rollout
    from textenv.reward_checker import check_reward
    from textenv.task import TRUNCATED, Conversation, FunctionTask, Task, Turn
    from textenv.tasks import make_task
    from textenv.token_env import StringGames, TokenEnv, TokenVectorEnv
    from textenv.torchrl_adapter import from_torchrl, to_torchrl
    from textenv.vector_env import TextVectorEnv

# Where each public name lives. Imported at first use: a control run never pays for transformers.
_HOMES = {
    "Conversation": "textenv.task",
    "FunctionTask": "textenv.task",
    "KLPenalty": "textenv.kl",
    "KLReward": "textenv.kl_wrappers",
    "LanguageModel": "textenv.lm.model",
    "Prompt": "textenv.prompts",
    "PromptList": "textenv.prompts",
    "ReasoningGym": "textenv.reasoning_gym",
    "ReferenceReward": "textenv.kl_wrappers",
    "RewardModel": "textenv.lm.reward_model",
    "StringGames": "textenv.token_env",
    "TRUNCATED": "textenv.task",
    "Task": "textenv.task",
    "TextEnv": "textenv.env",
    "TextVectorEnv": "textenv.vector_env",
    "TokenEnv": "textenv.token_env",
    "TokenVectorEnv": "textenv.token_env",
    "Turn": "textenv.task",
    "check_no_overlap": "textenv.prompts",
    "check_reward": "textenv.reward_checker",
    "check_text_env": "textenv.checker",
    "from_torchrl": "textenv.torchrl_adapter",
    "k1": "textenv.kl",
    "load_prompts": "textenv.prompt_files",
    "make_task": "textenv.tasks",
    "render_rollout": "textenv.rendering",
    "split_prompts": "textenv.prompts",
    "to_torchrl": "textenv.torchrl_adapter",
}
__all__ = [
    "Conversation", "FunctionTask", "KLPenalty", "KLReward", "LanguageModel", "Prompt", "PromptList",
    "ReasoningGym", "ReferenceReward", "RewardModel", "StringGames", "TRUNCATED", "Task", "TextEnv",
    "TextVectorEnv", "TokenEnv", "TokenVectorEnv", "Turn", "check_no_overlap", "check_reward", "check_text_env",
    "from_torchrl", "k1", "load_prompts", "make_task", "render_rollout", "split_prompts", "to_torchrl",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'textenv' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


register_envs()
