from .cnn import CNNPolicy as CNNPolicy
from .critic import Critic as Critic
from .distributions import action_distribution as action_distribution
from .gsde import GSDEPolicy as GSDEPolicy, SACGSDEPolicy as SACGSDEPolicy
from .lm import LMPolicy as LMPolicy
from .lstm import LSTMPolicy as LSTMPolicy
from .mlp import MLPPolicy as MLPPolicy
from .multi_input import MultiInputPolicy as MultiInputPolicy
from .policy import (
    ControlPolicy as ControlPolicy,
    Policy as Policy,
    Step as Step,
    step_values as step_values,
    unflatten as unflatten,
)
from .q_network import QPolicy as QPolicy
from .twin_critics import SACPolicy as SACPolicy, TD3Policy as TD3Policy
