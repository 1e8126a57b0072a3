"""Text as a Gymnasium environment: prefixes are states, tokens are actions."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from textenv.registration import register_envs

if TYPE_CHECKING:
    from textenv.asker import Asker, Question
    from textenv.checker import check_text_env
    from textenv.env import TextEnv
    from textenv.feedback_file import FeedbackFile
    from textenv.human import FeedbackStopped, HumanReward
    from textenv.kl import KLPenalty
    from textenv.kl_coefficients import AdaptiveCoefficient, ScheduledCoefficient
    from textenv.kl_estimators import k1, k2, k3
    from textenv.kl_wrappers import KLReward, ReferenceReward
    from textenv.lm.model import LanguageModel
    from textenv.lm.reward_model import RewardModel
    from textenv.prompt_files import load_prompts
    from textenv.prompts import Prompt, PromptList, check_no_overlap, split_prompts
    from textenv.reasoning_gym import ReasoningGym
    from textenv.rendering import render_rollout
    from textenv.reward_checker import check_reward
    from textenv.rewards.composite import Rewards
    from textenv.scores import RewardError, Scores
    from textenv.task import Conversation, FunctionTask, Task
    from textenv.tasks import make_task
    from textenv.terminal_asker import TerminalAsker
    from textenv.token_env import StringGames, TokenEnv, TokenVectorEnv
    from textenv.torchrl_adapter import from_torchrl, to_torchrl
    from textenv.turn import TRUNCATED, Turn
    from textenv.vector_env import TextVectorEnv

# Where each public name lives. Imported at first use: a control run never pays for transformers.
_HOMES = {
    "AdaptiveCoefficient": "textenv.kl_coefficients",
    "Asker": "textenv.asker",
    "Conversation": "textenv.task",
    "FeedbackFile": "textenv.feedback_file",
    "FeedbackStopped": "textenv.human",
    "FunctionTask": "textenv.task",
    "HumanReward": "textenv.human",
    "KLPenalty": "textenv.kl",
    "KLReward": "textenv.kl_wrappers",
    "LanguageModel": "textenv.lm.model",
    "Prompt": "textenv.prompts",
    "PromptList": "textenv.prompts",
    "Question": "textenv.asker",
    "ReasoningGym": "textenv.reasoning_gym",
    "ReferenceReward": "textenv.kl_wrappers",
    "RewardError": "textenv.scores",
    "RewardModel": "textenv.lm.reward_model",
    "Rewards": "textenv.rewards.composite",
    "ScheduledCoefficient": "textenv.kl_coefficients",
    "Scores": "textenv.scores",
    "StringGames": "textenv.token_env",
    "TRUNCATED": "textenv.task",
    "Task": "textenv.task",
    "TerminalAsker": "textenv.terminal_asker",
    "TextEnv": "textenv.env",
    "TextVectorEnv": "textenv.vector_env",
    "TokenEnv": "textenv.token_env",
    "TokenVectorEnv": "textenv.token_env",
    "Turn": "textenv.task",
    "check_no_overlap": "textenv.prompts",
    "check_reward": "textenv.reward_checker",
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
    "AdaptiveCoefficient", "Asker", "Conversation", "FeedbackFile", "FeedbackStopped", "FunctionTask",
    "HumanReward", "KLPenalty", "KLReward", "LanguageModel", "Prompt", "PromptList", "Question", "ReasoningGym",
    "ReferenceReward", "RewardError", "RewardModel", "Rewards", "ScheduledCoefficient", "Scores", "StringGames",
    "TRUNCATED", "Task", "TerminalAsker", "TextEnv", "TextVectorEnv", "TokenEnv", "TokenVectorEnv", "Turn",
    "check_no_overlap", "check_reward", "check_text_env", "from_torchrl", "k1", "k2", "k3", "load_prompts",
    "make_task", "render_rollout", "split_prompts", "to_torchrl",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if not name.startswith("_") and importlib.util.find_spec(f"textenv.{name}") is not None:
        return importlib.import_module(f"textenv.{name}")
    raise AttributeError(f"module 'textenv' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


register_envs()
