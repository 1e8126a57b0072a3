"""Text games of several turns with known optimal play: strings in and out, and an optimal player for each."""

from textenv.games.calculator import Calculator, CalculatorPlayer, evaluate
from textenv.games.guess_number import BinarySearch, GuessNumber
from textenv.games.twenty_questions import BestQuestions, TwentyQuestions

__all__ = [
    "BestQuestions",
    "BinarySearch",
    "Calculator",
    "CalculatorPlayer",
    "GuessNumber",
    "TwentyQuestions",
    "evaluate",
]
