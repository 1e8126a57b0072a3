from . import presets as presets
from .a2c import A2C as A2C, A2CConfig as A2CConfig
from .agent import Agent as Agent
from .collection import Collector as Collector, collect as collect
from .dqn import DQN as DQN, DQNConfig as DQNConfig
from .envs.subprocess_env import SubprocessVectorEnv as SubprocessVectorEnv
from .evaluation import EvaluateEvery as EvaluateEvery, evaluate as evaluate
from .extras.vllm import VLLM as VLLM
from .finetuning.reward_model import RewardModelConfig as RewardModelConfig, train_reward_model as train_reward_model
from .finetuning.sft import SFTConfig as SFTConfig, sft as sft
from .finetuning.text_loss import TextLoss as TextLoss
from .grpo import GRPO as GRPO, GRPOConfig as GRPOConfig
from .lab.comparison.compare import compare as compare
from .lab.comparison.report import report as report
from .lab.comparison.summary import Case as Case
from .lab.comparison.tune import tune as tune
from .lab.model_card import push_to_hub as push_to_hub
from .policies.cnn import CNNPolicy as CNNPolicy
from .policies.critic import Critic as Critic
from .policies.gsde import GSDEPolicy as GSDEPolicy, SACGSDEPolicy as SACGSDEPolicy
from .policies.lm import LMPolicy as LMPolicy
from .policies.lstm import LSTMPolicy as LSTMPolicy
from .policies.mlp import MLPPolicy as MLPPolicy
from .policies.multi_input import MultiInputPolicy as MultiInputPolicy
from .policies.policy import Policy as Policy
from .policies.q_network import QPolicy as QPolicy
from .policies.registry import make_policy as make_policy
from .policies.twin_critics import SACPolicy as SACPolicy, TD3Policy as TD3Policy
from .policies.words import WordsPolicy as WordsPolicy
from .ppo import PPO as PPO, PPOConfig as PPOConfig
from .recipe import Recipe as Recipe
from .reinforce import REINFORCE as REINFORCE, REINFORCEConfig as REINFORCEConfig
from .reinforce_plus_plus import (
    REINFORCEPlusPlus as REINFORCEPlusPlus,
    REINFORCEPlusPlusConfig as REINFORCEPlusPlusConfig,
)
from .rloo import RLOO as RLOO, RLOOConfig as RLOOConfig
from .sac import SAC as SAC, SACConfig as SACConfig
from .td3 import TD3 as TD3, TD3Config as TD3Config
from .training.callbacks import StopAtKL as StopAtKL
from .training.invariants import InvariantError as InvariantError
from .training.league import League as League
from .training.run import Callback as Callback
from .training.save import from_hub as from_hub, load as load
from .trpo import TRPO as TRPO, TRPOConfig as TRPOConfig
