from .kl_wrappers import KLReward as KLReward, ReferenceReward as ReferenceReward
from .string_env import StringGames as StringGames, TokenEnv as TokenEnv, TokenVectorEnv as TokenVectorEnv
from .task import Conversation as Conversation, FunctionTask as FunctionTask, Task as Task
from .text_env import TextEnv as TextEnv
from .turn import TRUNCATED as TRUNCATED, Turn as Turn
from .vector_env import TextVectorEnv as TextVectorEnv
