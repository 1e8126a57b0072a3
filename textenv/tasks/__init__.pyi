from .builtin import make_task as make_task
from .reasoning_gym import ReasoningGym as ReasoningGym
from .verifiers import Verifiers as Verifiers
