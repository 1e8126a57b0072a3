from . import rewards as rewards
from .checks.env_checker import check_text_env as check_text_env
from .checks.reward_checker import check_reward as check_reward
from .envs.kl_wrappers import KLReward as KLReward, ReferenceReward as ReferenceReward
from .envs.string_env import TokenVectorEnv as TokenVectorEnv
from .envs.text_env import TextEnv as TextEnv
from .envs.turn import TRUNCATED as TRUNCATED
from .envs.vector_env import TextVectorEnv as TextVectorEnv
from .extras.guidance import Guided as Guided
from .extras.human.human import HumanReward as HumanReward
from .extras.pettingzoo import from_pettingzoo as from_pettingzoo
from .extras.reasoning_gym import ReasoningGym as ReasoningGym
from .extras.service import RewardService as RewardService, serve_reward as serve_reward
from .extras.textarena import TextArena as TextArena
from .extras.torchrl import from_torchrl as from_torchrl, to_torchrl as to_torchrl
from .extras.verifiers import Verifiers as Verifiers
from .gateway.vector_env import Gateway as Gateway
from .kl.coefficients import AdaptiveCoefficient as AdaptiveCoefficient, ScheduledCoefficient as ScheduledCoefficient
from .kl.penalty import KLPenalty as KLPenalty
from .lm.model import LanguageModel as LanguageModel
from .programs.run import LimitReached as LimitReached
from .programs.vector_env import ProgramVectorEnv as ProgramVectorEnv
from .prompts.files import load_prompts as load_prompts
from .prompts.prompts import Prompt as Prompt, check_no_overlap as check_no_overlap, split_prompts as split_prompts
from .prompts.samplers import ByPassRate as ByPassRate, Curriculum as Curriculum
from .rendering import render_rollout as render_rollout
from .rewards.composite import Rewards as Rewards
from .rewards.reward_model import RewardModel as RewardModel
from .words.wrapper import LanguageWrapper as LanguageWrapper
