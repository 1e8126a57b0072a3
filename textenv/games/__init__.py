"""Games of several turns with a known best play: string in, string out, and an oracle player for each."""

from textenv.games.best_questions import BestQuestions
from textenv.games.calculator import Calculator, CalculatorPlayer, evaluate
from textenv.games.guess_number import BinarySearch, GuessNumber
from textenv.games.twenty_questions import TwentyQuestions

__all__ = [
    "BestQuestions",
    "BinarySearch",
    "Calculator",
    "CalculatorPlayer",
    "GuessNumber",
    "TwentyQuestions",
    "evaluate",
]
