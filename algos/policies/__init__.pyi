from .cnn import CNNPolicy as CNNPolicy
from .critic import Critic as Critic
from .gsde import GSDEPolicy as GSDEPolicy
from .lm import LMPolicy as LMPolicy
from .lstm import LSTMPolicy as LSTMPolicy
from .mlp import MLPPolicy as MLPPolicy
from .policy import Policy as Policy, Step as Step
from .q_network import QPolicy as QPolicy
