from .annotator import Annotator as Annotator, Question as Question
from .browser import BrowserAnnotator as BrowserAnnotator
from .feedback_file import FeedbackFile as FeedbackFile
from .human import FeedbackStopped as FeedbackStopped, HumanReward as HumanReward
from .terminal import TerminalAnnotator as TerminalAnnotator
