from .reward_model import RewardModelConfig as RewardModelConfig, train_reward_model as train_reward_model
from .sft import SFTConfig as SFTConfig, sft as sft
from .text_loss import TextLoss as TextLoss
