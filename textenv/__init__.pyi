from . import (
    games as games,
    kl as kl,
    lm as lm,
    prompts as prompts,
    rendering as rendering,
    rewards as rewards,
    rollout as rollout,
)
from .checks.env_checker import check_text_env as check_text_env
from .checks.reward_checker import check_reward as check_reward
from .envs.kl_wrappers import KLReward as KLReward, ReferenceReward as ReferenceReward
from .envs.string_env import StringGames as StringGames, TokenEnv as TokenEnv, TokenVectorEnv as TokenVectorEnv
from .envs.task import Conversation as Conversation, FunctionTask as FunctionTask, Task as Task
from .envs.text_env import TextEnv as TextEnv
from .envs.turn import TRUNCATED as TRUNCATED, Turn as Turn
from .envs.vector_env import TextVectorEnv as TextVectorEnv
from .extras.human.annotator import Annotator as Annotator, Question as Question
from .extras.human.browser import BrowserAnnotator as BrowserAnnotator
from .extras.human.feedback_file import FeedbackFile as FeedbackFile
from .extras.human.human import FeedbackStopped as FeedbackStopped, HumanReward as HumanReward
from .extras.human.terminal import TerminalAnnotator as TerminalAnnotator
from .extras.reasoning_gym import ReasoningGym as ReasoningGym
from .extras.service import RewardService as RewardService, serve_reward as serve_reward
from .extras.torchrl import from_torchrl as from_torchrl, to_torchrl as to_torchrl
from .extras.verifiers import Verifiers as Verifiers
from .kl.coefficients import AdaptiveCoefficient as AdaptiveCoefficient, ScheduledCoefficient as ScheduledCoefficient
from .kl.estimators import k1 as k1, k2 as k2, k3 as k3
from .kl.penalty import KLPenalty as KLPenalty
from .lm.model import LanguageModel as LanguageModel
from .prompts.files import load_prompts as load_prompts
from .prompts.prompts import (
    Prompt as Prompt,
    PromptList as PromptList,
    check_no_overlap as check_no_overlap,
    split_prompts as split_prompts,
)
from .rendering import render_rollout as render_rollout
from .rewards.composite import Rewards as Rewards
from .rewards.reward_model import RewardModel as RewardModel
from .rewards.scores import RewardError as RewardError, Scores as Scores
from .tasks.builtin import make_task as make_task
