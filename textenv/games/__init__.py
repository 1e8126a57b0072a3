"""Text games of several turns with known optimal play: strings in and out, and an optimal player for each."""

from textenv.games.calculator import (
    Calculator as Calculator,
    CalculatorPlayer as CalculatorPlayer,
    evaluate as evaluate,
)
from textenv.games.guess_number import BinarySearch as BinarySearch, GuessNumber as GuessNumber
from textenv.games.twenty_questions import BestQuestions as BestQuestions, TwentyQuestions as TwentyQuestions
